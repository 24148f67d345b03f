"""A prompt's KV up into a store that hosts share, and down from it into the host memory of another host.

usage: python -m benchmarks.fleet [--mib 1024] [--chunk-kib 2048] [--runs 5] [--parallel 8] [--folder DIR] [--memory]

The store is a folder (`file://`), whose object is in the page cache, or with `--memory` a dict. Each round starts a new
host with an empty state folder: its rows have no pages yet. Rates are payload bytes per second, CPU is all threads of
the process per GiB of payload. All sides take turns in one run:

- `restore`: `restore_prompt` until the last chunk is readable, while what came is written to disk; `held back`: the
  same, and the disk tier begins when all is there;
- `read`: the same ranges from the store, as many at once, and nothing done with them;
- `pages`: the pages of as many rows of a new arena, in one thread;
- `decode`: the stored bytes, in memory, decoded and verified by their checksum into such rows, whose pages are made
  already, by as many threads as a restore has; `SHA-256, decode`: their digests compared before that, as a restore
  must; `pages, SHA-256, decode`: into rows of a new arena, whose pages the same threads make: all that a restore has to
  do but to read;
- `disk`: the first host after a restart, its packs in the page cache, prefetches the prompt;
- `memcpy`: one thread.

A restore that is held back is to reach 0.7 of the last of these.
"""

import argparse
import asyncio
import hashlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.measuring.daemon_fixtures import bf16_noise, one_group
from benchmarks.measuring.machine import machine_line, spread
from benchmarks.measuring.machine_rates import memcpy_rates
from kvtier.bundles.bundle import BundleChunk
from kvtier.bundles.bundle_format import read_front
from kvtier.config import DaemonConfig
from kvtier.core.layout import KVLayout
from kvtier.disk.base import checksum_of
from kvtier.disk.codecs import codec_by_name
from kvtier.disk.codecs.words import compile_kernels, use_kernels
from kvtier.fleet.manifest import StoredKV
from kvtier.fleet.remote_bundle import RANGE_BYTES
from kvtier.fleet.restoring import RestoreOutcome, restore_prompt
from kvtier.fleet.uploading import upload_prompt
from kvtier.host.arena import Arena
from kvtier.ledger import BindingRow
from kvtier.prompts.book import RequestedPin
from kvtier.remote.base import RemoteStore
from kvtier.remote.folder_store import FolderStore
from kvtier.service.cache import Cache
from kvtier.tiering.namespace import Namespace
from tests.fakes.memory_store import MemoryStore
from tests.fakes.rig import ListPeer, hello_of
from tests.fakes.scripted_engine import chunk_key, config_in

GIB = 1024**3
LIMITS = ("decode", "SHA-256, decode", "pages, SHA-256, decode")
NUM_THREADS = 2
"""As `RowFiller` has."""


