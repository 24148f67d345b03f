"""Messages from an engine to the daemon: sent at once, or batched with those of the next quarter second."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from kvtier._pb import engine_pb2 as pb
from kvtier.core.limits import MAX_ENDED_REQUESTS, MAX_MESSAGES

LINGER_S = 0.25
"""How long what may wait waits at most. A message and its answer cost each side several turns of threads with the
interpreter's lock: sent one by one, stores of ten requests a second, they were a fifth of the daemon's CPU."""

MAX_TOGETHER_BYTES = 64 * 1024
"""Of messages that are sent to the daemon at once: more saves nothing, and the first would wait for the last."""

MAX_UNSENT_BATCHES = 64
"""A daemon that reads leaves none; one that is stopped leaves all."""

BEHIND_S = 10.0
"""Of a daemon that reads, what may wait is taken after `LINGER_S`; a busy machine takes longer."""


class Outbox:
    """Messages for the one thread that sends them. Any thread may put some in; none ever waits.

    Messages put in before an urgent one go out before it. Of messages that may wait, stores are merged: one StoreBegin,
    then one StoreDone, then the rest; and so are ends of requests. A StoreBegin that overtakes others is harmless: its
    slots are the session's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # makes one step of what is done to both
        self._batches: queue.SimpleQueue[list[pb.EngineMessage] | None] = queue.SimpleQueue()
        self._later: list[pb.EngineMessage] = []
        self._taken_s = time.monotonic()  # when the thread that sends last asked for more

    def put(self, message: pb.EngineMessage) -> None:
        """Have a message sent now, and what waits before it."""
        with self._lock:
            self._later.append(message)
            self._batches.put(self._take_later())

    def put_later(self, message: pb.EngineMessage) -> None:
        """Have a message sent with the next urgent one, or after `LINGER_S`; it is the outbox's from now on."""
        with self._lock:
            self._later.append(message)

    def flush(self) -> None:
        """Have what waits sent now."""
        with self._lock:
            if self._later:
                self._batches.put(self._take_later())

    def is_behind(self) -> bool:
        """Return whether the other side has not taken what was put in lately."""
        if self._batches.qsize() > MAX_UNSENT_BATCHES:
            return True
        return bool(self._later) and time.monotonic() - self._taken_s > BEHIND_S

    def close(self) -> None:
        """Nothing follows what was put in so far."""
        with self._lock:
            self._batches.put(self._take_later())
            self._batches.put(None)

    def take(self, timeout_s: float = LINGER_S) -> list[pb.EngineMessage] | None:
        """Wait for an urgent message, or for `timeout_s`; return what to send now, in order; None at the end."""
        self._taken_s = time.monotonic()
        try:
            taken = self._batches.get(timeout=timeout_s)
        except queue.Empty:
            with self._lock:
                try:
                    taken = self._batches.get_nowait()  # put in meanwhile: said before what waits now
                except queue.Empty:
                    return self._take_later()
        return None if taken is None else taken + self._take_more()

    def _take_more(self) -> list[pb.EngineMessage]:
        """Take what else was put in to be sent at once, without waiting."""
        taken: list[pb.EngineMessage] = []
        while not self._batches.empty():
            batch = self._batches.get()
            if batch is None:
                self._batches.put(None)  # the next `take` returns it
                break
            taken += batch
        return taken

    def _take_later(self) -> list[pb.EngineMessage]:
        taken, self._later = self._later, []
        return _together(taken) if len(taken) > 1 else taken


def _together(messages: Sequence[pb.EngineMessage]) -> list[pb.EngineMessage]:
    begun, done, ended = pb.StoreBegin(), pb.StoreDone(), pb.RequestsEnded()
    rest: list[pb.EngineMessage] = []
    for message in messages:
        match message.WhichOneof("kind"):
            case "store_begin":
                begun.MergeFrom(message.store_begin)
            case "store_done":
                done.MergeFrom(message.store_done)
            case "requests_ended" if len(ended.requests) + len(message.requests_ended.requests) <= MAX_ENDED_REQUESTS:
                ended.requests.extend(message.requests_ended.requests)
                ended.num_dropped += message.requests_ended.num_dropped
            case _:
                rest.append(message)
    if ended.requests or ended.num_dropped:
        rest.append(pb.EngineMessage(requests_ended=ended))
    if done.stores:
        rest.insert(0, pb.EngineMessage(store_done=done))
    if begun.stores:
        rest.insert(0, pb.EngineMessage(store_begin=begun))
    return rest


def in_bounds(messages: Iterable[pb.EngineMessage]) -> Iterator[pb.EngineMessages]:
    """Yield messages together, in their order, as many at once as the daemon takes."""
    together, together_bytes = list[pb.EngineMessage](), 0
    for message in messages:
        num_bytes = message.ByteSize()
        if together and (together_bytes + num_bytes > MAX_TOGETHER_BYTES or len(together) == MAX_MESSAGES):
            yield pb.EngineMessages(messages=together)
            together, together_bytes = [], 0
        together.append(message)
        together_bytes += num_bytes
    if together:
        yield pb.EngineMessages(messages=together)
