"""Promotion of one prompt from disk to the arena, through a real session, beside a plain read and decode of its bytes.

usage: python -m benchmarks.promotion [--chunks 94] [--chunk-kib 2048] [--runs 7] [--folder DIR]

Each round restarts the daemon (host memory is empty, rows have no pages yet), attaches an engine and times one Acquire
until its last chunk is readable: once with the packs dropped from the page cache (cold), once with them in it (warm).
The plain side reads the pack files with O_DIRECT into one buffer, and then one thread decodes and verifies every chunk
from the page cache into memory that has its pages: the least work without a daemon, one step after the other. All take
turns. The payload is bf16 of a normal distribution.

A promotion into new rows also has to make `pages`, which the plain side does not: one thread allocates and maps the
pages of as many rows of a new arena. Rows of a full arena keep their pages, so later promotions do not pay for them.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measuring.daemon_fixtures import KVEngine, one_group
from benchmarks.measuring.machine import machine_line, spread
from benchmarks.measuring.machine_rates import read_direct
from benchmarks.measuring.storage import drop_page_cache
from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.disk.base import ChunkRead
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.host.arena import Arena
from kvtier.ledger import Ledger
from tests.fakes.operator import pin
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=94)
    parser.add_argument("--chunk-kib", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None, help="where the packs lie: on the disk to be measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        asyncio.run(run(Path(folder), options.chunks, options.chunk_kib * 1024, options.runs))


async def run(folder: Path, num_chunks: int, chunk_bytes: int, num_runs: int) -> None:
    """Measure and print."""
    layout = one_group(chunk_bytes, chunk_tokens=32)
    config = config_in(folder, host_bytes=2 * num_chunks * chunk_bytes, scrub_bytes_per_s=0, compact_bytes_per_s=0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arena_dir:
        object.__setattr__(config.host, "arena_dir", Path(arena_dir))
        keys = [chunk_key(number) for number in range(num_chunks)]
        async with running(config) as stub, KVEngine(config, layout) as engine:
            await engine.bind(await pin(stub, tokens=32 * num_chunks), keys)
            await engine.store(keys)
            await wait_durable(stub, "p")
        packs = sorted((config.disk.disk_dir / "packs").glob("*.kvpack"))
        stored_bytes = sum(path.stat().st_size for path in packs)
        seconds: dict[str, list[float]] = {
            name: []
            for name in ("O_DIRECT read", "decode", "pages", "cold", "cold, first chunk", "warm", "warm, first chunk")
        }
        for round_number in range(num_runs + 1):
            drop_page_cache(config.disk.disk_dir)
            found = {"O_DIRECT read": read_direct(packs)}
            found["decode"] = decode(config.disk.disk_dir, keys, chunk_bytes)
            found["pages"] = make_pages(Path(arena_dir), layout, num_chunks)
            for name in ("cold", "warm"):
                if name == "warm":
                    read_all(packs)
                else:
                    drop_page_cache(config.disk.disk_dir)
                async with running(config), KVEngine(config, layout) as engine:
                    found[name], found[f"{name}, first chunk"] = await promote(engine, keys)
            for name, value in found.items():
                if round_number:  # the first round warms code and memory
                    seconds[name].append(value)
    num_bytes = num_chunks * chunk_bytes
    print(machine_line())
    ratio = num_bytes / stored_bytes
    print(f"{num_chunks} chunks x {chunk_bytes // 1024} KiB, {stored_bytes / 2**20:.0f} MiB stored ({ratio:.2f}x)")
    plain = [read + dec for read, dec in zip(seconds["O_DIRECT read"], seconds["decode"], strict=True)]
    with_pages = [one + pages for one, pages in zip(plain, seconds["pages"], strict=True)]
    for name, values in {**seconds, "plain: read, then decode": plain, "plain, and pages": with_pages}.items():
        first = name.endswith("first chunk")
        rate = "" if first else spread([num_bytes / value / 1e9 for value in values], "GB/s")
        relative = spread([mine / other for mine, other in zip(values, plain, strict=True)])
        print(f"{name:25} {spread([1000 * value for value in values], 'ms', 0):28} {rate:30} of plain: {relative}")


async def promote(engine: ScriptedEngine, keys: Sequence[ChunkKey]) -> tuple[float, float]:
    """Return the seconds of one Acquire until its last and its first chunk were readable."""
    await engine.bind(engine.welcome.pins[0].pin_id, keys)
    num_ready, first_s = 0, 0.0
    began_s = time.perf_counter()
    await engine.send(acquire=pb.Acquire(acquire_id=1, keys=keys))
    while num_ready < len(keys):
        update = (await engine.receive("acquire_update")).acquire_update
        states = [chunk.state for chunk in update.chunks]
        assert pb.ChunkResidency.MISS not in states
        num_ready += states.count(pb.ChunkResidency.HOST)
        if num_ready and not first_s:
            first_s = time.perf_counter() - began_s
    return time.perf_counter() - began_s, first_s


def decode(disk_dir: Path, keys: Sequence[ChunkKey], chunk_bytes: int) -> float:
    """Return the seconds that one thread takes to decode and verify all chunks out of the page cache."""
    ledger = Ledger.open(disk_dir / "ledger.sqlite")
    places = {chunk.key: chunk for record in ledger.load().packs.values() for chunk in record.chunks}
    ledger.close()
    into = np.ones(len(keys) * chunk_bytes, dtype=np.uint8)
    views = [into.data[n * chunk_bytes : (n + 1) * chunk_bytes] for n in range(len(keys))]
    reads = [ChunkRead(chunk=places[key], into=[view]) for key, view in zip(keys, views, strict=True)]
    read_all((disk_dir / "packs").glob("*.kvpack"))
    errors: list[object] = []
    began_s = time.perf_counter()
    PackTier(disk_dir / "packs").read_chunks(reads, lambda _, error: errors.append(error), lambda: False)
    seconds = time.perf_counter() - began_s
    assert errors == [None] * len(keys)
    return seconds


def make_pages(arena_dir: Path, layout: KVLayout, num_slots: int) -> float:
    """Return the seconds that one thread takes to back and map all rows of a new arena."""
    arena = Arena.create(arena_dir, layout, num_slots)
    began_s = time.perf_counter()
    arena.back(range(num_slots))
    arena.populate(range(num_slots))
    seconds = time.perf_counter() - began_s
    arena.close(unlink=True)
    return seconds


def read_all(packs: Iterable[Path]) -> None:
    """Bring the files into the page cache."""
    for path in packs:
        path.read_bytes()


if __name__ == "__main__":
    main()
