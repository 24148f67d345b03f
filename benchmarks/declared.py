"""What files of many prompts cost: a first apply, one that changes nothing, one that changes one prompt.

usage: python -m benchmarks.declared [--prompts 10000] [--rounds 3]

No vLLM runs. The commands are those of users, from exec to exit, against a real daemon with a new state in each round.
Beside them, in the same round: as many files of that size written and made durable by one sync (the daemon keeps a copy
of each promise apart from its ledger), and the file of prompts read by libyaml alone.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from benchmarks.harness.daemon import Daemon, run_cli
from benchmarks.measuring.machine import machine_line, spread
from kvtier.fsync import write_files_beside

NO_VLLM = ("--url", "http://127.0.0.1:9", "--no-warm")
PROMPT_BYTES = 4096
WORDS = "Answer briefly, name your sources, and never promise a refund. "


def write_prompts(path: Path, num_prompts: int, first: str = "") -> None:
    """Write a file of prompts; `first`: what the first of them says besides."""
    text = (WORDS * (PROMPT_BYTES // len(WORDS) + 1))[:PROMPT_BYTES]
    entries = (
        f"- name: prompt-{number}\n  labels: {{team: t{number % 20}}}\n  system: |\n"
        f"    Prompt {number}.{'' if number else first} {text}\n"
        for number in range(num_prompts)
    )
    path.write_text("set: benchmark\ndefaults: {owner: benchmark}\nprompts:\n" + "".join(entries))


def seconds_of(act: Callable[[], object]) -> float:
    """Return what a call takes."""
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def apply(daemon: Daemon, path: Path, wanted: str) -> float:
    """Return what an apply takes; it has to say what is wanted."""
    began_s = time.perf_counter()
    done = run_cli(daemon.socket, "apply", "-f", str(path), *NO_VLLM, timeout_s=300)
    seconds = time.perf_counter() - began_s
    assert done.returncode == 0 and wanted in done.stdout, f"{done.stdout[-500:]}\n{done.stderr[-500:]}"  # noqa: PT018
    return seconds


def measure(num_prompts: int) -> dict[str, float]:
    """Return the seconds of each row, of a new daemon."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as name:
        home = Path(name)
        path = home / "prompts.yaml"
        write_prompts(path, num_prompts)
        text, copy = path.read_text(), os.urandom(PROMPT_BYTES + 800)
        seconds = {
            "read by libyaml": seconds_of(lambda: yaml.compose(text, Loader=yaml.CSafeLoader)),
            "as many files, one sync": seconds_of(
                lambda: write_files_beside({home / "files" / str(number): copy for number in range(num_prompts)})
            ),
        }
        with Daemon(home, host_bytes="64MiB") as daemon:
            seconds["first apply"] = apply(daemon, path, f"{num_prompts} new")
            seconds["nothing differs"] = apply(daemon, path, f"applied: {num_prompts} unchanged")
            write_prompts(path, num_prompts, first=" Be kind.")
            seconds["one prompt differs"] = apply(daemon, path, "1 replaced")
            daemon.kill()
            seconds["the daemon's next start"] = seconds_of(daemon.start)
            assert "unchanged" in run_cli(daemon.socket, "apply", "-f", str(path), *NO_VLLM, timeout_s=300).stdout
    return seconds


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine_line())
    print(f"{options.prompts:,} prompts of {PROMPT_BYTES} bytes, {options.rounds} rounds\n")
    rounds: Sequence[dict[str, float]] = [measure(options.prompts) for _ in range(options.rounds)]
    floors = {"first apply": "as many files, one sync", "nothing differs": "read by libyaml"}
    print("| | median (min..max) | beside the floor |\n|---|---|---|")
    for name in rounds[0]:
        samples = [each[name] for each in rounds]
        ratios = [each[name] / each[floors[name]] for each in rounds] if name in floors else []
        shown = f"{statistics.median(ratios):.1f}x {floors[name]}" if ratios else ""
        print(f"| {name} | {spread(samples, 's')} | {shown} |")


if __name__ == "__main__":
    main()
