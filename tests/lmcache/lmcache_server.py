"""LMCache's real server and coordinator, as processes of its environment, and its own load generator."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.process import free_port
from benchmarks.systems.system import PEER_VENVS
from tests.fakes.waiting import wait_for
from tests.lmcache.adapter_process import ROOT, lmcache_environment

START_DEADLINE_S = 90.0
STOP_DEADLINE_S = 30.0
CHUNK_TOKENS = 256
MODEL = "test-model"
"""What `lmcache bench server` calls its model."""


def bench_tokens(number: int, num_tokens: int) -> list[int]:
    """Return the tokens of `lmcache bench server`'s request of this number."""
    return [number, *[9906] * (num_tokens - 1)]


@dataclass(frozen=True)
class Coordinator:
    """A coordinator that runs."""

    url: str

    def pin(self, tokens: Sequence[int]) -> int:
        """Pin tokens; returns how many objects that are."""
        return int(self._call("POST", tokens)["affected"])

    def unpin(self, tokens: Sequence[int]) -> None:
        """End a pin."""
        self._call("DELETE", tokens)

    def _call(self, method: str, tokens: Sequence[int]) -> dict[str, Any]:
        body = {"model_name": MODEL, "world_size": 1, "token_ids": [*tokens], "cache_salt": ""}
        answer: dict[str, Any] = (
            httpx.request(method, f"{self.url}/cache/pins", json=body, timeout=10).raise_for_status().json()
        )
        return answer


@contextlib.contextmanager
def coordinator(folder: Path) -> Iterator[Coordinator]:
    """Run a coordinator until the block ends; its pins are kept in the folder."""
    port = free_port()
    flags = {"--host": "127.0.0.1", "--port": port, "--chunk-size": CHUNK_TOKENS, "--metadata-path": folder / "pins"}
    url = f"http://127.0.0.1:{port}"
    with _running("coordinator", flags, f"{url}/cache/pins", folder / "coordinator.log"):
        yield Coordinator(url)


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    port: int
    url: str

    def status(self) -> dict[str, Any]:
        """Return what it reports."""
        status: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=10).json()
        return status

    def bench(self, first: int, end: int, num_tokens: int) -> str:
        """Have LMCache's load generator store and load requests with these numbers; returns what it printed."""
        flags = {
            "--rpc-url": f"tcp://127.0.0.1:{self.port}",
            "--url": self.url,
            "--mode": "cpu",
            "--num-tokens": num_tokens - 1,
            "--kvcache-shape-spec": "(2,128,16,2,32):bfloat16:2",
            "--num-blocks": 128,
            "--start": first,
            "--end": end,
            "--interval": 0,
        }
        command = _command("bench", flags, "server")
        return subprocess.run(
            command, cwd=ROOT, env=lmcache_environment(), check=True, text=True, capture_output=True, timeout=90
        ).stdout


@contextlib.contextmanager
def server(folder: Path, adapter_spec: Mapping[str, Any], coordinator_url: str) -> Iterator[Server]:
    """Run a server with an L2 adapter until the block ends; its own memory is empty at the start."""
    port, http_port = free_port(), free_port()
    flags = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-host": "127.0.0.1",
        "--http-port": http_port,
        "--chunk-size": CHUNK_TOKENS,
        "--l1-size-gb": 1,
        "--supported-transfer-mode": "auto",
        "--shm-name": f"kvtier_test_{port}",
        "--eviction-policy": "LRU",
        "--coordinator-url": coordinator_url,
        "--l2-adapter": json.dumps(adapter_spec),
    }
    url = f"http://127.0.0.1:{http_port}"
    try:
        with _running("server", flags, f"{url}/healthcheck", folder / "server.log"):
            yield Server(port, url)
    finally:
        for path in Path("/dev/shm").glob(f"*kvtier_test_{port}*"):
            path.unlink(missing_ok=True)


def _command(name: str, flags: Mapping[str, object], *words: str) -> list[str]:
    parts = [str(part) for flag in flags.items() for part in flag]
    return [str(PEER_VENVS / "lmcache" / "bin" / "python"), "-m", "lmcache.cli.main", name, *words, *parts]


@contextlib.contextmanager
def _running(name: str, flags: Mapping[str, object], health: str, log: Path) -> Iterator[None]:
    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(health, timeout=5).status_code == httpx.codes.OK
        return False

    with log.open("ab") as output:
        process = subprocess.Popen(
            [*_command(name, flags), "--disable-metrics"],
            cwd=ROOT,
            env=lmcache_environment(),
            stdout=output,
            stderr=output,
        )
    try:
        wait_for(answers, START_DEADLINE_S)
        yield
        process.terminate()
        process.wait(STOP_DEADLINE_S)
    finally:
        process.kill()
        process.wait()
