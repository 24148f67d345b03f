"""Stores of one space: objects wait for a slot, are copied, and are done when the daemon says that it holds them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import ChunkKey
from kvtier_lmcache.open_arena import OpenArena

BATCH_BYTES = 4 * 1024**2
"""Copied before they are reported: the daemon checks and compresses these while the next are copied."""


@dataclass(eq=False)
class StoreTask:
    """One of LMCache's store tasks.

    Attributes:
        keys: Of its objects.
        addresses: Where each object lies; valid until `on_end` is called.
        on_end: Called once, with the keys that this task stored, and whether the daemon holds all of them.
        deadline_s: When it fails without further progress.
    """

    keys: Sequence[ChunkKey]
    addresses: Sequence[int]
    on_end: Callable[[list[ChunkKey], bool], None]
    deadline_s: float = 0.0
    sources: dict[ChunkKey, int] = field(init=False)
    missing: set[ChunkKey] = field(default_factory=set)
    stored: list[ChunkKey] = field(default_factory=list)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.sources = dict(zip(self.keys, self.addresses, strict=True))

    def end(self, is_complete: bool) -> None:
        """Report the end, once."""
        if not self.is_over:
            self.is_over = True
            self.on_end(self.stored, is_complete)

    def reject(self) -> None:
        """Nothing is stored."""
        self.end(False)


class StoreTasks:
    """All stores of a space. The space's thread only.

    Args:
        object_bytes: Of each object.
        timeout_s: A task that makes no progress for so long fails; a daemon that owes an answer and sends nothing is
            late.
    """

    def __init__(self, object_bytes: int, timeout_s: float) -> None:
        self._batch = max(1, BATCH_BYTES // object_bytes)
        self._timeout_s = timeout_s
        self._unwritten: dict[ChunkKey, None] = {}  # in order; each has tasks that wait
        self._unanswered: set[ChunkKey] = set()  # written; of tasks that are over, too
        self._deadline_s = 0.0  # of the daemon's next message
        self._waiting: dict[ChunkKey, list[StoreTask]] = {}  # tasks that are not over
        self._credits: deque[pb.SlotRef] = deque()

    @property
    def is_idle(self) -> bool:
        """No task is open, and the daemon owes no answer."""
        return not self._waiting and not self._unanswered

    def add(self, task: StoreTask, held: set[ChunkKey], now_s: float) -> None:
        """Take a task; what is held already, or being stored, is not copied again."""
        task.deadline_s = now_s + self._timeout_s
        task.missing = set(task.keys) - held
        if not task.missing:
            task.end(True)
            return
        for key in task.sources:
            if key in task.missing:
                tasks = self._waiting.setdefault(key, [])
                if not tasks:
                    self._unwritten[key] = None
                tasks.append(task)

    def add_credits(self, slots: Iterable[pb.SlotRef]) -> None:
        """The daemon granted slots."""
        self._credits.extend(slots)

    def write(self, arena: OpenArena, now_s: float) -> None:
        """Copy what there are slots for; ArenaError if the arena is damaged."""
        if not self._unanswered:
            self._deadline_s = now_s + self._timeout_s
        while self._unwritten and self._credits:
            arena.check_length()
            stores: list[pb.StoreSlot] = []
            while self._unwritten and self._credits and len(stores) < self._batch:
                key = next(iter(self._unwritten))
                del self._unwritten[key]
                # The memory of a task that is over may have another object by now.
                source = self._waiting[key][0].sources[key]
                ref = self._credits.popleft()
                arena.write(key, ref, source)
                stores.append(pb.StoreSlot(key=key, slot=ref))
            self._unanswered.update(store.key for store in stores)
            arena.attachment.send(pb.EngineMessage(store_begin=pb.StoreBegin(stores=stores)))
            arena.attachment.send(pb.EngineMessage(store_done=pb.StoreDone(stores=stores)))

    def held(self, keys: Iterable[ChunkKey], now_s: float) -> None:
        """The daemon holds these."""
        for key in keys:
            self._unanswered.discard(key)
            self._unwritten.pop(key, None)
            for place, task in enumerate(self._waiting.pop(key, ())):
                task.missing.discard(key)
                task.deadline_s = now_s + self._timeout_s
                if place == 0:  # the others found it being stored
                    task.stored.append(key)
                if not task.missing:
                    task.end(True)

    def not_held(self, keys: Iterable[ChunkKey]) -> None:
        """The daemon does not hold these: evicted, refused, or unchecked as yet when a pin is bound. Tasks wait on."""
        self._unanswered.difference_update(keys)

    def expire(self, now_s: float) -> None:
        """End tasks that made no progress."""
        late = {task for tasks in self._waiting.values() for task in tasks if now_s >= task.deadline_s}
        for task in late:
            task.end(False)
        if late:
            waiting = {key: [task for task in tasks if not task.is_over] for key, tasks in self._waiting.items()}
            self._waiting = {key: tasks for key, tasks in waiting.items() if tasks}
            self._unwritten = {key: None for key in self._unwritten if key in self._waiting}

    def renew(self, now_s: float) -> None:
        """The daemon has sent something: what else it owes is not late yet."""
        self._deadline_s = now_s + self._timeout_s

    def is_late(self, now_s: float) -> bool:
        """Return whether the daemon has not answered in time."""
        return bool(self._unanswered) and now_s >= self._deadline_s

    def abandon(self) -> None:
        """End every task; the session, and its slots, stay."""
        tasks = {task for tasks in self._waiting.values() for task in tasks}
        self._waiting.clear()
        self._unwritten.clear()
        self._unanswered.clear()
        for task in tasks:
            task.end(False)

    def fail_all(self) -> None:
        """There is no session: end every task."""
        self._credits.clear()
        self.abandon()
