"""`python -m tests.fuzz.child TARGET SECONDS SEED FOLDER`: fuzzes one target; prints what it found as one line of JSON.

A process of its own: a crash or memory without end is this process's. The input that is being read is in the file
`TARGET.current` of the folder, so that it is known after a crash.
"""

import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.base import Tally, corpus_of
from tests.fuzz.file_targets import digest_of
from tests.fuzz.mutation import inputs
from tests.fuzz.targets import target_of

MEMORY_BYTES = 3 * 1024**3
"""Address space beside what the process has when it begins: no input may need as much."""
BATCH = 200


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run came to."""

    name: str
    num_inputs: int
    num_accepted: int
    num_distinct_refusals: int
    slowest_s: float
    peak_rss_mib: float
    seconds: float
    findings: dict[str, str]


def fuzz(name: str, seconds: float, first_seed: int, folder: Path) -> Report:
    """Read inputs until the time is over."""
    target = target_of(name)
    current, began_s = folder / f"{name}.current", time.monotonic()

    def keep(what: str, data: bytes) -> None:
        folder.joinpath(f"{name}-{digest_of(what.encode() + data[:1000])}").write_bytes(data)

    tally = Tally(target, keep)
    try:
        seeds = [*target.seeds(), *(path.read_bytes() for path in corpus_of(name))]
        for data in seeds:
            tally.take(data)
        number = first_seed
        while time.monotonic() - began_s < seconds:

            @seed(number)
            @settings(
                max_examples=BATCH,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @given(inputs(target, seeds))
            def batch(data: bytes) -> None:
                if time.monotonic() - began_s < seconds:
                    current.write_bytes(data)
                    tally.take(data)

            batch()
            number += 1
    finally:
        target.close()
    current.unlink(missing_ok=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Report(
        name=name,
        num_inputs=tally.num_inputs,
        num_accepted=tally.refusals["accepted"],
        num_distinct_refusals=len(tally.refusals.keys() - {"accepted"}),
        slowest_s=round(tally.slowest_s, 3),
        peak_rss_mib=round(max(peak, getattr(target, "peak_rss_mib", 0.0)), 1),
        seconds=round(time.monotonic() - began_s, 1),
        findings=tally.findings,
    )


def main() -> None:
    """Limit the memory, then fuzz."""
    name, seconds, first_seed, folder = sys.argv[1:]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    print(json.dumps(asdict(fuzz(name, float(seconds), int(first_seed), Path(folder)))), flush=True)


if __name__ == "__main__":
    main()
