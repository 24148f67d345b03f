"""LMCache's own benchmark of L2 adapters, with its `fs` adapter and with kvtier's, by turns.

usage: python -m benchmarks.peers.l2_adapters [--turns 5] [--sizes-kib 256,2048,16384] [--in-flight 1,4] [--folder DIR]

Needs `make peers-venv`. Each turn of each adapter begins with an empty folder (and a new daemon), and runs `lmcache
bench l2` four times: store; load, where everything is in memory (the page cache for `fs`, the daemon's host memory for
kvtier); load from disk, after both were emptied; lookup of keys of which half are stored. LMCache's payload is one byte
repeated, which would compress to nothing, so the daemon writes uncompressed: both read as many bytes. The figures are
LMCache's (mean over the rounds of a run), medians and spread those of the turns. A run that does not load all that was
stored fails.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.daemon import Daemon
from benchmarks.harness.process import interrupt_on_signals, say, wait_until
from benchmarks.measuring.machine import machine_line, spread
from benchmarks.measuring.storage import drop_page_cache, is_in_memory
from benchmarks.systems.system import PEER_VENVS
from kvtier._pb import cache_pb2
from kvtier.client.admin import AdminClient

ROOT = Path(__file__).parents[2]
ROUND_BYTES = 128 * 1024**2
"""At most, of one round of LMCache's benchmark."""
ROUNDS = 6
STEPS = ("store", "load from memory", "load from disk", "lookup")
Results = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class Shape:
    """What is stored: objects of one size, some at once."""

    size_kib: int
    in_flight: int

    @property
    def num_keys(self) -> int:
        """Keys of one task."""
        return max(1, min(32, ROUND_BYTES // (self.size_kib * 1024 * self.in_flight)))

    @property
    def num_objects(self) -> int:
        """All that are stored, with those of the first round, which is not counted."""
        return (ROUNDS + 1) * self.num_keys * self.in_flight


class FileAdapter:
    """LMCache's `fs` in a folder."""

    name = "fs"

    def __init__(self, home: Path) -> None:
        self.folder = home / "fs"
        self.spec: dict[str, Any] = {"type": "fs", "base_path": str(self.folder)}

    @contextmanager
    def running(self) -> Iterator[None]:
        """There is nothing to run."""
        yield

    def empty_memory(self, num_objects: int) -> None:
        """Drop the files from the page cache."""
        drop_page_cache(self.folder)


class DaemonAdapter:
    """kvtier's adapter with a daemon of its own."""

    name = "kvtier"

    def __init__(self, home: Path) -> None:
        self._settings = {
            "KVTIER_CACHE_STORE": "all",
            "KVTIER_DISK_COMPRESSION": "never",
            "KVTIER_DISK_BYTES": "16GiB",
        }
        self._daemon = Daemon(home, host_bytes="3GiB", settings=self._settings)
        self.spec = {
            "type": "plugin",
            "module_path": "kvtier_lmcache",
            "class_name": "KVTierL2Adapter",
            "adapter_params": {"socket": str(self._daemon.socket)},
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the daemon."""
        with self._daemon:
            yield

    def empty_memory(self, num_objects: int) -> None:
        """Wait until all is on disk, and drop it from host memory and the page cache."""
        num_evicted = 0

        def are_evicted() -> bool:
            nonlocal num_evicted
            num_evicted += client.evict_all(tier=cache_pb2.TIER_HOST).num_chunks
            return num_evicted >= num_objects

        with AdminClient(self._daemon.socket) as client:
            wait_until(are_evicted, 120, "the daemon to write everything")
        drop_page_cache(self._daemon.disk_dir)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sizes-kib", default="256,2048,16384")
    parser.add_argument("--in-flight", default="1,4")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    options = parser.parse_args()
    interrupt_on_signals()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(f"{machine_line()}, lmcache {_lmcache_version()}; {options.turns} turns")
        if is_in_memory(Path(folder)):
            print("The folder is in memory: nothing is read from a disk. Name another with --folder.")
        for size_kib in map(int, options.sizes_kib.split(",")):
            for in_flight in map(int, options.in_flight.split(",")):
                shape = Shape(size_kib, in_flight)
                print_table(shape, measure(Path(folder), shape, options.turns))


def measure(folder: Path, shape: Shape, num_turns: int) -> Results:
    """Measure both adapters, by turns; a first turn warms everything up."""
    results: Results = defaultdict(list)
    for turn in range(num_turns + 1):
        kinds = (FileAdapter, DaemonAdapter) if turn % 2 else (DaemonAdapter, FileAdapter)
        for kind in kinds:
            with tempfile.TemporaryDirectory(dir=folder) as home:
                found = one_turn(kind(Path(home)), shape)
            say(f"{shape} turn {turn} {kind.name}: {found}")
            for step, value in found.items():
                if turn:
                    results[step, kind.name].append(value)
    return results


def one_turn(adapter: FileAdapter | DaemonAdapter, shape: Shape) -> dict[str, float]:
    """Return MB/s of each step, and for lookups milliseconds a round."""
    found: dict[str, float] = {}
    with adapter.running():
        found["store"] = _bench(adapter.spec, shape, "store")["throughput_avg_mbps"]
        found["load from memory"] = _bench(adapter.spec, shape, "load")["throughput_avg_mbps"]
        found["lookup"] = _bench(adapter.spec, shape, "lookup")["duration_avg_ms"]
        adapter.empty_memory(shape.num_objects)
        found["load from disk"] = _bench(adapter.spec, shape, "load")["throughput_avg_mbps"]
    return found


def print_table(shape: Shape, results: Results) -> None:
    """Print a table of one shape."""
    num_bytes = shape.num_keys * shape.in_flight * shape.size_kib / 1024
    print(
        f"\n{shape.size_kib} KiB an object, {shape.num_keys} a task, {shape.in_flight} tasks at once "
        f"({num_bytes:.0f} MiB a round)\n"
    )
    print("| | fs | kvtier | kvtier / fs |\n|---|---|---|---|")
    for step in STEPS:
        fs, ours = results[step, "fs"], results[step, "kvtier"]
        unit, digits = ("ms", 2) if step == "lookup" else ("MB/s", 0)
        ratios = [mine / theirs for mine, theirs in zip(ours, fs, strict=True)]
        print(f"| {step}, {unit} | {spread(fs, digits=digits)} | {spread(ours, digits=digits)} | {spread(ratios)} |")


def _bench(spec: Mapping[str, Any], shape: Shape, step: str) -> dict[str, Any]:
    """Run one step of LMCache's benchmark in a process of its own and return what it found."""
    flags = {
        "--l2-adapter": json.dumps(spec),
        "--only": step,
        "--num-keys": shape.num_keys,
        "--in-flight": shape.in_flight,
        "--data-size-kb": shape.size_kib,
        "--rounds": ROUNDS,
        "--warmup-rounds": 1,
        "--lookup-max-hit-rate": 0.5,
    }
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        flags |= {"--format": "json", "--output": output.name}
        command: Sequence[str] = [
            *(str(PEER_VENVS / "lmcache" / "bin" / "python"), "-m", "lmcache.cli.main", "bench", "l2"),
            *(str(part) for flag in flags.items() for part in flag),
        ]
        environment = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'connector'}",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "DO_NOT_TRACK": "1",
        }
        done = subprocess.run(
            command, env=os.environ | environment, cwd=ROOT, text=True, capture_output=True, timeout=300, check=False
        )
        if done.returncode:
            raise RuntimeError(f"lmcache bench l2 failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        (found,) = _operations(json.loads(Path(output.name).read_text()))
    if step != "lookup" and found["total_success"] != found["total_keys"]:
        raise RuntimeError(f"{step} of {spec['type']}: {found['total_success']} of {found['total_keys']} objects")
    return found


def _operations(report: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a report that are of an operation."""
    if isinstance(report, dict):
        if "operation" in report:
            yield report
        for part in report.values():
            yield from _operations(part)
    elif isinstance(report, list):
        for part in report:
            yield from _operations(part)


def _lmcache_version() -> str:
    script = "import importlib.metadata as m; print(m.version('lmcache'))"
    return subprocess.check_output([PEER_VENVS / "lmcache" / "bin" / "python", "-c", script], text=True).strip()


if __name__ == "__main__":
    main()
