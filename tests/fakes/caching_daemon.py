"""A real daemon in a process of its own that keeps whatever it is given, and damage to its packs."""

import contextlib
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx

from kvtier._pb import cache_pb2
from kvtier.client.admin import AdminClient
from kvtier.config import DaemonConfig
from tests.fakes.daemon_process import daemon_command, daemon_process
from tests.fakes.waiting import wait_for


@contextlib.contextmanager
def caching_daemon(
    config: DaemonConfig, *, store: str = "all", metrics_port: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon until the block ends, which it must do well."""
    listen = "off" if metrics_port is None else f"127.0.0.1:{metrics_port}"
    settings = [f"KVTIER_CACHE_STORE={store}", f"KVTIER_HTTP_LISTEN={listen}"]
    with daemon_process(["env", *settings, *daemon_command(config)], config.server.socket.parent / "log") as process:
        yield process


def pack_bytes(config: DaemonConfig) -> int:
    """Return the bytes of all packs on disk."""
    return sum(path.stat().st_size for path in config.disk.disk_dir.rglob("*.kvpack"))


def evict_from_memory(config: DaemonConfig, num_chunks: int) -> None:
    """Wait until this many chunks are on disk, and have the daemon drop them from host memory."""
    num_evicted = 0

    def are_evicted() -> bool:
        nonlocal num_evicted
        num_evicted += client.evict_all(tier=cache_pb2.TIER_HOST).num_chunks
        return num_evicted >= num_chunks

    with AdminClient(config.server.socket) as client:
        wait_for(are_evicted)


def is_served(url: str) -> bool:
    """Return whether the daemon serves HTTP there."""
    try:
        return httpx.get(f"{url}/healthz").is_success
    except httpx.TransportError:
        return False


def damaged_chunks(metrics_port: int) -> int:
    """Return how many chunks on disk the daemon has found damaged."""
    url = f"http://127.0.0.1:{metrics_port}"
    wait_for(lambda: is_served(url))  # HTTP comes some time after everything else
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.search(r'^kvtier_damaged_chunks_total{tier="disk"} ([0-9.e+]+)$', text, re.MULTILINE)
    assert found, text
    return int(float(found[1]))


def flip_a_bit_of_each(payloads: Iterable[bytes], folder: Path, suffix: str) -> int:
    """Flip a bit in the middle of each payload that lies uncompressed in a file of the folder; return how many did."""
    files = [*folder.rglob(f"*{suffix}")]
    contents = {path: path.read_bytes() for path in files}
    num_flipped = 0
    for payload in payloads:
        for path, content in contents.items():
            if (place := content.find(payload)) >= 0:
                with path.open("r+b") as file:
                    file.seek(place + len(payload) // 2)
                    file.write(bytes([payload[len(payload) // 2] ^ 1]))
                num_flipped += 1
    return num_flipped


def cut_each_file(folder: Path, suffix: str) -> None:
    """Shorten each file of the folder by a half."""
    for path in folder.rglob(f"*{suffix}"):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
