"""A process that is interrupted while it starts is ended.

An interrupt of the benchmarks left a vllm serve behind that was still being waited for: `with` does not
call `__exit__` when `__enter__` raises, and vLLM ignores the signal that the kernel sends when its parent ends.
"""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.harness.process import Process, wait_until
from benchmarks.measuring.process_usage import PROC, pids_of

# Ignores SIGTERM, as vLLM does while it starts.
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


class InterruptedStart(Process):
    """A process whose start is interrupted once the process runs."""

    started_pid = 0

    def start(self) -> None:
        """Start, and raise as a signal handler would."""
        super().start()
        self.started_pid = self.pid
        wait_until(lambda: "up" in self.log_text(), 30, "the process to run")
        raise KeyboardInterrupt

    def stop(self, grace_s: float = 0.0) -> None:
        """Do not wait for a process that ignores SIGTERM."""
        super().stop(grace_s)


def test_an_interrupted_start_leaves_nothing_running(tmp_path: Path) -> None:
    process = InterruptedStart("deaf", [sys.executable, "-c", DEAF], {}, tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), process:
        pass
    assert process.started_pid
    with pytest.raises(ProcessLookupError):
        os.killpg(process.started_pid, 0)


def test_a_process_has_its_own_group_in_the_session_of_its_caller(tmp_path: Path) -> None:
    """A session of its own would be scheduled against the caller's as one group, and let it starve."""
    with Process("sleeping", ["sleep", "60"], {}, tmp_path / "log") as process:
        assert os.getpgid(process.pid) == process.pid
        assert os.getsid(process.pid) == os.getsid(0)


# A parent and a child that both count, each in its own line, until they are ended.
COUNTING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile True: print('c', flush=True); time.sleep(0.01)"])
while True:
    print("p", flush=True)
    time.sleep(0.01)
"""


def states_of(group: int) -> set[str]:
    """Return the scheduler states of a group's processes, as /proc has them."""
    return {(PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] for pid in pids_of({group})}


def test_a_paused_group_can_be_resumed_and_stopped(tmp_path: Path) -> None:
    """Benchmarks let servers take turns; a pause of the leader alone would leave vLLM's EngineCore running."""
    with Process("counting", [sys.executable, "-c", COUNTING], {}, tmp_path / "log") as process:
        wait_until(lambda: {"p", "c"} <= set(process.log_text().split()), 30, "both to count")
        process.pause()
        wait_until(lambda: states_of(process.pid) == {"T"}, 10, "all to be stopped")
        length = len(process.log_text())
        process.resume()
        wait_until(lambda: len(process.log_text()) > length + 100, 10, "both to count on")
        process.pause()
        group = process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
