"""Events of the daemon for many clients: one watch for each caller, however many streams it has open."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from kvtier.access.caller import Caller
from kvtier.access.caller_shares import CallerShares
from kvtier.errors import TooManyWatchersError
from kvtier.library.values.proof_values import Event
from kvtier.library.watches import Watch
from kvtier.web.transport.http_bounds import share_of

OpenWatch = Callable[[], Watch[Event]]
"""Called in a thread; returns once the watch has begun."""
DROPPED = "dropped"


class EventStream:
    """What one client has not been sent yet: events of these names, of all if there are none. Loop thread only."""

    def __init__(self, max_waiting: int, names: Collection[str] = ()) -> None:
        self._names = frozenset((*names, DROPPED)) if names else None
        self._waiting: deque[Event] = deque()
        self._max_waiting, self._num_dropped = max_waiting, 0
        self._ready = asyncio.Event()
        self._is_over = False

    def add(self, event: Event) -> None:
        """Take an event that is wanted; the oldest one is lost when the client is too slow."""
        if self._names is not None and event.name not in self._names:
            return
        if len(self._waiting) == self._max_waiting:
            self._waiting.popleft()
            self._num_dropped += 1
        self._waiting.append(event)
        self._ready.set()

    def end(self) -> None:
        """No event follows."""
        self._is_over = True
        self._ready.set()

    async def events(self, keep_alive_s: float) -> AsyncIterator[Event | None]:
        """Yield events until the watch ends; None when there was none for this long; `dropped` before a gap's rest."""
        while True:
            if self._num_dropped:
                fields, self._num_dropped = {"events": str(self._num_dropped)}, 0
                yield Event(name=DROPPED, unix_s=time.time(), level="warning", fields=fields)
            elif self._waiting:
                yield self._waiting.popleft()
            elif self._is_over:
                return
            else:
                self._ready.clear()
                try:
                    await asyncio.wait_for(self._ready.wait(), keep_alive_s)
                except TimeoutError:
                    yield None


class _Feed:
    """A watch, and the streams that get its events."""

    def __init__(self, open_watch: OpenWatch) -> None:
        self.streams: set[EventStream] = set()
        self._open_watch = open_watch
        self._loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self._watch: Watch[Event] | None = None
        self._is_closed = False
        self.is_over = False
        try:
            threading.Thread(target=self._run, name="kvtier-http-events", daemon=True).start()
        except RuntimeError as exc:
            remedy = "try again, or raise the daemon's limit (ulimit -u)"
            raise TooManyStreamsError(f"the system allows no more threads; {remedy}") from exc

    def close(self) -> None:
        """End the watch."""
        self._is_closed = True
        if self._watch is not None:
            self._watch.close()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._watch = self._open_watch()
            self._tell(self._begin, None)
            if self._is_closed:
                self._watch.close()
            for event in self._watch:
                self._tell(self._add, event)
        except Exception as exc:  # of the connection, or a defect: the streams end, and clients connect again
            error = exc
        self._tell(self._end, error)

    def _tell(self, call: Callable[..., None], value: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the daemon ends
            self._loop.call_soon_threadsafe(call, value)

    def _begin(self, _: object) -> None:
        if not self.begun.done():
            self.begun.set_result(None)

    def _add(self, event: Event) -> None:
        for stream in self.streams:
            stream.add(event)

    def _end(self, error: BaseException | None) -> None:
        self.is_over = True
        if not self.begun.done():
            self.begun.set_exception(error or ConnectionError("the watch has ended"))
            self.begun.exception()  # retrieved: no one may wait for it any longer
        for stream in self.streams:
            stream.end()


class TooManyStreamsError(TooManyWatchersError):
    """As many clients stream events over HTTP as may."""


class EventHub:
    """All streams of a server. Loop thread only."""

    def __init__(self, max_streams: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        what = "clients stream events over HTTP"
        self._places = CallerShares(what, max_streams, share_of(max_streams), TooManyStreamsError)
        self._feeds: dict[Caller, _Feed] = {}

    @contextmanager
    def _joined(
        self, caller: Caller, open_watch: OpenWatch, names: Collection[str]
    ) -> Iterator[tuple[_Feed, EventStream]]:
        feed = self._feeds.get(caller)
        if feed is None or feed.is_over:
            feed = self._feeds[caller] = _Feed(open_watch)
        stream = EventStream(self._max_waiting, names)
        feed.streams.add(stream)
        try:
            yield feed, stream
        finally:
            feed.streams.discard(stream)
            if not feed.streams:
                feed.close()
                if self._feeds.get(caller) is feed:
                    del self._feeds[caller]

    async def stream(
        self, caller: Caller, open_watch: OpenWatch, keep_alive_s: float, names: Collection[str] = ()
    ) -> AsyncIterator[Event | None]:
        """Yield None once the caller's events are watched, then as `EventStream.events`.

        Raises:
            TooManyStreamsError: There are as many streams as may be, or as one caller may have.
            KvtierError: The daemon refuses, or does not answer.
        """
        with (
            self._places.holding(caller.grant_id),
            self._joined(replace(caller, address=""), open_watch, names) as (feed, stream),
        ):
            await asyncio.shield(feed.begun)
            yield None
            async for event in stream.events(keep_alive_s):
                yield event
