"""A process that is interrupted while it starts is ended.

An interrupt of the benchmarks left a vllm serve behind that was still being waited for: `with` does not
call `__exit__` when `__enter__` raises, and vLLM overhears the signal that the kernel sends when its parent ends.
"""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.processes import Process, wait_until

# Overhears SIGTERM, as vLLM does while it starts.
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
        """Do not wait for what overhears."""
        super().stop(grace_s)


def test_an_interrupted_start_leaves_nothing_running(tmp_path: Path) -> None:
    process = InterruptedStart("deaf", [sys.executable, "-c", DEAF], {}, tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), process:
        pass
    assert process.started_pid
    with pytest.raises(ProcessLookupError):
        os.killpg(process.started_pid, 0)
