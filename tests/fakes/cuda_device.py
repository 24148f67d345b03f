"""A device that copies when the test says so, and a driver that locks pages or refuses to."""

import ctypes
import threading
from collections.abc import Callable

from kvtier.client.arena_map import ArenaMap
from kvtier_connector.workers.copy_plan import CopyList
from kvtier_connector.workers.cuda.page_locked_arena import PageLockError

_DEADLINE_S = 60.0
"""Longer than a test waits for anything while it holds a call up."""


class FakeTicket:
    """Copies that are done once the device runs."""

    def __init__(self, device: "FakeCopies", copies: CopyList, is_load: bool) -> None:
        self._device, self._copies, self._is_load = device, copies, is_load
        self._moved = False

    def move(self) -> None:
        """Move the bytes, once."""
        source, target = self._copies.vllm, self._copies.arena
        if self._is_load:
            source, target = target, source
        if not self._moved:
            for to, origin, size in zip(target.tolist(), source.tolist(), self._copies.sizes.tolist(), strict=True):
                ctypes.memmove(to, origin, size)
        self._moved = True

    def is_done(self) -> bool:
        """See `Ticket`."""
        return self._device.running.is_set() and self._over()

    def wait(self) -> None:
        """See `Ticket`."""
        assert self._device.running.wait(_DEADLINE_S)
        self._over()

    def seconds(self) -> float:
        """See `Ticket`."""
        return 0.001

    def _over(self) -> bool:
        if self._device.failure is not None:
            raise self._device.failure
        self.move()
        return True


class FakeCopies:
    """See `Copies`.

    Attributes:
        running: Copies come to an end while it is set.
        failure: What the device reports of copies under way.
        refusal: What it says to new ones.
        on_begin: Called with each list of copies.
        is_marked: Loads wait for less than all.
    """

    def __init__(self, *, early: bool) -> None:
        """With `early` bytes move at once, else when the copies come to an end."""
        self._early = early
        self.running = threading.Event()
        self.running.set()
        self.failure: Exception | None = None
        self.refusal: Exception | None = None
        self.on_begin: Callable[[CopyList], object] = lambda _: None
        self.is_marked = False

    def mark(self) -> None:
        """See `Copies`."""
        self.is_marked = True

    def clear_mark(self) -> None:
        """See `Copies`."""
        self.is_marked = False

    def begin(self, copies: CopyList, *, is_load: bool) -> FakeTicket:
        """See `Copies`."""
        if self.refusal is not None:
            raise self.refusal
        self.on_begin(copies)
        ticket = FakeTicket(self, copies, is_load)
        if self._early:
            ticket.move()
        return ticket


class FakeHostMemory:
    """See `HostMemory`.

    Attributes:
        locked: Length by address.
        lockable_bytes: Bytes that may be locked at once.
        calls: All of them, with the address.
        misuse: Calls that no one may make. An exception would not do: the caller takes it for the driver's.
        stuck: Nothing can be unlocked.
        placed: First page and length of what was to be near the device, in each row.
        during: Called in each call, with its name, before it has an effect.
    """

    def __init__(self, lockable_bytes: int = 2**40) -> None:
        self.locked: dict[int, int] = {}
        self.lockable_bytes = lockable_bytes
        self.during: Callable[[str], object] = lambda _: None
        self.calls: list[tuple[str, int]] = []
        self.misuse: list[str] = []
        self.stuck = False
        self.placed: list[tuple[int, int]] = []
        self._threads: set[int] = set()

    def enter_thread(self) -> None:
        """See `HostMemory`."""
        self._threads.add(threading.get_ident())

    def place_rows(self, arena: ArenaMap, first: int, length: int) -> None:
        """See `HostMemory`."""
        assert threading.get_ident() in self._threads
        assert not self.calls
        self.placed.append((first, length))

    def lock(self, address: int, num_bytes: int) -> None:
        """See `HostMemory`."""
        self._enter("lock")
        if address % 4096 or num_bytes % 4096 or not num_bytes:
            self.misuse.append(f"lock {num_bytes} bytes at {address}")
        if any(address < other + length and other < address + num_bytes for other, length in self.locked.items()):
            self.misuse.append("lock twice")
        if sum(self.locked.values()) + num_bytes > self.lockable_bytes:
            raise PageLockError("cudaHostRegister fails with 2: out of memory")
        self.calls.append(("lock", address))
        self.locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        """See `HostMemory`."""
        self._enter("unlock")
        if self.stuck:
            raise PageLockError("cudaHostUnregister fails with 700: an illegal memory access was encountered")
        self.calls.append(("unlock", address))
        if self.locked.pop(address, None) is None:
            self.misuse.append("unlock what is not locked")

    def _enter(self, call: str) -> None:
        if threading.get_ident() not in self._threads:
            self.misuse.append(f"{call} in a thread that may not")
        self.during(call)


class DriverGate:
    """Holds up the next calls of a driver in which locks are made or undone."""

    def __init__(self, memory: FakeHostMemory) -> None:
        self._passes = threading.Event()
        self.reached = threading.Event()
        memory.during = self._pass

    def open(self) -> None:
        """From now on all calls pass."""
        self._passes.set()

    def _pass(self, call: str) -> None:
        self.reached.set()
        assert self._passes.wait(_DEADLINE_S)
