"""The circuit breaker of the disk tier: when it is switched off, and when it is tried again."""

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from kvtier.errors import KvtierError, TierIOError
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3
FIRST_PROBE_S = 2.0
LAST_PROBE_S = 60.0
_STILL_READ = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EAGAIN})
"""Of a write that failed: full, read-only, no thread for it."""

Kind = Literal["read", "write"]


class DiskHealth:
    """Counts refusals of the operating system, not damage and not our own quota. Loop thread only.

    The breaker opens when `FAILURES_IN_A_ROW` calls of a kind failed with no success of that kind between: reads of a
    disk that refuses writes go on. A probe that succeeds closes it on probation: the next failure of the kind that
    opened it opens it at once and doubles the time to the next probe, until a call of that kind has succeeded. So a
    disk that takes a small file and no pack does not flap.

    Owned by `Resources`; `run` is a task of the daemon.

    Args:
        probe: Tries the tier; raises TierIOError while it does not work.
        counters: Counts openings and probes.
        now_s: Monotonic clock; `sleep` waits for the next probe.

    Attributes:
        readable: Reads may be tried.
        writable: Writes may be tried. A disk that is full or read-only is still read.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[None]],
        counters: Counters,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.readable = self.writable = True
        self._probe, self._counters, self._now_s, self._sleep = probe, counters, now_s, sleep
        self._problem = ""
        self._num_failed = {"read": 0, "write": 0}
        self._on_probation: Kind | None = None  # the kind of call that opened the breaker last
        self._probe_after_s, self._probe_due_s = FIRST_PROBE_S, 0.0
        self._opened, self._closed = asyncio.Event(), asyncio.Event()
        self._closed.set()
        self._on_off: dict[Callable[[], None], None] = {}  # in order

    @property
    def breaker_open_reason(self) -> str:
        """Why the breaker is open, for people; empty while it is closed."""
        if self.writable:
            return ""
        what = "writing is off" if self.readable else "off"
        return f"{what} after repeated errors: {self._problem}"

    def when_off(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call this whenever reading is switched off; returns what takes that back; twice does no harm."""
        self._on_off[call] = None
        return lambda: self._on_off.pop(call, None)

    def succeeded(self, kind: Kind) -> None:
        """A call of the tier worked. It may have begun before the breaker opened: only a probe closes that."""
        self._num_failed[kind] = 0
        if kind == self._on_probation and self.writable:
            self._on_probation, self._probe_after_s = None, FIRST_PROBE_S

    def failed(self, kind: Kind, error: Exception) -> None:
        """The system refused a call of the tier, or of the ledger beside it; or a write met what no one foresaw."""
        self._num_failed[kind] += 1
        if self._num_failed[kind] < FAILURES_IN_A_ROW and kind != self._on_probation:
            return
        is_foreseen = isinstance(error, KvtierError)
        # A ledger that is locked, full or read-only says nothing about packs: no read of them needs it.
        is_only_writing = not isinstance(error, TierIOError) or error.errno in _STILL_READ
        still_read = kind == "write" and is_only_writing
        if not self.readable or (still_read and not self.writable):
            return  # open as far as this opens it
        self.readable, self.writable, self._problem = still_read, False, str(error) if is_foreseen else repr(error)
        self._plan_probe(is_later=kind == self._on_probation)
        self._on_probation = kind
        self._counters.disk_breaker_opened += 1
        log_event(logger, "disk_breaker_opened", level=logging.ERROR, reading=self.readable, problem=self._problem)
        self._closed.clear()
        self._opened.set()
        if not self.readable:
            for call in list(self._on_off):
                call()

    def _plan_probe(self, *, is_later: bool) -> None:
        """The next probe comes after the same time as the last, or twice that."""
        if is_later:
            self._probe_after_s = min(2 * self._probe_after_s, LAST_PROBE_S)
        self._probe_due_s = self._now_s() + self._probe_after_s

    async def until_closed(self) -> None:
        """Return when the tier may be written (and read); at once while it works."""
        await self._closed.wait()

    async def run(self) -> None:
        """Probe while the breaker is open."""
        while True:
            await self._opened.wait()
            await self._sleep(max(0.0, self._probe_due_s - self._now_s()))
            await self.probe_once()

    async def probe_once(self) -> None:
        """Try the tier, and close the breaker if it works."""
        self._counters.disk_probes += 1
        try:
            await self._probe()
        except TierIOError as error:
            self._problem = str(error)
            self._plan_probe(is_later=True)
            return
        self.readable = self.writable = True
        self._problem, self._num_failed = "", {"read": 0, "write": 0}
        self._opened.clear()
        self._closed.set()
        log_event(logger, "disk_breaker_closed")
