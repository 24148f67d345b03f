"""Loads of one space: acquires some objects at a time, copies each as soon as it is readable, and releases them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import ChunkKey
from kvtier_lmcache.open_arena import OpenArena

WINDOW_BYTES = 32 * 1024**2
"""Acquired at once: the daemon reads one window from disk while another is copied."""
MAX_WINDOWS = 3
"""Acquired and not released. With a quarter of the arena each at most, there is space for stores beside them."""


@dataclass(eq=False)
class LoadTask:
    """One of LMCache's load tasks.

    Attributes:
        keys: Of its objects.
        addresses: Where each object goes; written until `on_end` is called, never after.
        on_end: Called once, with the indexes of the objects that were loaded.
    """

    keys: Sequence[ChunkKey]
    addresses: Sequence[int]
    on_end: Callable[[list[int]], None]
    loaded: list[int] = field(default_factory=list)
    num_open: int = 0

    def reject(self) -> None:
        """All are misses."""
        self.on_end([])

    def resolve(self, index: int, is_loaded: bool) -> None:
        """An object is loaded, or a miss."""
        if is_loaded:
            self.loaded.append(index)
        self.num_open -= 1
        if not self.num_open:
            self.on_end(self.loaded)


@dataclass(eq=False)
class _Window:
    """One Acquire; `open` are the places of its keys whose state is not final."""

    places: list[tuple[LoadTask, int]]
    open: set[int]
    is_answered: bool = False


class LoadTasks:
    """All loads of a space. The space's thread only.

    Args:
        object_bytes: Of each object.
        timeout_s: Acquires without an answer to any of them for so long are misses of what is left of them.
    """

    def __init__(self, object_bytes: int, timeout_s: float) -> None:
        self._object_bytes, self._timeout_s = object_bytes, timeout_s
        self._unasked: deque[tuple[LoadTask, int]] = deque()
        self._windows: dict[int, _Window] = {}
        self._deadline_s = 0.0  # of all: what the disk reads for one, those behind it wait for
        self._next_id = 1

    @property
    def is_idle(self) -> bool:
        """No task is open."""
        return not self._unasked and not self._windows

    def add(self, task: LoadTask, held: set[ChunkKey]) -> None:
        """Take a task; what the daemon does not hold is a miss at once."""
        wanted = [index for index, key in enumerate(task.keys) if key in held]
        task.num_open = len(wanted)
        if not wanted:
            task.on_end([])
        self._unasked.extend((task, index) for index in wanted)

    def ask(self, arena: OpenArena, now_s: float) -> None:
        """Acquire as much as may be acquired at once."""
        most = max(1, min(arena.num_slots // 4, WINDOW_BYTES // self._object_bytes))
        while self._unasked and len(self._windows) < MAX_WINDOWS:
            places: dict[ChunkKey, tuple[LoadTask, int]] = {}
            while self._unasked and len(places) < most:
                task, index = self._unasked[0]
                if task.keys[index] in places:  # an Acquire names each key once
                    break
                places[task.keys[index]] = self._unasked.popleft()
            self._windows[self._next_id] = _Window([*places.values()], {*range(len(places))})
            self._deadline_s = now_s + self._timeout_s
            acquire = pb.Acquire(acquire_id=self._next_id, keys=[*places])
            self._next_id += 1
            arena.attachment.send(pb.EngineMessage(acquire=acquire))

    def update(self, update: pb.AcquireUpdate, arena: OpenArena, now_s: float) -> None:
        """Copy what has become readable; ArenaError if the arena is damaged."""
        window = self._windows.get(update.acquire_id)
        if window is None:
            return
        arena.check_length()
        self._deadline_s = now_s + self._timeout_s
        resident = update.resident
        for place, slot, generation in zip(resident.indexes, resident.slots, resident.generations, strict=True):
            self._copy(window, place, slot, generation, arena)
        pending: set[int] = set()
        for chunk in update.chunks:
            if chunk.state == pb.ChunkResidency.HOST:
                self._copy(window, chunk.index, chunk.slot.slot, chunk.slot.generation, arena)
            elif chunk.state == pb.ChunkResidency.MISS:
                self._resolve(window, chunk.index, False)
            else:
                pending.add(chunk.index)
        if not window.is_answered:
            window.is_answered = True
            self._miss(window, sorted(window.open - pending), update.miss_reason)
        if not window.open:
            self._release(update.acquire_id, arena)

    def _miss(self, window: _Window, places: Sequence[int], reason: int) -> None:
        """The first answer does not name these.

        The daemon ends what it holds at the first object that it lacks, as of a prompt, and objects are none: those
        behind it may be held, and are asked for again.
        """
        is_gap = reason in (pb.RequestOutcome.OUTCOME_UNSPECIFIED, pb.RequestOutcome.NOT_STORED)
        again = places[1:] if is_gap else ()
        for place in places[: len(places) - len(again)]:
            self._resolve(window, place, False)
        window.open.difference_update(again)
        self._unasked.extendleft(window.places[place] for place in reversed(again))

    def is_late(self, now_s: float) -> bool:
        """Return whether the daemon has not answered in time."""
        return bool(self._windows) and now_s >= self._deadline_s

    def abandon(self, arena: OpenArena) -> None:
        """Make misses of all that is not loaded yet, and release it."""
        numbers = [*self._windows]
        self.fail_all()
        for number in numbers:
            arena.attachment.send(pb.EngineMessage(release=pb.Release(acquire_id=number, all=True)))

    def fail_all(self) -> None:
        """There is no session: what is not loaded yet is a miss."""
        windows, unasked = [*self._windows.values()], [*self._unasked]
        self._windows.clear()
        self._unasked.clear()
        for window in windows:
            for place in [*window.open]:
                self._resolve(window, place, False)
        for task, index in unasked:
            task.resolve(index, False)

    def _copy(self, window: _Window, place: int, slot: int, generation: int, arena: OpenArena) -> None:
        task, index = window.places[place]
        self._resolve(window, place, arena.read(slot, generation, task.addresses[index]))

    def _resolve(self, window: _Window, place: int, is_loaded: bool) -> None:
        if place in window.open:
            window.open.remove(place)
            task, index = window.places[place]
            task.resolve(index, is_loaded)

    def _release(self, number: int, arena: OpenArena) -> None:
        del self._windows[number]
        arena.attachment.send(pb.EngineMessage(release=pb.Release(acquire_id=number, all=True)))
