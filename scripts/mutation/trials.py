"""Runs mutants: each in a copy of the tree, against the tests that run its lines."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mutation.coverage_map import CoverageMap, environment
from mutation.mutants import Mutant

HANG_S = 90
_POLL_S = 0.1
_FAILED = re.compile("FAILED |ERROR ")
# What the product and its tests import and do not change. Each trial is a fork: it need not import these again, which
# takes ten seconds. Nothing that begins threads when it is imported.
_PRELOADED = (
    "pytest",
    "numpy",
    "grpc.aio",
    "prometheus_client",
    "torch",
    "vllm.config",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.sched.scheduler",
    "numba",
)


class Outcome(Enum):
    """What the tests said."""

    KILLED = "killed"
    SURVIVED = "survived"
    HUNG = "hung"
    """Killed too: a test would end at its time limit."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One mutant's result.

    Attributes:
        num_tests: That were run, the quickest first, until one failed.
        killed_by: The test that failed; empty if none did, or if it hung.
        is_cut: There are more that run its lines, beyond the time that one trial may take.
    """

    mutant: Mutant
    outcome: Outcome
    num_tests: int
    killed_by: str
    is_cut: bool


@dataclass(frozen=True, kw_only=True)
class _Running:
    mutant: Mutant
    tree: Path
    original: str
    since_s: float
    num_tests: int
    is_cut: bool


def _log_of(tree: Path) -> Path:
    return tree.with_name(f"{tree.name}.log")


class Trials:
    """Runs as many trials at once as there are trees.

    Args:
        trees: Copies of the repository.
        libraries: Folder of what is imported beside the environment's packages.
        covered: Which tests run which lines.
        cap_s: Of tests for one mutant, as long as they took under coverage.
    """

    def __init__(self, trees: Sequence[Path], libraries: Path, covered: CoverageMap, cap_s: float) -> None:
        self._free, self._libraries, self._covered, self._cap_s = list(trees), libraries, covered, cap_s
        self._running: dict[int, _Running] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in _PRELOADED:
                __import__(name)

    def run(self, mutants: Sequence[Mutant]) -> Iterator[Trial]:
        """Yield each trial when it ends."""
        waiting = list(mutants)
        try:
            while waiting or self._running:
                while waiting and self._free:
                    self._start(waiting.pop(0))
                time.sleep(_POLL_S)
                yield from self._ended()
        finally:
            for pid in list(self._running):
                self._end(pid, is_alive=True)

    def _start(self, mutant: Mutant) -> None:
        tree = self._free.pop()
        tests, is_cut = self._tests_for(mutant)
        module = tree / mutant.path
        original = module.read_text()
        module.write_text(mutant.applied(original))
        if (pid := os.fork()) == 0:
            self._be_trial(tree, tests)
        self._running[pid] = _Running(
            mutant=mutant, tree=tree, original=original, since_s=time.monotonic(), num_tests=len(tests), is_cut=is_cut
        )

    def _tests_for(self, mutant: Mutant) -> tuple[list[str], bool]:
        tests = self._covered.tests_of_lines(mutant.path, mutant.line, mutant.end_line)
        chosen, total_s = list[str](), 0.0
        for test in sorted(tests, key=lambda test: (self._covered.seconds(test), test)):
            total_s += self._covered.seconds(test)
            if chosen and total_s > self._cap_s:
                break
            chosen.append(test)
        return chosen, len(chosen) < len(tests)

    def _be_trial(self, tree: Path, tests: Sequence[str]) -> None:
        """In a process of its own: run tests on the tree, and exit with pytest's status."""
        import pytest

        os.setsid()
        os.chdir(tree)
        os.environ.update(environment(tree, self._libraries))
        sys.path[:0] = [str(tree), str(tree / "connector")]
        sys.dont_write_bytecode = True
        with Path(os.devnull).open() as null, _log_of(tree).open("w") as log:
            for descriptor, file in enumerate((null, log, log)):
                os.dup2(file.fileno(), descriptor)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=ci", "--timeout=100"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-c", str(tree / "pyproject.toml")]
        status = pytest.main([*options, *tests])
        sys.stdout.flush()
        os._exit(int(status))

    def _ended(self) -> Iterator[Trial]:
        for pid, trial in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                outcome = Outcome.KILLED if os.waitstatus_to_exitcode(status) else Outcome.SURVIVED
            elif time.monotonic() - trial.since_s > max(HANG_S, 4 * self._cap_s):
                outcome = Outcome.HUNG
            else:
                continue
            failed = [
                line for line in _log_of(trial.tree).read_text(errors="replace").splitlines() if _FAILED.match(line)
            ]
            self._end(pid, is_alive=not ended)
            yield Trial(
                mutant=trial.mutant,
                outcome=outcome,
                num_tests=trial.num_tests,
                killed_by=failed[0] if failed else "",
                is_cut=trial.is_cut,
            )

    def _end(self, pid: int, is_alive: bool) -> None:
        """End what a trial has left behind, and put its tree in order."""
        trial = self._running.pop(pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # its own session: daemons of its tests too
        if is_alive:
            os.waitpid(pid, 0)
        (trial.tree / trial.mutant.path).write_text(trial.original)
        subprocess.run(["git", "checkout", "--quiet", "--", "."], cwd=trial.tree, check=True)
        self._free.append(trial.tree)
