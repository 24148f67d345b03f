"""A daemon in one thread that keeps the protocol's promises and no others; it acts when the test says so.

It answers late, promotes, evicts what is not leased, takes slots back from lost sessions, and checks what engines say.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.client.outbox import Outbox
from kvtier.core.arena_format import key_tag_of
from kvtier_connector.session.daemon_events import Attached, Detached, Event, Received
from tests.simulation.memory import Digests

ARENA_ID = b"A" * 16
MAX_CREDITS = 8

Key = bytes


@dataclass
class Slot:
    """One arena row.

    Attributes:
        generation: Grows when it is given out.
        key: Of the readable chunk in it.
        loading: The chunk that is being promoted into it.
        granted_to: The session that may write it.
        rows: What lies in it, as the workers of each group left it.
        stamp: Key tag and generation, as the last writer left them.
        leases: Who protects it: session and acquire.
    """

    generation: int = 0
    key: Key | None = None
    loading: Key | None = None
    granted_to: str | None = None
    row: Digests | None = None
    stamp: tuple[int, int] | None = None
    leases: set[tuple[str, int]] = field(default_factory=set)

    @property
    def is_free(self) -> bool:
        """Whether it may be given out."""
        return self.key is None and self.loading is None and self.granted_to is None and not self.leases


@dataclass
class PendingAcquire:
    """An acquire of the live session.

    Attributes:
        keys: As asked.
        slots: Per index, the slot leased.
        is_answered: The first update was sent.
    """

    keys: Sequence[Key]
    slots: dict[int, int] = field(default_factory=dict)
    is_answered: bool = False


class SimulatedDaemon:
    """One engine's daemon.

    Args:
        num_slots: Rows of the arena.
        stores_all: Unpinned chunks are stored too.
        all_stamped: Workers stamp every store; with sliding windows, not those of blocks that vLLM has freed.
        check_store: Called with the key and the row of each chunk that it commits.
    """

    def __init__(
        self, num_slots: int, *, stores_all: bool, all_stamped: bool, check_store: Callable[[Key, Digests], None]
    ) -> None:
        self.slots = [Slot() for _ in range(num_slots)]
        self.disk: dict[Key, Digests] = {}
        self.events: list[Event] = []
        self.pins: dict[str, pb.Pin] = {}
        self.bound: dict[str, tuple[Key, ...]] = {}
        self.acquires: dict[int, PendingAcquire] = {}
        self.num_stored = 0
        self.session: str | None = None
        self.locks: set[str] = set()
        self.stores_all = stores_all
        self._all_stamped = all_stamped
        self._check_store = check_store
        self._attachment: Attachment | None = None
        self._outbox = Outbox()
        self._session_ids = itertools.count(1)

    # Sessions

    def attach(self) -> None:
        """The engine attaches; the caller lets it bind the pins."""
        assert self.session is None
        self.session = f"s{next(self._session_ids)}"
        self.locks.add(self.session)
        self._outbox = Outbox()
        mode = pb.STORE_ALL if self.stores_all else pb.STORE_PINNED
        arena = pb.ArenaInfo(arena_id=ARENA_ID, path="/arena")
        self._attachment = Attachment(
            self._outbox, 0, pb.Welcome(lock_path=self.session, arena=arena, store_mode=mode, pins=self.pins.values())
        )
        self.events.append(Attached(self._attachment))
        if self.stores_all:
            held = pb.ChunksHeld(keys=self._held(), held=True, complete=True)
            self._say(pb.DaemonMessage(chunks_held=held))
        self.top_up()

    def lose_session(self) -> None:
        """The stream broke: the session's slots are quarantined, its leases too, until `sweep`."""
        if self._attachment is not None:
            self.events.append(Detached(self._attachment))
        self.session = self._attachment = None
        self.acquires.clear()
        self.bound.clear()

    def sweep(self) -> None:
        """No process holds a lost session's lock: what it had is free."""
        for session in self.locks - {self.session}:
            self.locks.discard(session)
            for slot in self.slots:
                if slot.granted_to == session:
                    slot.granted_to = None
                slot.leases = {lease for lease in slot.leases if lease[0] != session}
        for slot in self.slots:
            if slot.loading is not None and not slot.leases:
                slot.loading = None

    def forget(self) -> None:
        """Another namespace from now on: nothing is held."""
        self.disk.clear()
        for slot in self.slots:
            slot.key = slot.loading = None

    @property
    def attachment(self) -> Attachment:
        """The live session's."""
        assert self._attachment is not None
        return self._attachment

    # What the engine says

    def receive(self) -> None:
        """Take in what the engine has sent since the last time."""
        while messages := self._outbox.take(0):
            for message in messages:
                kind = message.WhichOneof("kind")
                if self.session is not None and (handle := getattr(self, f"_receive_{kind}", None)):
                    handle(getattr(message, kind))

    def _receive_acquire(self, acquire: pb.Acquire) -> None:
        assert acquire.acquire_id not in self.acquires, "an acquire id was used twice"
        self.acquires[acquire.acquire_id] = PendingAcquire(list(acquire.keys))

    def _receive_release(self, release: pb.Release) -> None:
        acquire = self.acquires.get(release.acquire_id)
        if acquire is None:
            return
        for index in list(acquire.slots) if release.all else release.indexes:
            if index in acquire.slots:
                self._drop_lease(acquire.slots.pop(index), release.acquire_id)
        if release.all or (acquire.is_answered and not acquire.slots):
            del self.acquires[release.acquire_id]

    def _drop_lease(self, number: int, acquire_id: int) -> None:
        slot = self.slots[number]
        assert self.session is not None
        slot.leases.discard((self.session, acquire_id))
        if slot.loading is not None and not slot.leases:
            slot.loading = None

    def _receive_store_begin(self, begin: pb.StoreBegin) -> None:
        for store in begin.stores:
            self._check_grant(store)
        self.top_up()

    def _check_grant(self, store: pb.StoreSlot) -> Slot:
        slot = self.slots[store.slot.slot]
        granted = (slot.granted_to, slot.generation)
        assert granted == (self.session, store.slot.generation), "the engine stores into a slot that is not its own"
        return slot

    def _receive_store_done(self, done: pb.StoreDone) -> None:
        for store in done.stores:
            slot = self._check_grant(store)
            slot.granted_to = None
            is_new = self._slot_of(store.key) is None
            is_stamped = slot.stamp == (key_tag_of(store.key), slot.generation)
            assert is_stamped or not self._all_stamped, "a store is said to be done that no worker has done"
            if is_stamped and slot.row is not None and is_new:
                self._check_store(store.key, slot.row)
                slot.key = store.key
                self.num_stored += 1
                self.announce_held([store.key], held=True)
            else:
                self.announce_held([store.key], held=self.holds(store.key))
        self.top_up()

    def _receive_bind_pin(self, bind: pb.BindPin) -> None:
        if bind.pin_id in self.pins:
            self.bound[bind.pin_id] = tuple(bind.keys)
            self.announce_held([key for key in bind.keys if self.holds(key)], held=True)
            self.announce_held([key for key in bind.keys if not self.holds(key)], held=False)

    # What it does of itself

    def pong(self) -> None:
        """Answer a ping."""
        self._say(pb.DaemonMessage(pong=pb.Pong()))

    def answer(self, acquire_id: int) -> None:
        """Answer an acquire for the first time: lease what is held, begin promotions."""
        acquire = self.acquires[acquire_id]
        acquire.is_answered = True
        chunks: list[pb.ChunkResidency] = []
        for index, key in enumerate(acquire.keys):
            number = self._slot_of(key) if self._slot_of(key) is not None else self._begin_promotion(key)
            if number is None:
                continue
            slot = self.slots[number]
            assert self.session is not None
            slot.leases.add((self.session, acquire_id))
            acquire.slots[index] = number
            state = pb.ChunkResidency.HOST if slot.loading is None else pb.ChunkResidency.PROMOTING
            chunks.append(self._residency(index, state, number))
        self._update(acquire_id, chunks)
        if not acquire.slots:
            del self.acquires[acquire_id]

    def _begin_promotion(self, key: Key) -> int | None:
        number = next((i for i, slot in enumerate(self.slots) if slot.is_free), None)
        if key not in self.disk or number is None:
            return None
        self._give_out(number)
        self.slots[number].loading = key
        return number

    def promote(self, number: int, *, well: bool) -> None:
        """A promotion ends."""
        slot = self.slots[number]
        key, slot.loading = slot.loading, None
        assert key is not None
        if well:
            slot.key, slot.row = key, self.disk[key].copy()
        else:
            self.disk.pop(key)
            self.announce_held([key], held=False)
        state = pb.ChunkResidency.HOST if well else pb.ChunkResidency.MISS
        for acquire_id, acquire in list(self.acquires.items()):
            indexes = [index for index, leased in acquire.slots.items() if leased == number]
            if not well:
                for index in indexes:
                    del acquire.slots[index]
            if indexes:
                self._update(acquire_id, [self._residency(index, state, number) for index in indexes])
        if not well:
            slot.leases.clear()

    @property
    def promotions(self) -> list[int]:
        """Slots that are being loaded."""
        return [number for number, slot in enumerate(self.slots) if slot.loading is not None]

    def evictable(self) -> list[int]:
        """Return slots whose chunk is not leased."""
        return [number for number, slot in enumerate(self.slots) if slot.key is not None and not slot.leases]

    def evict(self, number: int, *, write_back: bool) -> None:
        """A chunk leaves host memory, to disk or for good."""
        slot = self.slots[number]
        key, row = slot.key, slot.row
        assert key is not None
        assert row is not None
        slot.key = None
        if write_back:
            self.disk.setdefault(key, row.copy())
        elif key not in self.disk:
            self.announce_held([key], held=False)
        self.top_up()

    def top_up(self) -> None:
        """Give the live session credits."""
        if self.session is None:
            return
        num_wanted = MAX_CREDITS - sum(slot.granted_to == self.session for slot in self.slots)
        free = [number for number, slot in enumerate(self.slots) if slot.is_free][: max(0, num_wanted)]
        for number in free:
            self._give_out(number)
            self.slots[number].granted_to = self.session
        if free:
            slots = [self._slot_ref(number) for number in free]
            self._say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=slots)))

    def holds(self, key: Key) -> bool:
        """Return whether an acquire may find it."""
        return key in self.disk or self._slot_of(key) is not None

    def announce_held(self, keys: Sequence[Key], *, held: bool) -> None:
        """Say what is held, of bound keys or of all."""
        if not self.stores_all:
            bound = {key for keys in self.bound.values() for key in keys}
            keys = [key for key in keys if key in bound]
        if keys and self.session is not None:
            self._say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys, held=held)))

    def _give_out(self, number: int) -> None:
        slot = self.slots[number]
        slot.generation += 1
        slot.row = slot.stamp = None

    def _held(self) -> Iterable[Key]:
        return dict.fromkeys([*self.disk, *(slot.key for slot in self.slots if slot.key is not None)])

    def _slot_of(self, key: Key) -> int | None:
        return next((i for i, slot in enumerate(self.slots) if key in (slot.key, slot.loading)), None)

    def _slot_ref(self, number: int) -> pb.SlotRef:
        return pb.SlotRef(slot=number, generation=self.slots[number].generation)

    def _residency(self, index: int, state: "pb.ChunkResidency.State", number: int) -> pb.ChunkResidency:
        return pb.ChunkResidency(index=index, state=state, slot=self._slot_ref(number))

    def _update(self, acquire_id: int, chunks: Sequence[pb.ChunkResidency]) -> None:
        self._say(pb.DaemonMessage(acquire_update=pb.AcquireUpdate(acquire_id=acquire_id, chunks=chunks)))

    def _say(self, message: pb.DaemonMessage) -> None:
        self.events.append(Received(self.attachment, message))
