"""What more chunks cost: start-up, memory of the index, lookups.

usage: python -m benchmarks.growth [--chunks 0,1000,10000,100000,1000000] [--rounds 7]

Real packs and a real ledger of chunks of 64 bytes (only their number matters here). Start-up is that of a real
kvtier-daemon, from exec to its first answer; an empty one beside it shows what the interpreter and gRPC take. The index
is what the service's memory grows by (tracemalloc). Lookups are Acquires of 2,000 keys: in the service (the call alone,
wall time), and as a round trip over gRPC.
"""

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.harness.daemon import Daemon
from benchmarks.measuring.daemon_fixtures import FINGERPRINT, LAYOUT, STATE, config_over
from benchmarks.measuring.machine import machine_line, spread
from kvtier.config import DaemonConfig
from kvtier.core.fingerprint import namespace_id
from kvtier.core.layout import ChunkKey
from kvtier.disk.base import ChunkPayload
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.ledger import Ledger, NamespaceRow
from kvtier.service import Cache, EngineHello
from kvtier.tiering.namespace import Namespace
from tests.fakes.rig import at_once
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, running

CHUNKS_PER_PACK = 1000
LOOKUP_KEYS = 2000
HEADER = ("chunks", "exec to ready", "resident", "index bytes a chunk", "lookup of 2,000", "over gRPC")


class SilentPeer:
    """An engine that ignores every message."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


def fill(disk_dir: Path, num_chunks: int) -> list[ChunkKey]:
    """Write packs and ledger; return the keys."""
    disk_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk, ledger = PackTier(disk_dir / "packs"), Ledger.open(disk_dir / "ledger.sqlite")
    own_id = namespace_id(FINGERPRINT)
    row = NamespaceRow(
        namespace_id=own_id, model="model", fingerprint=FINGERPRINT, layout=LAYOUT, created_unix_s=1.0, seen_unix_s=1.0
    )
    ledger.put_namespace(row)
    keys = [chunk_key(number) for number in range(num_chunks)]
    with ledger.together():
        for first in range(0, num_chunks, CHUNKS_PER_PACK):
            payloads = [_payload(key) for key in keys[first : first + CHUNKS_PER_PACK]]
            ledger.packs.commit_pack(disk.write_pack(own_id, payloads))
    ledger.close()
    return keys


def _payload(key: ChunkKey) -> ChunkPayload:
    data = (key * 2)[:64]
    return ChunkPayload(key=key, segments=[memoryview(data)], checksum=xxhash.xxh3_64_intdigest(data))


def start_times(home: Path, rounds: int) -> tuple[list[float], int]:
    """Start a real daemon again and again; return seconds to ready, and its resident bytes."""
    seconds, resident = [], 0
    daemon = Daemon(home, host_bytes="256MiB")
    for _ in range(rounds):
        with daemon:
            seconds.append(daemon.ready_s)
            status = Path(f"/proc/{daemon.pid}/status").read_text()
            resident = int(status.split("VmRSS:")[1].split()[0]) * 1024
    return seconds, resident


async def index_bytes(config: DaemonConfig) -> int:
    """Return how many bytes the service holds after it has opened this state."""
    gc.collect()
    tracemalloc.start()
    cache = await Cache.open(config)
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    await cache.close()
    return num_bytes


async def lookup_times(config: DaemonConfig, keys: Sequence[ChunkKey], rounds: int) -> list[float]:
    """Return seconds of an Acquire of host-resident chunks in the service, without gRPC."""
    cache = await Cache.open(config)
    hello = EngineHello(
        engine_id="e", pid=1, vllm_version="", model_names=("model",), fingerprint=FINGERPRINT,
        layout=LAYOUT, store_credits=1, ephemeral=False,
    )  # fmt: skip
    peer: Any = SilentPeer()
    session = await cache.attach(hello, peer)
    at_once(session.loads.acquire(1, keys))
    await _all_readable(cache.namespaces[session.namespace_id], keys)
    at_once(session.loads.release(1, None))
    seconds = []
    for number in range(2, rounds + 2):
        began_s = time.perf_counter()
        at_once(session.loads.acquire(number, keys))
        seconds.append(time.perf_counter() - began_s)
        at_once(session.loads.release(number, None))
        await asyncio.sleep(0)
    cache.end(session)
    await cache.close()
    return seconds


async def _all_readable(namespace: Namespace, keys: Sequence[ChunkKey]) -> None:
    while True:  # the silent peer ignores what the service sends: poll
        chunks = [namespace.table.get(key) for key in keys]
        if all(chunk is not None and chunk.readable for chunk in chunks):
            return
        await asyncio.sleep(0.01)


async def round_trips(config: DaemonConfig, keys: Sequence[ChunkKey], rounds: int) -> list[float]:
    """Return seconds of the same over gRPC, from sending the Acquire to its complete answer."""
    seconds = []
    async with running(config), ScriptedEngine(config, LAYOUT, fingerprint=FINGERPRINT, store_credits=1) as engine:
        await engine.acquire(1, keys)
        await engine.release(1)
        for number in range(2, rounds + 2):
            began_s = time.perf_counter()
            assert len(await engine.acquire(number, keys)) == len(keys)
            seconds.append(time.perf_counter() - began_s)
            await engine.release(number)
    return seconds


@dataclass(frozen=True, kw_only=True)
class GrowthSamples:
    """What was measured with this many chunks.

    Attributes:
        index_bytes: What the service's memory grew by.
        lookup_s: In the service; empty with fewer chunks than a lookup has.
        round_trip_s: The same over gRPC.
    """

    num_chunks: int
    ready_s: Sequence[float]
    resident: int
    index_bytes: int
    lookup_s: Sequence[float]
    round_trip_s: Sequence[float]

    def cells(self) -> tuple[str, ...]:
        """Return a row of the table."""
        return (
            f"{self.num_chunks:,}",
            spread(self.ready_s, "s"),
            f"{self.resident / 2**20:.0f} MiB",
            f"{self.index_bytes / max(1, self.num_chunks):.0f}",
            *(_with_p90(samples) for samples in (self.lookup_s, self.round_trip_s)),
        )


def _with_p90(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    return f"{statistics.median(seconds) * 1e3:.2f} ms (p90 {statistics.quantiles(seconds, n=10)[-1] * 1e3:.2f})"


def measure(num_chunks: int, rounds: int) -> GrowthSamples:
    """Measure one number of chunks."""
    with tempfile.TemporaryDirectory(prefix="kvg-") as name, tempfile.TemporaryDirectory(dir="/dev/shm") as arena:
        home = Path(name)
        keys = fill(home / STATE, num_chunks)
        ready, resident = start_times(home, rounds)
        config = config_over(home, Path(arena))
        few = keys[:: num_chunks // LOOKUP_KEYS][:LOOKUP_KEYS] if num_chunks >= LOOKUP_KEYS else []
        return GrowthSamples(
            num_chunks=num_chunks,
            ready_s=ready,
            resident=resident,
            index_bytes=asyncio.run(index_bytes(config)),
            lookup_s=asyncio.run(lookup_times(config, few, 10 * rounds)) if few else (),
            round_trip_s=asyncio.run(round_trips(config, few, 10 * rounds)) if few else (),
        )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", default="0,1000,10000,100000,1000000")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(machine_line())
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for count in options.chunks.split(","):
        print("| " + " | ".join(measure(int(count), options.rounds).cells()) + " |", flush=True)


if __name__ == "__main__":
    main()
