"""The circuit breaker of the disk tier: counts errors, probes, wakes those who wait; `tier_health.py` decides."""

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from kvtier.disk.tier_health import TierHealth
from kvtier.errors import KvtierError, TierIOError
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class DiskHealth:
    """Loop thread only. Owned by `Resources`; `run` is a task of the daemon.

    Args:
        probe: Tries the tier; raises TierIOError while it does not work.
        counters: Counts latches and probes.
        now_s: Monotonic clock.
        sleep: Waits for the next probe.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[None]],
        counters: Counters,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._probe, self._counters, self._now_s, self._sleep = probe, counters, now_s, sleep
        self._health = TierHealth()
        self._latched = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._on_off: dict[Callable[[], None], None] = {}  # in order

    @property
    def readable(self) -> bool:
        """Reads may be tried."""
        return self._health.readable

    @property
    def writable(self) -> bool:
        """Writes may be tried."""
        return self._health.writable

    @property
    def latched(self) -> str:
        """Why the tier is switched off, for people; empty while it works."""
        if self.writable:
            return ""
        what = "writing is off" if self.readable else "off"
        return f"{what} after repeated errors: {self._health.problem}"

    def when_off(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call this whenever reading is switched off; returns what takes that back; twice does no harm."""
        self._on_off[call] = None
        return lambda: self._on_off.pop(call, None)

    def succeeded(self, kind: Literal["read", "write"]) -> None:
        """A call of the tier worked."""
        self._health.succeeded(kind)

    def failed(self, kind: Literal["read", "write"], error: KvtierError) -> None:
        """The system refused a call of the tier, or of the ledger beside it."""
        full = isinstance(error, TierIOError) and getattr(error.__cause__, "errno", None) in _FULL
        if not self._health.failed(kind, str(error), self._now_s(), full=kind == "write" and full):
            return
        self._counters.disk_latched += 1
        log_event(logger, "disk_latched", level=logging.ERROR, reading=self.readable, problem=str(error))
        self._open.clear()
        self._latched.set()
        if not self.readable:
            for call in list(self._on_off):
                call()

    async def until_open(self) -> None:
        """Return when the tier may be written (and read); at once while it works."""
        await self._open.wait()

    async def run(self) -> None:
        """Probe while the tier is latched."""
        while True:
            await self._latched.wait()
            await self._sleep(self._health.probe_in_s(self._now_s()))
            await self.probe_once()

    async def probe_once(self) -> None:
        """Try a latched tier, and open it if it works."""
        self._counters.disk_probes += 1
        try:
            await self._probe()
        except TierIOError as error:
            self._health.probe_failed(str(error), self._now_s())
            return
        self._health.probe_succeeded()
        self._latched.clear()
        self._open.set()
        log_event(logger, "disk_unlatched")
