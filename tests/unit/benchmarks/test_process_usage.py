"""CPU and memory are those of the whole process group and of no other process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.measuring.process_usage import cpu_s, memory_of, pids_of, titled, waited_s

# A parent with a child that has worked; both then wait for their input to end.
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
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        os.killpg(process.pid, signal.SIGKILL)


def test_children_count(group: int) -> None:
    assert len(list(pids_of({group}))) == 2
    assert cpu_s({group}) >= 0.3


def test_other_process_groups_do_not_count(group: int) -> None:
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


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel keeps no such times")
def test_a_process_that_shares_a_core_waits_for_it() -> None:
    work = "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print('up', flush=True); input()"
    work += "\nuntil = time.process_time() + 0.2\nwhile time.process_time() < until: pass"
    work += "\nprint('done', flush=True); input()"
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            for _ in range(2)
        ]
        for said in (b"up\n", b"done\n"):
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == said
            if said == b"up\n":
                for worker in workers:
                    assert worker.stdin is not None
                    worker.stdin.write(b"go\n")
                    worker.stdin.flush()
        waits_s = [waited_s([worker.pid]) for worker in workers]
        for worker in workers:
            worker.kill()
    assert min(waits_s) > 0
    assert sum(waits_s) > 0.1
    assert waited_s([worker.pid for worker in workers]) == 0
