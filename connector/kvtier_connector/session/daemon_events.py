"""The event queue from the session's threads to the scheduler's; pins are bound on the way."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment, EngineSession
from kvtier_connector.engine.namespace.namespace_fingerprint import explain_difference
from kvtier_connector.session.device_blocks import DeviceBlocks
from kvtier_connector.session.pin_binder import BoundPin, PinBinder

logger = logging.getLogger(__name__)


class BackgroundThread:
    """Runs what is too slow for the scheduler (hashing pins and adapters) in order, in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = threading.Lock()

    def submit(self, task: Callable[[], None]) -> None:
        """Enqueue a task from any thread; never waits for it."""
        if self._started.acquire(blocking=False):
            self._thread.start()
        self._tasks.put(task)

    def close(self) -> None:
        """Stop after the task that runs; does not wait."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # a broken task must not end the others
                logger.exception("kvtier: background task failed")


class Attached(NamedTuple):
    """A new session is up."""

    attachment: Attachment


class Detached(NamedTuple):
    """A session is over."""

    attachment: Attachment


class Received(NamedTuple):
    """The daemon sent a message."""

    attachment: Attachment
    message: pb.DaemonMessage


class PinBound(NamedTuple):
    """A pin's chunk keys are known; they are being sent to the daemon."""

    attachment: Attachment
    pin: BoundPin


class PinGone(NamedTuple):
    """A pin was removed."""

    attachment: Attachment
    pin_id: str


Event = Attached | Detached | Received | PinBound | PinGone
MAX_HELD_CHUNKS = 1_000_000
"""The most that the scheduler tracks, 110 MB: with 16-token chunks and 100 KB of KV per token, 1.6 TB of cache."""
MAX_ITEMS = 2 * MAX_HELD_CHUNKS
"""Events, and chunks named in them, that may wait to be polled: some 200 MB."""

_HAND_OVER_KEYS = 2048
"""Of pins that are handed over together: a poll takes them in, in some 4 ms."""
_HAND_OVER_S = 0.01
"""How long pins wait for those handed over before to be polled, while vLLM is in a step."""
_RUNNING_S = 0.1
"""A scheduler that has polled within it polls again; how long they wait for one that takes others in."""


