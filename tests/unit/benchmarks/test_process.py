"""A process that is interrupted while it starts is ended.

An interrupt of the benchmarks left a vllm serve behind that was still being waited for: `with` does not
call `__exit__` when `__enter__` raises, and vLLM ignores the signal that the kernel sends when its parent ends.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness import process as harness
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.process import Process, free_port, wait_until
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


# As vLLM does at its start.
LEAVING = "import os, tempfile, time; print(tempfile.mkstemp()[1], os.environ['TORCHINDUCTOR_CACHE_DIR'], flush=True)"


@pytest.mark.parametrize("ends", [True, False])
def test_temporary_files_of_a_vllm_go_with_it_and_compiled_code_stays(tmp_path: Path, ends: bool) -> None:
    """Each start left a file in /tmp, and each one that was killed its sockets: thousands a day of tests."""
    engine = Engine(EngineOptions(model="none"), tmp_path / "log")
    engine.argv = [sys.executable, "-c", LEAVING if ends else f"{LEAVING}; time.sleep(600)"]
    seen = list[Path]()
    for _ in range(2):
        engine.launch()
        wait_until(lambda: len(engine.log_text().splitlines()) > len(seen), 30, "a file")
        seen.append(Path(engine.log_text().splitlines()[-1].split()[0]))
        if ends:
            engine.wait_ended(30)
        else:
            assert seen[-1].exists()
            engine.kill()
            assert not seen[-1].parent.exists()
    engine.__exit__(None, None, None)
    assert len({path.parent for path in seen}) == 2
    assert not any(path.parent.exists() for path in seen)
    assert len({line.split()[1] for line in engine.log_text().splitlines()}) == 1
    assert not engine.log_text().split()[1].startswith(str(seen[0].parent))


TAKING_A_PORT = """
import sys
from benchmarks.harness.process import free_port
print(free_port(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("who", ["this process", "another process"])
def test_a_port_is_given_once_although_no_one_listens_on_it_yet(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """A vLLM listens half a minute after its port was chosen, and a second one may listen on the same port."""
    with subprocess.Popen(
        [sys.executable, "-c", TAKING_A_PORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        taken = int(other.stdout.readline()) if who == "another process" else free_port()
        monkeypatch.setattr(harness, "_OUR_PORTS", range(taken, taken + 50))
        monkeypatch.setattr(random.SystemRandom, "sample", lambda _, ports, count: ports[:count])
        assert taken < free_port() < taken + 50
        other.communicate()


def test_a_wait_that_no_one_attended_to_looks_once_more() -> None:
    """On a busy machine no one may have looked for as long as the wait was to be, and what it was for is there."""
    looks = iter([False, True])

    def look() -> bool:
        time.sleep(0.05)
        return next(looks)

    assert wait_until(look, 0.01, "it") >= 0.1


def test_a_wait_in_vain_says_how_it_is_at_its_end() -> None:
    """A log's end as it was when the wait began says nothing of what happened meanwhile."""
    seen: list[str] = []

    def look() -> bool:
        seen.append("late")
        return False

    with pytest.raises(TimeoutError, match=r"it\nlate: not within 0\.1 s"):
        wait_until(look, 0.1, lambda: f"it\n{seen[-1]}")
