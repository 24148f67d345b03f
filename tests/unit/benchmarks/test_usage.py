"""CPU and memory are those of the whole group, and of nobody else."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from benchmarks.usage import cpu_s, memory_of, pids_of, titled, waited_s

# A parent with a child that has worked; both then wait to be told to end.
BUSY = """
import subprocess, sys, time
work = "import time; b = bytearray(64 << 20)"
work += "\\nwhile time.process_time() < 0.3: pass\\nprint('up', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("up", flush=True)
input()
"""


@pytest.fixture
def group() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        os.killpg(process.pid, signal.SIGKILL)


def test_children_count(group: int) -> None:
    assert len(list(pids_of({group}))) == 2
    assert cpu_s({group}) >= 0.3


def test_nobody_else_counts(group: int) -> None:
    before_s = cpu_s({group})
    while time.process_time() < 0.1:
        pass
    assert cpu_s({group}) - before_s < 0.1
    assert cpu_s(set()) == 0


def test_memory_is_that_of_all(group: int) -> None:
    pids = list(pids_of({group}))
    memory, parts = memory_of(pids), [memory_of([pid]) for pid in pids]
    assert memory.anonymous >= 64 << 20
    assert memory.resident >= memory.proportional >= memory.anonymous
    assert memory.anonymous == pytest.approx(sum(part.anonymous for part in parts), rel=0.05)


def test_processes_are_found_by_their_titles(group: int) -> None:
    assert sorted(titled(group, sys.executable)) == sorted(pids_of({group}))
    with pytest.raises(LookupError, match="no VLLM::EngineCore"):
        titled(group, "VLLM::EngineCore")


def test_who_shares_a_core_waits_for_it() -> None:
    work = "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    work += "\nwhile time.process_time() < 0.2: pass\nprint('up', flush=True); input()"
    argv = [sys.executable, "-c", work]
    with (
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one,
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        for process in (one, other):
            assert process.stdout is not None
            process.stdout.readline()
        assert waited_s([one.pid]) + waited_s([other.pid]) > 0.1
        assert waited_s([one.pid]) > 0.0
        one.kill()
        other.kill()
    assert waited_s([one.pid]) == 0
