"""`python -m tests.fuzz --minutes 60`: runs each fuzzer for its share of the time; writes a summary in Markdown.

Inputs that are findings are kept in the folder of the results; to keep one for good, put it into `corpus/TARGET` with a
test or a comment of what it was. Exits with 1 if there are findings.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier.version import __version__
from tests.fuzz.targets import TARGETS

GRACE_S = 120.0
"""Beyond its share, for a start, and an end on a busy machine."""


def run_target(name: str, seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Fuzz one target in a process of its own; return its report, or what ended it."""
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "tests.fuzz.child",
        name,
        str(seconds),
        str(seed),
        str(folder),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + GRACE_S, check=False)
        problem = f"ended with status {done.returncode}"
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as exc:
        problem, output, errors = "did not end", "", str(exc.stderr or "")
    lines = output.strip().splitlines()
    if lines and problem == "ended with status 0":
        report: dict[str, Any] = json.loads(lines[-1])
        return report
    current = folder / f"{name}.current"
    kept = f"; its input is {current}" if current.exists() else ""
    folder.joinpath(f"{name}.stderr").write_text(errors)
    return {"name": name, "findings": {problem: f"{problem}{kept}: {errors[-2000:]}"}}


def table_of(reports: Sequence[dict[str, Any]]) -> str:
    """Return the reports as a table."""
    fields = ("num_inputs", "num_accepted", "num_distinct_refusals", "slowest_s", "peak_rss_mib", "seconds")
    lines = [
        "| target | inputs | accepted | distinct refusals | slowest, s of CPU | peak RSS, MiB | seconds | findings |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for report in reports:
        values = " | ".join(str(report.get(name, "?")) for name in fields)
        lines.append(f"| {report['name']} | {values} | {len(report['findings'])} |")
    return "\n".join(lines)


def main() -> int:
    """Run all, or those that were named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--out", type=Path, default=Path("fuzz-results"))
    arguments = parser.parse_args()
    names = arguments.targets.split(",")
    arguments.out.mkdir(parents=True, exist_ok=True)
    reports: list[dict[str, Any]] = []
    for name in names:
        reports.append(run_target(name, arguments.minutes * 60 / len(names), arguments.seed, arguments.out.absolute()))
        print(f"{name}: {json.dumps({**reports[-1], 'findings': list(reports[-1]['findings'])})}", flush=True)
    found = [
        f"### {report['name']}: {what}\n\n```text\n{text}\n```\n"
        for report in reports
        for what, text in report["findings"].items()
    ]
    head = f"# Fuzzing\n\nkvtier {__version__}, Python {platform.python_version()}, seed {arguments.seed}\n"
    summary = arguments.out / "summary.md"
    summary.write_text("\n".join([head, table_of(reports), "", *found]))
    print(f"summary: {summary}; findings: {len(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
