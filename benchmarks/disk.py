"""Disk to arena, cold and warm, beside the device and the decoder; and a pack beside one file and fsync per chunk.

usage: python -m benchmarks.disk [--folder DIR] [--mib 256] [--runs 9] [--pause 0.3]

All sides take turns in one run, so that drift of the machine affects all of them. The limits of a read are measured
with the tier's own span size and one thread, as the tier reads:

- `device`: O_DIRECT reads of the same packs, end to end, into one aligned buffer, without decoding;
- `decode`: the stored bytes, already in memory, decoded and verified into the same arena rows, in one thread;
- `both`: `device` and `decode` at the same time in two processes, until the later one ends. They share only the
  machine: this is what a reader that overlaps both could reach here.

Where chunks are decoded, all but `device` is measured with numpy's kernels and with the compiled ones, in turns.

The aim of a cold read is 0.8 of min(device x ratio, decode); its ratio to `both` is printed beside that. Cold means:
fsynced, dropped from the page cache (POSIX_FADV_DONTNEED), and mincore found at most 1 % of the bytes resident; a run
that was not cold is an error. The script cannot empty the cache of the device itself, or of the host of a virtual
machine; it serves `device` and `cold` alike. All rates are payload bytes per second, except `device`, which is stored
bytes. A throttled disk is faster after a pause, so there is one before each `device`, `both` and `cold`.
"""

import argparse
import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.measuring.daemon_fixtures import bf16_noise
from benchmarks.measuring.machine import machine_line, spread
from benchmarks.measuring.machine_rates import read_direct
from benchmarks.measuring.storage import drop_page_cache
from kvtier.core.stored import PackRecord
from kvtier.disk.base import ChunkPayload, ChunkRead, checksum_of
from kvtier.disk.codecs import codec_by_name
from kvtier.disk.codecs.words import NUMPY, WordKernels, compile_kernels, use_kernels
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, TierIOError

PACK_BYTES = 64 * 1024**2
WRITE_CHUNKS = 1000
WRITE_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class PackCase:
    """Chunks of one size and kind, as packs on disk and as rows of an arena."""

    name: str
    tier: PackTier
    records: list[PackRecord]
    reads: list[ChunkRead]

    @property
    def raw_bytes(self) -> int:
        return sum(read.chunk.raw_bytes for read in self.reads)

    @property
    def stored_bytes(self) -> int:
        return sum(read.chunk.stored_bytes for read in self.reads)

    @property
    def paths(self) -> list[Path]:
        return [self.tier.directory / f"{record.pack_id}.kvpack" for record in self.records]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=None, help="on the device to measure; default: TMPDIR")
    parser.add_argument("--mib", type=int, default=256, help="payload per case")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds before the device is read")
    options = parser.parse_args()
    kernels = {"numpy": NUMPY, "compiled": compile_kernels()}
    print(machine_line())
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="kvtier-bench-") as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        for chunk_bytes in (64 * 1024, 2 * 1024**2):
            for kind in ("bf16", "noise"):
                case = make_case(Path(folder), Path(shm), kind, chunk_bytes, options.mib * 1024**2)
                measure_reads(case, options.runs, kernels if kind == "bf16" else {"raw": NUMPY}, options.pause)
                for path in case.paths:
                    path.unlink()
        use_kernels(kernels["compiled"])  # as the daemon, where numba is
        measure_writes(Path(folder), options.runs)


def make_case(
    folder: Path, shm: Path, kind: str, chunk_bytes: int, num_bytes: int, seals: ChunkSeals | None = None
) -> PackCase:
    """Write packs, plain or sealed; the arena is a real file in /dev/shm, its pages touched."""
    tier = PackTier(folder / f"{kind}-{chunk_bytes}", seals=seals)
    generator = np.random.default_rng(0)
    num_chunks = num_bytes // chunk_bytes
    per_pack = PACK_BYTES // chunk_bytes
    arena = _arena(shm / f"{kind}-{chunk_bytes}", num_bytes)
    records, reads = [], []
    for first in range(0, num_chunks, per_pack):
        payloads = [
            payload_of(generator, kind, n, chunk_bytes) for n in range(first, min(first + per_pack, num_chunks))
        ]
        records.append(tier.write_pack("benchmark", payloads))
    for number, chunk in enumerate(chunk for record in records for chunk in record.chunks):
        start = number * chunk_bytes
        reads.append(ChunkRead(chunk=chunk, into=[arena[start : start + chunk_bytes]]))
    return PackCase(name=f"{kind} {_size(chunk_bytes)}", tier=tier, records=records, reads=reads)