@dataclass
class Sides:
    """Seconds and seconds of CPU of each side, by round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a block."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - began_s)
        self.cpu.setdefault(name, []).append(time.process_time() - began_cpu_s)

    def note(self, name: str, seconds: float) -> None:
        """Keep a time that was measured elsewhere."""
        self.seconds.setdefault(name, []).append(seconds)

    def drop_first(self) -> None:
        """Forget the first round, which warms code and memory."""
        for values in (*self.seconds.values(), *self.cpu.values()):
            del values[0]


@dataclass(frozen=True)
class Prompt:
    """What is restored."""

    layout: KVLayout
    num_chunks: int

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * self.layout.row_bytes

    @property
    def tokens(self) -> range:
        return range(16 * self.num_chunks)

    async def pin(self, cache: Cache) -> tuple[Namespace, BindingRow]:
        """Attach an engine, pin and bind."""
        session = await cache.attach(hello_of("engine", self.layout), ListPeer())
        (prompt,) = await cache.pins.apply([RequestedPin(name="p", tokens=self.tokens)])
        keys = [chunk_key(number) for number in range(self.num_chunks)]
        await cache.bindings.bind(session, prompt.pin_id, keys, len(self.tokens), "")
        binding = cache.prompts.binding(prompt.pin_id, session.namespace_id)
        assert binding is not None
        return session.namespace, binding


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--chunk-kib", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=8, help="ranges that are read at once")
    parser.add_argument("--folder", type=Path, default=None, help="where state and store lie")
    parser.add_argument("--memory", action="store_true", help="the store is a dict")
    options = parser.parse_args()
    use_kernels(compile_kernels())  # as a daemon does after the first GiB
    prompt = Prompt(one_group(options.chunk_kib * 1024), options.mib * 1024 // options.chunk_kib)
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="kvtier-bench-") as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as arenas,
    ):
        asyncio.run(run(prompt, Path(folder), Path(arenas), options))


async def run(prompt: Prompt, folder: Path, arenas: Path, options: argparse.Namespace) -> None:
    """Measure and print."""
    (folder / "store").mkdir()
    store: RemoteStore = MemoryStore() if options.memory else FolderStore(f"file://{folder / 'store'}")
    sides = Sides()
    stored = await uploaded(prompt, store, folder, arenas, sides)
    upload_s, upload_cpu_s = sides.seconds.pop("upload")[0], sides.cpu.pop("upload")[0]
    chunks, pieces = await stored_pieces(store, stored)
    for number in range(options.runs + 1):
        for is_held_back in (True, False) if number % 2 else (False, True):
            await restored(
                prompt,
                store,
                stored,
                folder / f"b{number}{is_held_back}",
                arenas,
                options.parallel,
                sides,
                is_held_back=is_held_back,
            )
        with sides.timed("read"):
            await read_ranges(store, stored, options.parallel)
        await asyncio.to_thread(decoded, prompt, chunks, pieces, arenas, sides)
        await prefetched(prompt, folder / "a", arenas, sides)
        if not number:
            sides.drop_first()
    print(machine_line())
    gib = prompt.num_bytes / GIB
    what = "a dict" if options.memory else "a folder"
    print(
        f"{prompt.num_chunks} chunks x {options.chunk_kib} KiB, {chunks[0].stored.codec}, ratio "
        f"{prompt.num_bytes / sum(chunk.stored.stored_bytes for chunk in chunks):.2f}; the store is {what}"
    )
    print(f"{'upload':22} {gib / upload_s:.2f} GiB/s, once; {upload_cpu_s / gib:.2f} s of CPU per GiB")
    sides.seconds["memcpy"] = [prompt.num_bytes / rate for rate in memcpy_rates(options.runs)]
    for name, seconds in sides.seconds.items():
        cpu = f"{spread([each / gib for each in sides.cpu[name]], 's of CPU per GiB')}" if name in sides.cpu else ""
        if name.endswith(("first chunk", "durable")):
            print(f"{name:22} {spread([1000 * each for each in seconds], 'ms', 0)}")
        else:
            print(f"{name:22} {spread([gib / each for each in seconds], 'GiB/s'):28} {cpu}")
    for limit in LIMITS:
        ratios = [one / other for one, other in zip(sides.seconds[limit], sides.seconds["held back"], strict=True)]
        cpu_ratio = median(sides.cpu[limit]) / median(sides.cpu["held back"])
        print(f"held back / {limit}: {spread(ratios)}; of CPU {cpu_ratio:.2f}")


def config_of(folder: Path, arenas: Path, *, is_held_back: bool = False) -> DaemonConfig:
    folder.mkdir(exist_ok=True)
    config = config_in(
        folder,
        host_bytes=8 * GIB,
        disk_bytes=64 * GIB,
        pack_linger_s=60.0 if is_held_back else 0.2,
        pack_bytes=(8 * GIB if is_held_back else 64 << 20),
        scrub_bytes_per_s=0,
        compact_bytes_per_s=0,
    )
    return replace(config, host=replace(config.host, arena_dir=arenas))


@asynccontextmanager
async def host(folder: Path, arenas: Path, *, is_held_back: bool = False) -> AsyncIterator[Cache]:
    cache = await Cache.open(config_of(folder, arenas, is_held_back=is_held_back))
    try:
        yield cache
    finally:
        await cache.close()


async def uploaded(prompt: Prompt, store: RemoteStore, folder: Path, arenas: Path, sides: Sides) -> StoredKV:
    """Have a host compute the prompt and upload it."""
    async with host(folder / "a", arenas) as cache:
        namespace, binding = await prompt.pin(cache)
        generator = np.random.default_rng(0)
        for key in binding.keys:
            (ref,) = await namespace.host.allocate(1)
            (view,) = namespace.host.payload(ref, key)
            view[:] = bf16_noise(generator, view.nbytes)
            assert namespace.host.seal(ref)
            namespace.table.host.commit_store(key, ref, checksum_of([view]))
        namespace.write_back.add(binding.keys)
        await namespace.write_back.flush()
        with sides.timed("upload"):
            return await upload_prompt(cache, store, "p", namespace.namespace_id, host="a")


async def stored_pieces(store: RemoteStore, stored: StoredKV) -> tuple[Sequence[BundleChunk], Sequence[memoryview]]:
    """Return the chunks of the bundle and the stored bytes of each, in memory."""
    data = memoryview(await store.get_range(stored.key, 0, stored.num_bytes))
    front = read_front(bytes(data[: min(len(data), 64 << 20)]), "")
    assert not isinstance(front, int)
    return front.chunks, [data[each.offset : each.offset + each.stored_bytes] for each, _ in front.chunks]


async def restored(
    prompt: Prompt,
    store: RemoteStore,
    stored: StoredKV,
    folder: Path,
    arenas: Path,
    num_parallel: int,
    sides: Sides,
    *,
    is_held_back: bool,
) -> None:
    name = "held back" if is_held_back else "restore"
    async with host(folder, arenas, is_held_back=is_held_back) as cache:
        namespace, binding = await prompt.pin(cache)
        first = asyncio.create_task(first_readable(namespace, binding))
        with sides.timed(name):
            result = await restore_prompt(cache, store, namespace, binding, stored, max_parallel=num_parallel)
        assert result.outcome is RestoreOutcome.RESTORED, result
        assert result.num_bytes == prompt.num_bytes
        sides.note(f"{name}, first chunk", await first)
        if not is_held_back:
            began_s = time.perf_counter()
            await namespace.write_back.flush()
            sides.note("restore, until durable", sides.seconds[name][-1] + time.perf_counter() - began_s)
        else:  # nothing of it is written: the next side is to have the disk and the CPUs for itself
            await namespace.write_back.close()


async def first_readable(namespace: Namespace, binding: BindingRow) -> float:
    began_s, first = time.perf_counter(), binding.keys[:1]
    while not all(chunk.readable for chunk in namespace.table.known(first)):  # noqa: ASYNC110 - threads fill it
        await asyncio.sleep(0.0005)
    return time.perf_counter() - began_s


async def read_ranges(store: RemoteStore, stored: StoredKV, num_parallel: int) -> None:
    turns = asyncio.Semaphore(num_parallel)

    async def read(start: int) -> None:
        async with turns:
            await store.get_range(stored.key, start, min(start + RANGE_BYTES, stored.num_bytes))

    await asyncio.gather(*(read(start) for start in range(0, stored.num_bytes, RANGE_BYTES)))


def decoded(
    prompt: Prompt,
    chunks: Sequence[BundleChunk],
    pieces: Sequence[memoryview],
    arenas: Path,
    sides: Sides,
) -> None:
    """Do what a restore does, without a daemon."""
    for name in LIMITS:
        arena = Arena.create(arenas, prompt.layout, prompt.num_chunks)
        if not name.startswith("pages"):
            with sides.timed("pages") if name == "decode" else nullcontext():
                make_pages(arena, range(prompt.num_chunks))

        def decode(number: int, name: str = name, arena: Arena = arena) -> None:
            if name.startswith("pages"):
                make_pages(arena, [number])
            chunk, into = chunks[number], arena.payload(number, 0)
            if "SHA-256" in name:
                assert hashlib.sha256(pieces[number]).digest() == chunk.sha256
            codec_by_name(chunk.stored.codec).decode(pieces[number], into)
            assert checksum_of(into) == chunk.stored.checksum

        with ThreadPoolExecutor(NUM_THREADS) as pool, sides.timed(name):
            list(pool.map(decode, range(prompt.num_chunks)))
        arena.close(unlink=True)


def make_pages(arena: Arena, slots: Sequence[int]) -> None:
    arena.back(slots)
    arena.populate(slots)


async def prefetched(prompt: Prompt, folder: Path, arenas: Path, sides: Sides) -> None:
    async with host(folder, arenas) as cache:
        namespace, binding = await prompt.pin(cache)
        with sides.timed("disk"):
            namespace.promoter.prefetch(binding.keys, has_capacity=namespace.has_spare_memory)
            await namespace.promoter.until_prefetched()
        assert all(chunk.readable for chunk in namespace.table.known(binding.keys))


if __name__ == "__main__":
    main()
