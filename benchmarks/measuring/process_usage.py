"""What processes use: CPU time, memory and bytes read, of the process groups that `harness.process` starts."""

import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PROC = Path("/proc")
# CPUCLOCK_SCHED of a process, see clock_getcpuclockid(3): nanoseconds, where /proc/PID/stat counts hundredths.
_CPUCLOCK_SCHED = 2
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes in memory.

    Attributes:
        resident: Every page mapped (RSS): what several processes share counts in each.
        proportional: Shared pages divided by those who share them (PSS): sums of it are true.
        anonymous: The proportional part that belongs to no file: what a process has allocated.
        shared_memory: The proportional part in /dev/shm and the like, an arena among it.
    """

    resident: int
    proportional: int
    anonymous: int
    shared_memory: int


def pids_of(groups: Collection[int]) -> Iterator[int]:
    """Yield the processes that now belong to these process groups."""
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with suppress(*_GONE):
                if os.getpgid(int(folder.name)) in groups:
                    yield int(folder.name)


def cpu_s(groups: Collection[int]) -> float:
    """Return CPU seconds of the processes that now belong to these groups; without those that have ended."""
    return cpu_of(pids_of(groups))


def cpu_of(pids: Iterable[int]) -> float:
    """Return CPU seconds of these processes, without those that have ended."""
    total = 0.0
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile
            total += time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    return total


def thread_cpu_s(pid: int, thread_id: int) -> float:
    """Return CPU seconds of one thread; a process's first thread has its id.

    Source: /proc/PID/task/TID/schedstat, first field, nanoseconds.
    """
    return int((PROC / str(pid) / "task" / str(thread_id) / "schedstat").read_text().split()[0]) / 1e9


def waited_s(pids: Iterable[int]) -> float:
    """Return the seconds that the threads which these processes have now were ready to run and had no core.

    Source: /proc/PID/task/TID/schedstat, second field, nanoseconds; nothing where the kernel keeps none.
    """
    total_ns = 0
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile
            for thread in (PROC / str(pid) / "task").iterdir():
                with suppress(OSError):
                    total_ns += int((thread / "schedstat").read_text().split()[1])
    return total_ns / 1e9


def memory_of(pids: Collection[int]) -> Memory:
    """Return the sum of the memory of these processes.

    Raises:
        OSError: One of them has ended, or belongs to another user.
    """
    totals = dict.fromkeys(("Rss", "Pss", "Pss_Anon", "Pss_Shmem"), 0)
    for pid in pids:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in totals:
                totals[name] += int(value.split()[0]) * 1024
    resident, proportional, anonymous, shared_memory = totals.values()
    return Memory(resident=resident, proportional=proportional, anonymous=anonymous, shared_memory=shared_memory)


def titled(group: int, title: str) -> list[int]:
    """Return the processes of a group whose title begins so, as vLLM names its own: `VLLM::EngineCore`, `VLLM::Worker`.

    Raises:
        LookupError: There is none in this group.
    """
    found = []
    for pid in pids_of([group]):
        with suppress(*_GONE):
            if (PROC / str(pid) / "cmdline").read_bytes().startswith(title.encode()):
                found.append(pid)
    if not found:
        raise LookupError(f"process group {group}: no {title} in it")
    return found


@dataclass(frozen=True, kw_only=True)
class BytesRead:
    """What processes have read so far.

    Attributes:
        calls: Bytes that read calls returned, from the page cache or the device (`rchar`).
        device: Bytes fetched from a device (`read_bytes`).
    """

    calls: int
    device: int

    def __sub__(self, before: Self) -> "BytesRead":
        """Return what was read since `before`."""
        return BytesRead(calls=self.calls - before.calls, device=self.device - before.device)

    @classmethod
    def by_groups(cls, groups: set[int]) -> "BytesRead":
        """Return the sum over the processes that now belong to these process groups."""
        calls = device = 0
        for folder in PROC.iterdir():
            # A process may end between two reads.
            with suppress(FileNotFoundError, ProcessLookupError):
                if not folder.name.isdecimal() or os.getpgid(int(folder.name)) not in groups:
                    continue
                fields = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
                calls += int(fields["rchar"])
                device += int(fields["read_bytes"])
        return cls(calls=calls, device=device)