def measure_reads(case: PackCase, num_runs: int, kernels: Mapping[str, WordKernels], pause_s: float) -> None:
    """Print one row for each of the kernels."""
    in_memory = [_stored_in_memory(path) for path in case.paths]
    device: list[float] = []
    steps = ("decode", "both", "cold", "warm")
    rates: dict[str, dict[str, list[float]]] = {name: {step: [] for step in steps} for name in kernels}
    for run in range(num_runs + 1):
        seconds = {"device": cold_seconds(case, lambda: read_direct(case.paths), pause_s)}
        names = list(kernels)
        for name in names if run % 2 else reversed(names):
            use_kernels(kernels[name])
            seconds[f"{name} decode"] = _timed(lambda: _decode(case, in_memory))
            seconds[f"{name} both"] = _both(case, in_memory, pause_s)
            seconds[f"{name} cold"] = cold_seconds(case, lambda: read_tier(case), pause_s)
            seconds[f"{name} warm"] = warm_seconds(case)
        if run:  # the first round warms buffers and code
            device.append(case.stored_bytes / seconds["device"] / 1e9)
            for name, by_step in rates.items():
                for step, values in by_step.items():
                    values.append(case.raw_bytes / seconds[f"{name} {step}"] / 1e9)
    codecs = "+".join(sorted({read.chunk.codec for read in case.reads}))
    ratio = case.raw_bytes / case.stored_bytes
    print(f"\n{case.name}: {len(case.reads)} chunks, {case.raw_bytes >> 20} MiB, {codecs}, ratio {ratio:.2f}")
    print(f"  device  {spread(device, 'GB/s')}")
    for name, by_step in rates.items():
        _print_rates(name, by_step, [rate * ratio for rate in device])


def _print_rates(name: str, steps: Mapping[str, list[float]], device: Sequence[float]) -> None:
    """Print what one of the kernels reached; `device` is in payload bytes here."""
    for step, values in steps.items():
        print(f"  {name:9} {step:7} {spread(values, 'GB/s')}")
    cold, decode = statistics.median(steps["cold"]), statistics.median(steps["decode"])
    limit = min(statistics.median(device), decode)
    per_run = [
        read / min(given, decoded) for read, given, decoded in zip(steps["cold"], device, steps["decode"], strict=True)
    ]
    print(f"  {name:9} cold / min(device x ratio, decode): {cold / limit:.2f} of medians, by run {spread(per_run)}")
    together = [read / given for read, given in zip(steps["cold"], steps["both"], strict=True)]
    print(
        f"  {name:9} cold / both: {statistics.median(steps['cold']) / statistics.median(steps['both']):.2f} of medians,"
        f" by run {spread(together)}"
    )
    print(f"  {name:9} warm / decode: {statistics.median(steps['warm']) / decode:.2f}")


def measure_writes(folder: Path, num_runs: int) -> None:
    """Print a pack of 1,000 chunks, durable, beside one file and fsync per chunk."""
    for kind in ("bf16", "noise"):
        generator = np.random.default_rng(1)
        payloads = [payload_of(generator, kind, number, WRITE_CHUNK_BYTES) for number in range(WRITE_CHUNKS)]
        tier = PackTier(folder / f"write-{kind}")
        packs, files = [], []
        for _ in range(num_runs):
            began_s = time.perf_counter()
            record = tier.write_pack("benchmark", payloads)
            packs.append(time.perf_counter() - began_s)
            tier.delete_pack(record.pack_id)
            files.append(_timed_files(folder, payloads))
        ratios = [pack / each for pack, each in zip(packs, files, strict=True)]
        print(f"\nwrite {WRITE_CHUNKS} chunks of {_size(WRITE_CHUNK_BYTES)}, {kind}, until durable")
        print(f"  one pack {spread(packs, 's', 3)}; a file each {spread(files, 's', 3)}; ratio {spread(ratios, '', 3)}")