class DaemonEvents:
    """Owns the session and feeds the scheduler: its listener enqueues, `poll` drains.

    vLLM polls while it has requests. An engine that stands idle beside a busy one, or whose scheduler hangs, would
    collect every message on what the daemon holds: beyond `MAX_ITEMS` the session is reopened, and the daemon lists
    what it holds once. `wake` is called, from any thread, with the first event since the last poll: an engine that it
    can wake polls then.

    Pins go through the background thread in the order they came. A pin's `PinBound` is enqueued before the binding
    is sent to the daemon, so the daemon's messages about its chunks find them known. When all pins that the Welcome
    named are bound, that thread calls `on_bound`.
    """

    def __init__(
        self,
        socket_path: Path,
        make_hello: Callable[[int], pb.Hello],
        binder: PinBinder,
        background: BackgroundThread,
        device_blocks: DeviceBlocks,
        on_bound: Callable[[Attachment], None] = lambda attachment: None,
        daemon_uid: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._wake = wake
        self._session = EngineSession(socket_path, make_hello, self, daemon_uid)
        self._binder, self._background, self._on_bound = binder, background, on_bound
        self._device_blocks = device_blocks
        self._lock = threading.Lock()  # protects the next three
        self._events: deque[Event] = deque()
        self._num_items = 0
        self._overflowed: Attachment | None = None  # its session sent more than was polled
        self._has_events = threading.Event()  # something was enqueued since the last `poll`
        self._polled_s, self._is_polling = 0.0, False
        self._took_pins = threading.Event()  # `poll` has returned the pins that were handed over last, or was about to
        self._awaited: set[str] = set()  # pins named in the Welcome that have yet to come; session thread

    def start(self) -> None:
        """Begin to attach, in the background."""
        self._session.start()

    @property
    def is_failing(self) -> bool:
        """See `EngineSession`."""
        return self._session.is_failing

    def poll(self) -> Iterable[Event]:
        """Return what happened since the last call; never waits.

        Events of a session before the last `reopen` are left out: it may have attached at the moment of the reset.
        """
        self._polled_s = time.monotonic()
        # Each step asks; what is enqueued at this moment is for the next call.
        return self._take() if self._has_events.is_set() else ()

    def _take(self) -> Iterator[Event]:
        self._has_events.clear()
        with self._lock:
            events, self._events, self._num_items = self._events, deque(), 0
        self._took_pins.set()
        self._is_polling = True
        try:
            for event in events:
                if event.attachment.turn == self._session.turn:
                    yield event
        finally:
            self._is_polling = False

    def wait_for_events(self, timeout_s: float) -> bool:
        """Return True when there is an event to poll, False after `timeout_s`; releases the interpreter's lock."""
        return self._has_events.wait(timeout_s)

    def _enqueue(self, *events: Event) -> None:
        """Enqueue events of one session together, in their order; the end of a session comes alone."""
        if not events:
            return
        first = events[0]
        with self._lock:
            is_end = isinstance(first, Detached)
            if first.attachment is self._overflowed and not is_end:
                return
            self._events += events
            self._num_items += sum(map(_num_items, events))
            is_full = self._num_items > MAX_ITEMS and not is_end
            if is_full:
                self._drop_events(first.attachment)
        if not self._has_events.is_set():
            self._has_events.set()
            self._wake()
        if is_full:
            logger.warning("kvtier: vLLM's scheduler has not run for long; the session is reopened")
            self._session.reconnect()

    def _drop_events(self, attachment: Attachment) -> None:
        """Drop what was not polled, except ends of sessions; later events of this session would build on it."""
        self._overflowed = attachment
        self._events = deque(event for event in self._events if isinstance(event, Detached))
        self._num_items = len(self._events)

    def probe(self, wanted: bool) -> None:
        """Start or stop pinging the daemon."""
        self._session.probe(wanted)

    def reconnect(self) -> None:
        """End the session and open another with the same Hello; with a growing pause where that goes on."""
        self._session.reconnect()

    def reopen(self) -> None:
        """End the session and open another with a new Hello."""
        self._session.reopen()

    def close(self) -> None:
        """End the session for good."""
        self._background.close()
        self._session.close()

    def on_attached(self, attachment: Attachment) -> None:
        """Enqueue; bind the pins that stand. Session thread."""
        self._enqueue(Attached(attachment))
        welcome = attachment.welcome
        for other in welcome.other_namespaces:
            logger.warning("%s", explain_difference(other.namespace_id, sorted(other.fields), other.num_prompts))
        self._background.submit(self._device_blocks.clear)
        self._submit_bind(attachment, welcome.pins)
        self._awaited = {*welcome.pin_ids} - {pin.pin_id for pin in welcome.pins}
        self._report_bound(attachment)

    def on_message(self, attachment: Attachment, message: pb.DaemonMessage) -> None:
        """Enqueue; pins by way of the background thread. Session thread."""
        match message.WhichOneof("kind"):
            case "pin_added":
                self._pins_arrived(attachment, [message.pin_added.pin])
            case "pins_added":
                self._pins_arrived(attachment, message.pins_added.pins)
            case "pin_removed":
                gone = PinGone(attachment, message.pin_removed.pin_id)
                self._background.submit(lambda: self._forget(gone))
                self._no_longer_await(attachment, [gone.pin_id])
            case "device_blocks_wanted":
                self._background.submit(lambda: self._count(attachment, message.device_blocks_wanted))
            case _:
                self._enqueue(Received(attachment, message))

    def on_detached(self, attachment: Attachment) -> None:
        """Enqueue. Session thread."""
        self._enqueue(Detached(attachment))

    def _pins_arrived(self, attachment: Attachment, pins: Sequence[pb.Pin]) -> None:
        self._submit_bind(attachment, pins)
        self._no_longer_await(attachment, [pin.pin_id for pin in pins])

    def _no_longer_await(self, attachment: Attachment, pin_ids: Sequence[str]) -> None:
        """Pins that the Welcome named, or others, have arrived or were removed."""
        if not self._awaited.isdisjoint(pin_ids):
            self._awaited.difference_update(pin_ids)
            self._report_bound(attachment)

    def _report_bound(self, attachment: Attachment) -> None:
        if not self._awaited:
            self._background.submit(lambda: self._on_bound(attachment))

    def _forget(self, gone: PinGone) -> None:
        self._device_blocks.gone(gone.pin_id)
        self._enqueue(gone)

    def _count(self, attachment: Attachment, asked: pb.DeviceBlocksWanted) -> None:
        attachment.send(pb.EngineMessage(device_blocks=self._device_blocks.answer(asked)))

    def _submit_bind(self, attachment: Attachment, pins: Sequence[pb.Pin]) -> None:
        self._background.submit(lambda: self._bind(attachment, pins))

    def _bind(self, attachment: Attachment, pins: Sequence[pb.Pin]) -> None:
        confirmed, unknown, num_keys = list[str](), list[str](), 0
        bound: list[PinBound] = []  # enqueued together: one by one, each woke the scheduler
        for pin in pins:
            if (known := self._binder.known(pin)) is not None:
                self._device_blocks.bound(known)
                bound.append(PinBound(attachment, known))
                confirmed.append(pin.pin_id)
                num_keys += len(known.keys)
                if num_keys >= _HAND_OVER_KEYS:
                    self._hand_over(bound)
                    bound, num_keys = [], 0
                continue
            if pin.joined_keys:
                unknown.append(pin.pin_id)
                continue
            self._enqueue(*bound)
            bound.clear()
            try:
                self._compute(attachment, pin)
            except Exception:  # a broken pin must not end the binding of others
                logger.exception("kvtier: a pin was not bound")
        self._hand_over(bound)
        if confirmed or unknown:
            confirm = pb.ConfirmPins(pin_ids=confirmed, unknown_pin_ids=unknown)
            attachment.send(pb.EngineMessage(confirm_pins=confirm))
            logger.info("kvtier pins bound, by keys that the daemon knew: %d", len(confirmed))

    def _hand_over(self, bound: Sequence[PinBound]) -> None:
        """Enqueue pins; where the scheduler runs, wait a moment for it to take those that were handed over before.

        The binder is ten times as fast as the scheduler. A poll takes in all pins that wait for it, and delays vLLM's
        step by as much.
        """
        if bound:
            runs = time.monotonic() - self._polled_s < _RUNNING_S
            if runs and not self._took_pins.wait(_HAND_OVER_S) and self._is_polling:
                self._took_pins.wait(_RUNNING_S)
            self._took_pins.clear()
            self._enqueue(*bound)

    def _compute(self, attachment: Attachment, pin: pb.Pin) -> None:
        binding = self._binder.bind(pin)
        if binding.bound is not None:
            self._device_blocks.bound(binding.bound)
            self._enqueue(PinBound(attachment, binding.bound))
        else:  # it may have been bound before, under an adapter that is gone now
            self._forget(PinGone(attachment, pin.pin_id))
        attachment.send(pb.EngineMessage(bind_pin=binding.message))


def _num_items(event: Event) -> int:
    if not isinstance(event, Received):
        return 1
    held = event.message.chunks_held
    return 1 + len(held.keys) + len(held.pin_ids)
