"""Watches of the daemon's log events: each has a bounded queue, and says how many events it lost."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvtier.obs.log import events_to

MAX_WAITING = 1024
"""Events that wait for one slow reader: a few hundred kilobytes."""
DROPPED = "dropped"


@dataclass(frozen=True, kw_only=True)
class WatchedEvent:
    """One event; see Event of proto/kvtier/v1/cache.proto."""

    name: str
    level: str
    unix_s: float
    fields: Mapping[str, str]


class EventWatch:
    """What one client has not read yet. Events come from any thread; they are read on the loop that made it."""

    def __init__(self, names: Collection[str] = (), *, max_waiting: int = MAX_WAITING) -> None:
        """Watch the events of these names; of all, if there are none."""
        self._names, self._max_waiting = frozenset(names), max_waiting
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()  # protects the two below
        self._waiting: deque[WatchedEvent] = deque()
        self._num_dropped = 0

    def add(self, name: str, level: int, unix_s: float, fields: Mapping[str, object]) -> None:
        """Take an event; the oldest one is lost when the reader is too slow. Any thread."""
        if self._names and name not in self._names:
            return
        shown = {field: str(value) for field, value in fields.items()}
        event = WatchedEvent(name=name, level=logging.getLevelName(level).lower(), unix_s=unix_s, fields=shown)
        with self._lock:
            if len(self._waiting) == self._max_waiting:
                self._waiting.popleft()
                self._num_dropped += 1
            self._waiting.append(event)
            is_first = len(self._waiting) == 1
        if is_first:
            with suppress(RuntimeError):  # the loop is closed: the daemon ends
                self._loop.call_soon_threadsafe(self._ready.set)

    async def events(self) -> AsyncIterator[WatchedEvent]:
        """Yield events for ever; `dropped` before those behind a gap."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            while taken := self._take():
                yield taken

    def _take(self) -> WatchedEvent | None:
        with self._lock:
            if self._num_dropped:
                fields, self._num_dropped = {"events": str(self._num_dropped)}, 0
                return WatchedEvent(name=DROPPED, level="warning", unix_s=time.time(), fields=fields)
            return self._waiting.popleft() if self._waiting else None


@contextmanager
def watching_events(names: Collection[str]) -> Iterator[EventWatch]:
    """Watch the events of these names, of all if there are none, during the block. Loop thread only."""
    watch = EventWatch(names)
    with events_to(watch.add):
        yield watch
