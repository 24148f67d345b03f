"""One namespace of the daemon as an object store: a session, a thread, and what the daemon holds."""

import contextlib
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

from kvtier._pb import engine_pb2 as pb
from kvtier.client.address import PROTOCOL_VERSION
from kvtier.client.engine_session import Attachment, EngineSession
from kvtier.concurrency.pauses import SLOW_POLL_S
from kvtier.core.layout import ChunkKey
from kvtier.errors import KvtierError
from kvtier.version import __version__
from kvtier_lmcache.adapter_settings import AdapterSettings
from kvtier_lmcache.load_tasks import LoadTask, LoadTasks
from kvtier_lmcache.object_layouts import ObjectLayout, pin_model_of
from kvtier_lmcache.open_arena import OpenArena
from kvtier_lmcache.space_pins import SpacePins
from kvtier_lmcache.store_tasks import StoreTask, StoreTasks

CREDIT_BYTES = 64 * 1024**2
"""Slots granted ahead for stores, at most `MAX_CREDITS`: what is copied while the daemon answers."""
MAX_CREDITS = 256
_TICK_S = 0.05

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class _Attached(NamedTuple):
    attachment: Attachment


class _Detached(NamedTuple):
    attachment: Attachment


class _Received(NamedTuple):
    attachment: Attachment
    message: pb.DaemonMessage


@dataclass(frozen=True, eq=False)
class LookupTask:
    """Keys that LMCache asks for; `on_end` gets the indexes of those that the daemon holds."""

    keys: Sequence[ChunkKey]
    on_end: Callable[[list[int]], None]

    def reject(self) -> None:
        """All are misses."""
        self.on_end([])


Task = StoreTask | LoadTask | LookupTask


def _contained(call: Callable[P, None]) -> Callable[P, None]:
    """Return a call of LMCache's side whose errors are logged: other tasks, and the thread, go on."""

    @wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception:
            logger.exception("kvtier: LMCache did not take what became of a task")

    return run


