"""Sealed packs beside plain ones: read cold and warm, and written until durable.

usage: python -m benchmarks.encryption [--folder DIR] [--mib 192] [--runs 15] [--pause 0.3]

Plain and sealed take turns in one run, the first of each pair another one each time; the ratio is of the two of one
round. `cold` and `warm` as in `benchmarks.disk`: through the tier's own `read_chunks`, into rows of an arena. `write`:
one pack of 64 MiB. All rates are payload bytes per second. The aim: a cold read at most a quarter slower.

`CPU` is what the process used meanwhile, in all its threads. Where no core is free for the thread that reads ahead,
seconds go by that; where one is, chunks are opened beside the decoder.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path

import numpy as np

from benchmarks.disk import PACK_BYTES, PackCase, cold_seconds, make_case, payload_of, read_tier
from benchmarks.measuring.machine import machine_line, spread
from kvtier.core.stored import PackRecord
from kvtier.disk.base import ChunkPayload
from kvtier.disk.codecs.words import compile_kernels, use_kernels
from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.sealing import Key, KeyRing

SIDES = ("plain", "sealed")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a step took.

    Attributes:
        seconds: By the clock.
        cpu_s: Of CPU, in all threads of the process.
    """

    seconds: float
    cpu_s: float


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=None, help="on the device to measure; default: TMPDIR")
    parser.add_argument("--mib", type=int, default=192, help="payload per case")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds before the device is read")
    options = parser.parse_args()
    print(machine_line(), f"cryptography {version('cryptography')}")
    use_kernels(compile_kernels())
    seals = {"plain": None, "sealed": ChunkSeals(KeyRing([Key("bench", bytes(range(32)))]))}
    with (
        tempfile.TemporaryDirectory(dir=options.folder, prefix="kvtier-bench-") as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        for chunk_bytes in (64 * 1024, 2 * 1024**2):
            for kind in ("bf16", "noise"):
                name = f"{kind}, chunks of {chunk_bytes >> 10} KiB"
                num_bytes = options.mib * 1024**2
                _measure_reads(name, Path(folder), Path(shm), kind, chunk_bytes, num_bytes, seals, options)
                _measure_writes(name, Path(folder), kind, chunk_bytes, seals, options.runs)


def _measure_reads(
    name: str,
    folder: Path,
    shm: Path,
    kind: str,
    chunk_bytes: int,
    num_bytes: int,
    seals: Mapping[str, ChunkSeals | None],
    options: argparse.Namespace,
) -> None:
    cases = {}
    for side in SIDES:
        (folder / side).mkdir(exist_ok=True)
        (shm / side).mkdir(exist_ok=True)
        cases[side] = make_case(folder / side, shm / side, kind, chunk_bytes, num_bytes, seals[side])
    cold = {side: partial(_cold, case, options.pause) for side, case in cases.items()}
    _by_turns(f"{name}: cold", cold, num_bytes, options.runs)
    warm = {side: partial(_warm, case) for side, case in cases.items()}
    _by_turns(f"{name}: warm", warm, num_bytes, options.runs)
    for case in cases.values():
        for path in case.paths:
            path.unlink()


def _measure_writes(
    name: str, folder: Path, kind: str, chunk_bytes: int, seals: Mapping[str, ChunkSeals | None], num_runs: int
) -> None:
    generator = np.random.default_rng(1)
    payloads = [payload_of(generator, kind, number, chunk_bytes) for number in range(PACK_BYTES // chunk_bytes)]
    tiers = {side: PackTier(folder / f"write-{side}", seals=seals[side]) for side in SIDES}
    write = {side: partial(_write, tier, payloads) for side, tier in tiers.items()}
    _by_turns(f"{name}: write", write, PACK_BYTES, num_runs)


def _cold(case: PackCase, pause_s: float) -> Usage:
    usages: list[Usage] = []
    cold_seconds(case, lambda: usages.append(_usage_of(lambda: read_tier(case))), pause_s)
    return usages[0]


def _warm(case: PackCase) -> Usage:
    for path in case.paths:
        path.read_bytes()
    return _usage_of(lambda: read_tier(case))


def _write(tier: PackTier, payloads: Sequence[ChunkPayload]) -> Usage:
    records: list[PackRecord] = []
    usage = _usage_of(lambda: records.append(tier.write_pack("benchmark", payloads)))
    tier.delete_pack(records[0].pack_id)
    return usage


def _usage_of(step: Callable[[], object]) -> Usage:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    step()
    return Usage(seconds=time.perf_counter() - began_s, cpu_s=time.process_time() - began_cpu_s)


def _by_turns(name: str, steps: Mapping[str, Callable[[], Usage]], num_bytes: int, num_runs: int) -> None:
    """Print the rates of both sides, and how much more the sealed one takes, of the medians and by round."""
    usages: dict[str, list[Usage]] = {side: [] for side in SIDES}
    for run in range(num_runs + 1):
        for side in SIDES if run % 2 else reversed(SIDES):
            usage = steps[side]()
            if run:  # the first round warms buffers and code
                usages[side].append(usage)
    print(f"\n{name}")
    for side, values in usages.items():
        print(f"  {side:6} {spread([num_bytes / each.seconds / 1e9 for each in values], 'GB/s')}")
    for what, amount in (("seconds", attrgetter("seconds")), ("CPU", attrgetter("cpu_s"))):
        plain, sealed = ([amount(each) for each in usages[side]] for side in SIDES)
        of_medians = statistics.median(sealed) / statistics.median(plain)
        by_round = spread([mine / other for other, mine in zip(plain, sealed, strict=True)])
        print(f"  {what}, sealed / plain: {of_medians:.2f} of medians, by round {by_round}")


if __name__ == "__main__":
    main()