def payload_of(generator: np.random.Generator, kind: str, number: int, num_bytes: int) -> ChunkPayload:
    """Return a chunk of made-up content: `bf16` compresses, `noise` does not."""
    data = generator.bytes(num_bytes) if kind == "noise" else bf16_noise(generator, num_bytes)
    view = memoryview(data)
    key = number.to_bytes(32, "big") + bytes(4)
    return ChunkPayload(key=key, segments=[view], checksum=checksum_of([view]))


def _arena(path: Path, num_bytes: int) -> memoryview:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        memory = memoryview(mmap.mmap(fd, num_bytes))
    finally:
        os.close(fd)
        path.unlink()
    np.frombuffer(memory, dtype=np.uint8)[::4096] = 1
    return memory


def cold_seconds(case: PackCase, step: Callable[[], object], pause_s: float) -> float:
    """Return the seconds of a step, after a pause, on packs that are not in the page cache."""
    drop_page_cache(case.tier.directory)
    for path in case.paths:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            resident_bytes = FileOps().resident_bytes(file.fileno(), 0, length)
        if resident_bytes > length / 100:
            raise SystemExit(f"{path}: {resident_bytes} of {length} bytes are still in the page cache")
    time.sleep(pause_s)
    return _timed(step)


def _both(case: PackCase, in_memory: Sequence[memoryview], pause_s: float) -> float:
    """Return the seconds until the device was read here and all was decoded in another process, begun together."""
    fork = multiprocessing.get_context("fork")  # the kernels that are in use, and the packs' bytes, go with it
    ready, begin, end = fork.Event(), fork.Event(), fork.Value("d", 0.0)

    def decode() -> None:
        _decode(case, in_memory)  # a new process finds no page mapped
        ready.set()
        if begin.wait(60):
            _decode(case, in_memory)
            end.value = time.monotonic()

    process = fork.Process(target=decode)
    process.start()
    ready.wait(60)

    cold_seconds(case, lambda: None, pause_s)
    began_s = time.monotonic()
    begin.set()
    read_direct(case.paths)
    read_s = time.monotonic()
    process.join(60)
    if process.exitcode != 0:
        raise SystemExit(f"the decoding process ended with {process.exitcode}")
    return max(read_s, float(end.value)) - began_s


def warm_seconds(case: PackCase) -> float:
    """Return the seconds of a read of packs that are in the page cache."""
    for path in case.paths:
        path.read_bytes()
    return _timed(lambda: read_tier(case))


def read_tier(case: PackCase) -> None:
    """Read every chunk through the tier, and insist that each was right."""
    seen: list[ChunkRead] = []

    def done(read: ChunkRead, error: ChunkDamagedError | TierIOError | None) -> None:
        if error is not None:
            raise error
        seen.append(read)

    case.tier.read_chunks(case.reads, done, lambda: False)
    if len(seen) != len(case.reads):
        raise SystemExit(f"{len(seen)} of {len(case.reads)} chunks were read")


def _stored_in_memory(path: Path) -> memoryview:
    return memoryview(path.read_bytes())


def _decode(case: PackCase, in_memory: Sequence[memoryview]) -> None:
    packs = {record.pack_id: stored for record, stored in zip(case.records, in_memory, strict=True)}
    for read in case.reads:
        chunk = read.chunk
        stored = packs[chunk.pack_id][chunk.offset : chunk.offset + chunk.stored_bytes]
        codec_by_name(chunk.codec).decode(stored, read.into)
        if checksum_of(read.into) != chunk.checksum:
            raise SystemExit(f"{chunk} was decoded to other bytes")


def _timed_files(folder: Path, payloads: Sequence[ChunkPayload]) -> float:
    """One file, fsync and rename per chunk, as a cache of files does that means durable; then one directory fsync."""
    target = folder / "files"
    target.mkdir()

    def write() -> None:
        for payload in payloads:
            path = target / payload.key.hex()
            fd = os.open(path.with_suffix(".tmp"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.writev(fd, list(payload.segments))
                os.fsync(fd)
            finally:
                os.close(fd)
            path.with_suffix(".tmp").rename(path)
        fd = os.open(target, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    seconds = _timed(write)
    for path in target.iterdir():
        path.unlink()
    target.rmdir()
    return seconds


def _timed(step: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s


def _size(num_bytes: int) -> str:
    return f"{num_bytes // 1024**2} MiB" if num_bytes >= 1024**2 else f"{num_bytes // 1024} KiB"


if __name__ == "__main__":
    main()
