"""A daemon in one thread that keeps the engine protocol's promises and no others; it acts when the test says so.

It answers late, promotes, evicts what is not leased, takes slots back from lost sessions, and checks what engines say.
`FakeDaemon` serves it over gRPC, and passes `tests/contract` so.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtier._pb import engine_pb2 as pb
from kvtier.core.arena_format import key_tag_of

ARENA_ID = b"A" * 16

Key = bytes


class EngineLink(Protocol):
    """What the daemon has of an attached engine."""

    def send(self, message: pb.DaemonMessage) -> None:
        """Pass a message to it."""

    def lost(self) -> None:
        """Its session is over."""


@dataclass
class Slot:
    """One arena row.

    Attributes:
        generation: Grows when it is given out.
        key: Of the readable chunk in it.
        loading: The chunk that is being promoted into it.
        granted_to: The session that may write it.
        is_begun: That session has begun a store into it.
        row: What lies in it: anything that can be copied.
        stamp: Key tag and generation, as the last writer left them.
        leases: Who protects it: session and acquire.
    """

    generation: int = 0
    key: Key | None = None
    loading: Key | None = None
    granted_to: str | None = None
    is_begun: bool = False
    row: Any = None
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


class DaemonModel:
    """One engine's daemon.

    Args:
        num_slots: Rows of the arena.
        stores_all: Unpinned chunks are stored too.
        all_stamped: Workers stamp every store; with sliding windows, not those of blocks that vLLM has freed.
        check_store: Called with the key and the row of each chunk that it commits.

    Attributes:
        pins: By id; sent with Welcome.
        later_pin_ids: Of pins for which the Welcome has no space.
        link: The attached engine.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        stores_all: bool = False,
        all_stamped: bool = False,
        check_store: Callable[[Key, Any], None] = lambda key, row: None,
    ) -> None:
        self.slots = [Slot() for _ in range(num_slots)]
        self.disk: dict[Key, Any] = {}
        self.pins: dict[str, pb.Pin] = {}
        self.later_pin_ids: list[str] = []
        self.bound: dict[str, tuple[Key, ...]] = {}
        self.acquires: dict[int, PendingAcquire] = {}
        self.num_stored = 0
        self.session_id: str | None = None
        self.link: EngineLink | None = None
        self.locks: set[str] = set()
        self.stores_all = stores_all
        self._all_stamped = all_stamped
        self._check_store = check_store
        self._session_ids = itertools.count(1)

    # Sessions

    def attach(self, link: EngineLink, num_credits: int) -> None:
        """An engine attaches; it binds the pins of the Welcome."""
        assert self.session_id is None
        self.session_id, self.link, self._num_credits = f"s{next(self._session_ids)}", link, num_credits
        self.locks.add(self.session_id)
        self._send(pb.DaemonMessage(welcome=self._welcome(self.session_id)))
        if self.stores_all:
            held = pb.ChunksHeld(keys=self._held(), held=True, complete=True)
            self._send(pb.DaemonMessage(chunks_held=held))
        self.top_up()

    def _welcome(self, session: str) -> pb.Welcome:
        return pb.Welcome(
            session_id=session,
            lock_path=session,
            arena=pb.ArenaInfo(arena_id=ARENA_ID, path="/arena"),
            store_mode=pb.STORE_ALL if self.stores_all else pb.STORE_PINNED,
            pins=self.pins.values(),
            pin_ids=[*self.pins, *self.later_pin_ids],
        )

    def lose_session(self) -> None:
        """The stream broke: the session's slots are quarantined, its leases too, until `sweep`."""
        if self.link is not None:
            self.link.lost()
        self.session_id = self.link = None
        self.acquires.clear()
        self.bound.clear()

    def sweep(self) -> None:
        """No process holds a lost session's lock: what it had is free."""
        for session in self.locks - {self.session_id}:
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

    # What the engine says

    def receive(self, message: pb.EngineMessage) -> None:
        """Take in a message of the live session."""
        kind = message.WhichOneof("kind")
        if self.session_id is not None and (handle := getattr(self, f"_receive_{kind}", None)):
            handle(getattr(message, str(kind)))

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
        assert self.session_id is not None
        slot.leases.discard((self.session_id, acquire_id))
        if slot.loading is not None and not slot.leases:
            slot.loading = None

    def _receive_store_begin(self, begin: pb.StoreBegin) -> None:
        for store in begin.stores:
            self._check_grant(store).is_begun = True
        self.top_up()

    def _check_grant(self, store: pb.StoreSlot) -> Slot:
        slot = self.slots[store.slot.slot]
        granted = (slot.granted_to, slot.generation)
        assert granted == (self.session_id, store.slot.generation), "the engine stores into a slot that is not its own"
        return slot

    def _receive_store_done(self, done: pb.StoreDone) -> None:
        for store in done.stores:
            slot = self._check_grant(store)
            self._read_row(store.slot.slot)
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

    def _receive_store_abort(self, abort: pb.StoreAbort) -> None:
        for store in abort.stores:
            self._check_grant(store).granted_to = None
        self.top_up()

    def _receive_goodbye(self, goodbye: pb.Goodbye) -> None:
        self.lose_session()

    def _receive_bind_pin(self, bind: pb.BindPin) -> None:
        if bind.pin_id in self.pins:
            self._bind(bind.pin_id, bind.keys)

    def _receive_confirm_pins(self, confirm: pb.ConfirmPins) -> None:
        for pin_id in confirm.pin_ids:
            if pin_id in self.pins:
                assert self.pins[pin_id].keys, "the engine confirms keys that it was not sent"
                self._bind(pin_id, self.pins[pin_id].keys, by_id=True)

    def _bind(self, pin_id: str, keys: Sequence[Key], *, by_id: bool = False) -> None:
        self.bound[pin_id] = tuple(keys)
        if by_id and all(map(self.holds, keys)):
            self._send(pb.DaemonMessage(chunks_held=pb.ChunksHeld(pin_ids=[pin_id], held=True)))
            return
        for held in (True, False):
            some = [key for key in keys if self.holds(key) is held]
            self._send(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=some, held=held)))

    # What it does of itself

    def add_pin(self, pin: pb.Pin) -> None:
        """An operator pins a prompt."""
        self.pins[pin.pin_id] = pin
        if self.link is not None:
            self._send(pb.DaemonMessage(pin_added=pb.PinAdded(pin=pin)))

    def remove_pin(self, pin_id: str) -> None:
        """An operator ends a pin."""
        del self.pins[pin_id]
        self.bound.pop(pin_id, None)
        if self.link is not None:
            self._send(pb.DaemonMessage(pin_removed=pb.PinRemoved(pin_id=pin_id)))

    def pong(self, ping_id: int = 0) -> None:
        """Answer a ping."""
        self._send(pb.DaemonMessage(pong=pb.Pong(id=ping_id)))

    def hold(self, key: Key, row: Any = None) -> pb.SlotRef:
        """Have a chunk in host memory, as a store leaves it."""
        number = next(number for number, slot in enumerate(self.slots) if slot.is_free)
        self._give_out(number)
        self.slots[number].key = key
        self._put_row(number, row)
        return self._slot_ref(number)

    def answer(self, acquire_id: int) -> None:
        """Answer an acquire for the first time: lease what is held, begin promotions."""
        acquire = self.acquires[acquire_id]
        acquire.is_answered = True
        update = pb.AcquireUpdate(acquire_id=acquire_id)
        for index, key in enumerate(acquire.keys):
            number = self._slot_of(key) if self._slot_of(key) is not None else self._begin_promotion(key)
            if number is None:
                continue
            slot = self.slots[number]
            assert self.session_id is not None
            slot.leases.add((self.session_id, acquire_id))
            acquire.slots[index] = number
            if slot.loading is None:
                add_resident(update, index, self._slot_ref(number))
            else:
                update.chunks.append(self._residency(index, pb.ChunkResidency.PROMOTING, number))
        self._send(pb.DaemonMessage(acquire_update=update))
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
            slot.key = key
            self._put_row(number, self.disk[key])
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
        key, slot.key = slot.key, None
        assert key is not None
        if write_back:
            self.disk.setdefault(key, copy.copy(slot.row))
        elif key not in self.disk:
            self.announce_held([key], held=False)
        self.top_up()

    def top_up(self) -> None:
        """Give the live session credits."""
        if self.session_id is None:
            return
        num_standing = sum(slot.granted_to == self.session_id and not slot.is_begun for slot in self.slots)
        free = [number for number, slot in enumerate(self.slots) if slot.is_free][
            : max(0, self._num_credits - num_standing)
        ]
        for number in free:
            self._give_out(number)
            self.slots[number].granted_to = self.session_id
        if free:
            slots = [self._slot_ref(number) for number in free]
            self._send(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=slots)))

    def holds(self, key: Key) -> bool:
        """Return whether an acquire may find it."""
        return key in self.disk or self._slot_of(key) is not None

    def announce_held(self, keys: Sequence[Key], *, held: bool) -> None:
        """Say what is held, of bound keys or of all."""
        if not self.stores_all:
            bound = {key for keys in self.bound.values() for key in keys}
            keys = [key for key in keys if key in bound]
        if keys and self.session_id is not None:
            self._send(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys, held=held)))

    def _give_out(self, number: int) -> None:
        slot = self.slots[number]
        slot.generation += 1
        slot.row = slot.stamp = None
        slot.is_begun = False

    def _read_row(self, number: int) -> None:
        """The engine has written a row."""

    def _put_row(self, number: int, row: Any) -> None:
        """Fill a row, of a chunk that was on disk."""
        self.slots[number].row = copy.copy(row)

    def _held(self) -> Iterable[Key]:
        return dict.fromkeys([*self.disk, *(slot.key for slot in self.slots if slot.key is not None)])

    def _slot_of(self, key: Key) -> int | None:
        return next((i for i, slot in enumerate(self.slots) if key in (slot.key, slot.loading)), None)

    def _slot_ref(self, number: int) -> pb.SlotRef:
        return pb.SlotRef(slot=number, generation=self.slots[number].generation)

    def _residency(self, index: int, state: "pb.ChunkResidency.State", number: int) -> pb.ChunkResidency:
        return pb.ChunkResidency(index=index, state=state, slot=self._slot_ref(number))

    def _update(self, acquire_id: int, chunks: Sequence[pb.ChunkResidency]) -> None:
        self._send(pb.DaemonMessage(acquire_update=pb.AcquireUpdate(acquire_id=acquire_id, chunks=chunks)))

    def _send(self, message: pb.DaemonMessage) -> None:
        assert self.link is not None
        self.link.send(message)


def add_resident(update: pb.AcquireUpdate, index: int, slot: pb.SlotRef) -> None:
    """Name a chunk that is in host memory in a first answer."""
    update.resident.indexes.append(index)
    update.resident.slots.append(slot.slot)
    update.resident.generations.append(slot.generation)