class ObjectSpace:
    """Objects of one layout, in one namespace. Its thread owns everything that changes, and calls all callbacks.

    Without a session, or when the daemon does not answer in time, lookups and loads are misses and stores fail.

    Args:
        layout: Of its objects.
        settings: Where the daemon is, and how long to wait for it.
        on_evicted: Called with keys that the daemon no longer holds.

    Attributes:
        pins: What the daemon has pinned of it.
        num_late: Times that the daemon did not answer.
    """

    def __init__(
        self, layout: ObjectLayout, settings: AdapterSettings, on_evicted: Callable[[Sequence[ChunkKey]], None]
    ) -> None:
        self.layout = layout
        self.pins = SpacePins()
        self._timeout_s = settings.timeout_s
        self._on_evicted = _contained(on_evicted)
        self._engine_id = uuid.uuid4().hex
        self._session = EngineSession(settings.socket, self._hello, self, settings.daemon_uid)
        self._inbox: queue.SimpleQueue[_Attached | _Detached | _Received | Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtier-objects", daemon=True)
        self._arena: OpenArena | None = None
        self._held: set[ChunkKey] = set()  # changed by the thread; others only ask what is in it
        self._before: set[ChunkKey] = set()  # held in the last session, and not named in this one yet
        self._is_known = False  # `_held` is all that the daemon holds
        self._stores_all = False
        self._is_late = False  # the daemon did not answer, and has sent nothing since
        self._problem = ""  # that ended the last session here, until one is known to work
        self._wait_s: float | None = None  # for the next event
        self._early: list[tuple[Task, float]] = []  # what came before it was known, each with its deadline
        self._stores = StoreTasks(layout.object_bytes, settings.timeout_s)
        self._loads = LoadTasks(layout.object_bytes, settings.timeout_s)
        self.num_late = 0

    def start(self) -> None:
        """Begin to attach; returns at once."""
        self._thread.start()
        self._session.start()

    def close(self) -> None:
        """End the session; open tasks fail."""
        self._session.close()
        self._inbox.put(None)
        self._thread.join()

    @property
    def is_serving(self) -> bool:
        """The daemon has said what it holds, and answers. Any thread."""
        return self._is_known and not self._is_late

    @property
    def held_bytes(self) -> int:
        """Bytes of the objects that the daemon holds, before compression. Any thread."""
        return len(self._held) * self.layout.object_bytes

    def lookup(self, keys: Sequence[ChunkKey], on_end: Callable[[list[int]], None]) -> None:
        """Ask which of these are held; while the session is up, the answer comes before this returns. Any thread."""
        if self.is_serving:
            on_end(self._find(keys))
        else:
            self._inbox.put(LookupTask(keys, _contained(on_end)))

    def load(self, keys: Sequence[ChunkKey], addresses: Sequence[int], on_end: Callable[[list[int]], None]) -> None:
        """Copy objects to these addresses. Any thread."""
        self._inbox.put(LoadTask(keys, addresses, _contained(on_end)))

    def store(
        self, keys: Sequence[ChunkKey], addresses: Sequence[int], on_end: Callable[[list[ChunkKey], bool], None]
    ) -> None:
        """Store the objects at these addresses. Any thread."""
        self._inbox.put(StoreTask(keys, addresses, _contained(on_end)))

    def answer(self, answers: Iterable[pb.EngineMessage]) -> None:
        """Send what binds pins, if there is a session: the next one begins with all pins. Any thread."""
        if (arena := self._arena) is not None:
            for answer in answers:
                arena.attachment.send(answer)

    def on_attached(self, attachment: Attachment) -> None:
        """Enqueue. Session thread."""
        self._inbox.put(_Attached(attachment))

    def on_message(self, attachment: Attachment, message: pb.DaemonMessage) -> None:
        """Enqueue. Session thread."""
        self._inbox.put(_Received(attachment, message))

    def on_detached(self, attachment: Attachment) -> None:
        """Enqueue. Session thread."""
        self._inbox.put(_Detached(attachment))

    def _hello(self, turn: int) -> pb.Hello:
        return pb.Hello(
            protocol=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            pid=os.getpid(),
            vllm_version="lmcache",
            kvtier_version=__version__,
            model_names=[pin_model_of(self.layout), f"lmcache/{self.layout.family.model_name}"],
            fingerprint=self.layout.fingerprint(),
            layout=self.layout.kv_layout(),
            store_credits=max(1, min(MAX_CREDITS, CREDIT_BYTES // self.layout.object_bytes)),
        )

    def _find(self, keys: Sequence[ChunkKey]) -> list[int]:
        return [index for index, key in enumerate(keys) if key in self._held]

    def _run(self) -> None:
        while self._step():
            pass
        self._end_session()
        self._reject_rest()

    def _reject_rest(self) -> None:
        """End what waited until it is known what the daemon holds, and what came after the end was asked for."""
        for task, _ in self._early:
            self._guarded(task.reject)
        self._early.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._inbox.get_nowait()
                if isinstance(event, Task):
                    self._guarded(event.reject)

    def _step(self) -> bool:
        """Handle what has come, then go on with what is open; False at the end."""
        is_idle = self._stores.is_idle and self._loads.is_idle and not self._early
        self._wait_s = _TICK_S
        if is_idle:
            self._guarded(self._map_rows)
        with contextlib.suppress(queue.Empty):
            event = self._inbox.get(timeout=self._wait_s)
            while event is not None:
                self._guarded(self._handle, event)
                event = self._inbox.get_nowait()
            return False
        self._guarded(self._advance)
        return True

    def _map_rows(self) -> None:
        """Map rows without pauses: LMCache loads in bursts, and what it takes of a core is some 0.15 s for each GiB."""
        self._wait_s = None
        if self._arena is not None and (pause_s := self._arena.map_rows(lambda: not self._inbox.empty())) is not None:
            self._wait_s = pause_s if pause_s >= SLOW_POLL_S else 0.0

    def _guarded(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step; if it fails, all that is open is a miss, and the session begins again."""
        try:
            step(*args)
        except Exception as exc:  # a cache failure never reaches LMCache, whatever it is
            level = logging.WARNING if isinstance(exc, KvtierError) else logging.ERROR
            is_news, self._problem = repr(exc) != self._problem, repr(exc)
            if is_news:
                logger.log(level, "kvtier: the session with the daemon begins again: %r", exc)
            self._end_session()
            self._session.reconnect()

    def _handle(self, event: _Attached | _Detached | _Received | Task) -> None:
        match event:
            case _Attached(attachment):
                self._end_session()
                self._begin(attachment)
            case _Received(attachment, message):
                if self._arena is not None and self._arena.attachment is attachment:
                    self._take(message, self._arena)
            case _Detached(attachment):
                if self._arena is not None and self._arena.attachment is attachment:
                    self._end_session()
            case _ if self.is_serving:
                self._begin_task(event)
            case _ if self._is_late:
                event.reject()
            case _:
                self._early.append((event, time.monotonic() + self._timeout_s))

    def _begin_task(self, task: Task) -> None:
        match task:
            case StoreTask() if not self._stores_all:  # no answer would come: the daemon names pinned chunks only
                task.reject()
            case StoreTask():
                self._stores.add(task, self._held, time.monotonic())
            case LoadTask():
                self._loads.add(task, self._held)
            case LookupTask():
                task.on_end(self._find(task.keys))

    def _begin(self, attachment: Attachment) -> None:
        self._arena = OpenArena(attachment, self.layout.object_bytes)
        self._stores_all = attachment.welcome.store_mode == pb.STORE_ALL
        self.answer(self.pins.begin(attachment.welcome))
        if not self._stores_all:
            logger.warning('kvtier: the daemon stores pinned prompts only; LMCache needs cache.store = "all"')
            self._know_all()

    def _end_session(self) -> None:
        self.pins.end()
        self._before |= self._held
        self._held.clear()
        self._is_known = self._is_late = False
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._stores.fail_all()
        self._loads.fail_all()

    def _take(self, message: pb.DaemonMessage, arena: OpenArena) -> None:
        self._stores.renew(time.monotonic())
        if self._is_late:
            logger.info("kvtier: the daemon answers again")
            self._is_late = False
            self._session.probe(False)
        match message.WhichOneof("kind"):
            case "acquire_update":
                self._loads.update(message.acquire_update, arena, time.monotonic())
            case "store_credits":
                self._stores.add_credits(message.store_credits.slots)
            case "chunks_held":
                self._take_held(message.chunks_held)
            case "pin_added":
                self.answer(self.pins.arrived([message.pin_added.pin]))
            case "pins_added":
                self.answer(self.pins.arrived(message.pins_added.pins))
            case "pin_removed":
                self.pins.removed(message.pin_removed.pin_id)

    def _take_held(self, held: pb.ChunksHeld) -> None:
        if held.held:
            keys = [*held.keys, *self.pins.keys_of(held.pin_ids)]
            self._held.update(keys)
            self._stores.held(keys, time.monotonic())
        elif held.keys:
            self._held.difference_update(held.keys)
            self._stores.not_held(held.keys)
            self._on_evicted(held.keys)
        if held.complete:
            self._know_all()

    def _know_all(self) -> None:
        gone, self._before = self._before - self._held, set()
        if gone:
            self._on_evicted([*gone])
        self._is_known, self._problem = True, ""

    def _advance(self) -> None:
        now_s = time.monotonic()
        self._take_early(now_s)
        if self._arena is None:
            return
        self._stores.write(self._arena, now_s)
        self._stores.expire(now_s)
        self._loads.ask(self._arena, now_s)
        if self._loads.is_late(now_s) or self._stores.is_late(now_s):
            logger.warning("kvtier: no answer from the daemon in time; all is a miss until it answers a probe")
            self._is_late = True
            self.num_late += 1
            self._loads.abandon(self._arena)
            self._stores.abandon()
            self._session.probe(True)

    def _take_early(self, now_s: float) -> None:
        """Begin what came before it was known what the daemon holds, or reject it where that is not to be expected."""
        early, self._early = self._early, []
        is_failing = self._session.is_failing or bool(self._problem)
        for task, deadline_s in early:
            if self.is_serving:
                self._begin_task(task)
            elif self._is_late or now_s >= deadline_s or (self._arena is None and is_failing):
                task.reject()
            else:
                self._early.append((task, deadline_s))
