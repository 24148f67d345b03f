"""One namespace: its chunks, its arena while engines use it, the sessions attached to it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvtier.core import limits
from kvtier.core.arena_format import WORD_BYTES, entry_words, num_slots_within, overhead_bytes
from kvtier.core.chunks import ChunkTable
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.slots import SlotRef, SlotState, SlotTable
from kvtier.disk.base import StoredChunk
from kvtier.disk.index import ChunkIndex
from kvtier.disk.pack_index import PackIndex
from kvtier.errors import ArenaError, ArenaFullError
from kvtier.host.arena import Arena
from kvtier.ledger import NamespaceRow
from kvtier.obs.log import log_event
from kvtier.service.peer import MAX_HELD_BATCH
from kvtier.service.promoter import Promoter
from kvtier.service.spiller import Spiller
from kvtier.service.stores import Stores
from kvtier.service.tasks import Tasks

if TYPE_CHECKING:
    from kvtier.service.session import Session

logger = logging.getLogger(__name__)

_EVICTED_AT_ONCE = 500
"""A few milliseconds of the loop."""
_MAKING_TIMEOUT_S = 0.1
"""Ten times what a slice of spare rows takes: threads may be held up by a disk that hangs."""

DEFAULT_PREFILL_TOKENS_PER_S = 2000.0
"""Assumed of engines that have not measured it: it only weighs namespaces against each other."""


class NewRows(NamedTuple):
    """Slots that have their pages now, how many were refused theirs, and why, if it was not for want of memory."""

    refs: list[SlotRef]
    num_refused: int
    error: ArenaError | None = None


class DetachedArena(NamedTuple):
    """An arena that its namespace has given up: rows that still have pages, and the bytes that it takes in all."""

    arena: Arena
    backed: Sequence[int]
    num_bytes: int


class RecomputeCost:
    """What the chunks of a namespace are worth: seconds of prefill saved per byte occupied."""

    def __init__(self, namespace: "Namespace") -> None:
        self._namespace = namespace
        layout = namespace.layout
        self._tokens = {group.group_idx: group.chunk_tokens for group in layout.groups}
        self._payload_bytes = {group_idx: layout.payload_bytes(group_idx) for group_idx in layout.group_indexes()}

    def host_worth(self, key: ChunkKey) -> float:
        """See `core.eviction.Appraiser`."""
        return self._seconds(key) / self._namespace.layout.row_bytes

    def disk_worth(self, key: ChunkKey, location: StoredChunk) -> float:
        """See `core.eviction.Appraiser`."""
        return self._seconds(key) / max(1, location.stored_bytes)

    def stored_bytes(self, location: StoredChunk) -> int:
        """See `core.eviction.Appraiser`."""
        return location.stored_bytes

    def payload_bytes(self, key: ChunkKey) -> int:
        """See `core.eviction.Appraiser`."""
        return self._payload_bytes.get(group_idx_of(key), 0)

    def _seconds(self, key: ChunkKey) -> float:
        return self._tokens.get(group_idx_of(key), 1) / self._namespace.prefill_tokens_per_s


class Namespace:
    """KV bytes that are interchangeable: one layout, one chunk table, at most one arena.

    Args:
        row: What the ledger keeps of it (an ephemeral namespace has a row too, but it is never written).
        ephemeral: It dies with its last session and never reaches disk.
        find_room: Asks other namespaces to give back host memory until the budget has n free bytes, if it ever does.
        find_disk_room: Drops what is pinned no more until a pack of n bytes fits, or nothing is left to drop.
        top_up_all: Room appeared in host memory: grants it to sessions that are short of credits, in all namespaces.
    """

    def __init__(
        self,
        row: NamespaceRow,
        stores: Stores,
        *,
        ephemeral: bool,
        find_room: Callable[["Namespace", int], None],
        find_disk_room: Callable[[int], Awaitable[None]],
        top_up_all: Callable[[], None],
    ) -> None:
        self.row = row
        self.stores = stores
        self.ephemeral = ephemeral
        self.sessions: list[Session] = []
        self.tasks = Tasks()
        self.slots = SlotTable(self._num_possible_slots, row.layout.row_bytes, stores.budget, self._uncommit)
        self.attaching = False  # an engine's session is about to be one of `sessions`
        self.keep_pages = False  # a dead daemon's engine may be copying from any row
        self._pages_stay = False  # the file system refused the last time that it was to take pages back
        self.prefill_tokens_per_s = DEFAULT_PREFILL_TOKENS_PER_S
        self.packs = PackIndex(stores.holes.set)
        self.table: ChunkTable[StoredChunk] = ChunkTable(
            self.slots, RecomputeCost(self), stores.host_clock, stores.disk_clock, self.packs.moved
        )
        self.making_rows = asyncio.Lock()  # held while free rows get their pages ahead of need, and look taken
        self.index = ChunkIndex(self.namespace_id, self.table, self.packs, stores, self._announce)
        self.promoter = Promoter(self)
        self.spiller = Spiller(self)
        self._arena: Arena | None = None
        self._overhead_bytes = 0  # of the arena, as far as it is counted
        self._find_room = find_room
        self.find_disk_room = find_disk_room
        self.top_up_all = top_up_all

    @property
    def namespace_id(self) -> str:
        """The digest of its fingerprint."""
        return self.row.namespace_id

    @property
    def layout(self) -> KVLayout:
        """How its chunks lie in rows and packs."""
        return self.row.layout

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """The fields that make it what it is."""
        return self.row.fingerprint

    @property
    def live(self) -> bool:
        """An engine is attached."""
        return any(not session.ended for session in self.sessions)

    @property
    def serving(self) -> bool:
        """An engine that is attached may be asked by users."""
        return any(not session.starting for session in self.sessions if not session.ended)

    @property
    def has_arena(self) -> bool:
        """The arena is open."""
        return self._arena is not None

    @property
    def arena(self) -> Arena:
        """The arena; only after `open_arena`."""
        if self._arena is None:
            raise ArenaError(f"namespace {self.namespace_id} has no arena yet")
        return self._arena

    @property
    def is_idle(self) -> bool:
        """It has an arena that no engine, of this daemon or of a dead one, may touch, and nothing is under way."""
        if self.sessions or self.attaching:
            return False
        return self.has_arena and not (self.keep_pages or self.ephemeral or self.tasks.running)

    @property
    def _num_possible_slots(self) -> int:
        return num_slots_within(self.stores.config.host.host_bytes, self.layout.row_bytes, self.layout.num_ranks)

    @property
    def arena_overhead_bytes(self) -> int:
        """Memory of its arena, if it had one, beside the rows: header page and slot table."""
        return overhead_bytes(self.slots.num_slots, self.layout.num_ranks)

    @property
    def held_bytes(self) -> int:
        """What it takes of the budget."""
        return self._overhead_bytes + self.slots.num_backed * self.layout.row_bytes

    def check_arena_fits(self) -> None:
        """Refuse what no arena within host_bytes could hold.

        Raises:
            ArenaFullError: Not even one row.
        """
        if self.slots.num_slots < 1:
            raise ArenaFullError(
                f"one chunk of this model takes {self.layout.row_bytes} bytes and, with {self.layout.num_ranks} ranks, "
                f"{entry_words(self.layout.num_ranks) * WORD_BYTES} bytes of the slot table; host.bytes is "
                f"{self.stores.budget.limit_bytes}; raise host.bytes"
            )

    def open_arena(self, directory: Path) -> Arena:
        """Create the arena if there is none; chunks of others make way for its slot table if they can.

        Raises:
            ArenaFullError: host_bytes has no room, or the file system.
            ArenaError: The file cannot be made.
        """
        if self._arena is None:
            self.check_arena_fits()
            needed_bytes = self._reserve_overhead()
            try:
                self._arena = Arena.create(directory, self.layout, self.slots.num_slots, namespace_id=self.namespace_id)
            except ArenaError:
                self.stores.budget.give_back(needed_bytes)
                raise
            self._overhead_bytes = needed_bytes
            self.promoter.warm_up(())  # what could not be read for want of an arena
        return self._arena

    def _reserve_overhead(self) -> int:
        budget, needed_bytes = self.stores.budget, self.arena_overhead_bytes
        if needed_bytes > budget.free_bytes:
            self._find_room(self, needed_bytes)
        if not budget.reserve(needed_bytes):
            raise ArenaFullError(
                f"an arena of this model begins with a slot table of {needed_bytes} bytes; of host.bytes = "
                f"{budget.limit_bytes} other models take {budget.used_bytes}, of which nothing can be evicted now; "
                "raise host.bytes, or end an engine of another model"
            )
        return needed_bytes

    def adopt_arena(self, arena: Arena, generations: Sequence[int], backed: Collection[int]) -> None:
        """Take over an arena of a dead daemon; slots with pages are quarantined until somebody vouches for them."""
        self._arena = arena
        self.slots.resume(generations, backed)
        self._overhead_bytes = self.arena_overhead_bytes
        self.stores.budget.count(self._overhead_bytes)
        self.keep_pages = True

    async def evict_all(self) -> bool:
        """Evict what is in host memory while the namespace is idle; say whether nothing is left there."""
        while self.is_idle and self.evict_rows(_EVICTED_AT_ONCE):  # noqa: ASYNC110 - no waiting: turns for others
            await asyncio.sleep(0)
        return not self.table.num_host

    def detach_arena(self) -> DetachedArena | None:
        """Part with an idle arena that holds nothing, None when it is in use; the caller gives back what it took.

        From now on the namespace is as before its first engine: its next arena is a new file.
        """
        if self._arena is None or not self.is_idle or self.slots.num_owned:
            return None
        num_bytes, backed = self.held_bytes, self.slots.reset(self._num_possible_slots)
        detached = DetachedArena(self._arena, backed, num_bytes)
        self._arena, self._overhead_bytes, self._pages_stay = None, 0, False
        self.promoter.forget_background()
        return detached

    def mark_committed(self, key: ChunkKey) -> None:
        """Say in the arena, for a daemon that comes after this one, that the chunk's slot holds it, if it does."""
        chunk = self.table.get(key)
        host = chunk.host if chunk is not None else None
        if host is not None and not host.promoting:
            self.arena.commit(host.slot.slot, key, host.slot.generation, host.checksum)

    def _uncommit(self, slot: int) -> None:
        if self._arena is not None:
            self._arena.uncommit(slot)

    def payload(self, key: ChunkKey, ref: SlotRef) -> list[memoryview]:
        """Return the writable views of a chunk's useful bytes in its slot."""
        return self.arena.payload(ref.slot, group_idx_of(key))

    def check_keys(self, field: str, keys: Iterable[ChunkKey]) -> None:
        """Refuse keys that are no chunk's of this namespace.

        Raises:
            InvalidArgumentError: A key has no possible length, or is of no group.
        """
        groups = set(self.layout.group_indexes())
        for key in keys:
            limits.check_key(field, key, groups)

    def payload_bytes(self, key: ChunkKey) -> int:
        """Return the uncompressed length of a chunk."""
        return self.layout.payload_bytes(group_idx_of(key))

    @property
    def occupied_bytes(self) -> int:
        """Bytes of the arena without its free rows, which are room."""
        return self.held_bytes - self.slots.num_free * self.layout.row_bytes

    async def prepare_disk_room(self, num_bytes: int) -> None:
        """Have ordinary chunks dropped from disk if a pack of `num_bytes` does not fit; `disk_usage.fits` says whether.

        Raises:
            LedgerError: The ledger refused to drop them.
        """
        await self.stores.measure_disk()
        if not self.stores.disk_usage.fits(num_bytes):
            await self.find_disk_room(num_bytes)

    # Room in host memory

    def ensure_takable(self, num_slots: int) -> None:
        """Ask other namespaces for room if fewer than `num_slots` slots could be taken now."""
        if num_slots > self.slots.num_takable:
            num_new = min(num_slots - self.slots.num_free, self.slots.num_unbacked)
            if num_new > 0:
                self._find_room(self, num_new * self.layout.row_bytes)

    def give_back_room(self, num_bytes: int) -> None:
        """Evict and unback rows until `num_bytes` were given back to the budget, or nothing is left to evict."""
        if self.keep_pages:
            return
        if self._pages_stay:  # one row says whether it works again: no more chunks shall go for nothing
            num_bytes = min(num_bytes, self.layout.row_bytes)
        num_slots = -(-num_bytes // self.layout.row_bytes)
        num_short = num_slots - self.slots.num_free
        if num_short > 0:
            evicted = self.table.make_room(num_short)
            self.stores.counters.host_evictions += evicted.num_slots
            self.forget_lost(evicted.lost)
        self.give_back_free(num_bytes)

    def give_back_free(self, num_bytes: int) -> None:
        """Unback rows that hold nothing until `num_bytes` were given back to the budget, or none is left."""
        if self.keep_pages:
            return
        taken = self.slots.take_back_free(-(-num_bytes // self.layout.row_bytes))
        self.slots.keep_free(taken[self._unback(taken) :])

    def _unback(self, slots: Sequence[int]) -> int:
        """Give the pages of rows back, in order; return of how many. The others keep them, and serve on."""
        for num_done, slot in enumerate(slots):
            try:
                self.arena.unback([slot])
            except ArenaError as error:
                self.stores.counters.io_errors_host_release += len(slots) - num_done
                if not self._pages_stay:
                    log_event(logger, "arena_not_released", level=logging.ERROR, problem=str(error))
                self._pages_stay = True
                return num_done
            self._pages_stay = False
        return len(slots)

    async def grant_slots(self, num_slots: int) -> list[SlotRef]:
        """Take up to `num_slots` slots for writing, backed and with their generation set in the arena.

        First what is free, then new pages, then rows that are free in a moment, then what eviction frees.
        """
        refs = self._grant_free(num_slots)
        if len(refs) < num_slots:
            self.ensure_takable(num_slots - len(refs))
            refs += await self._grant_unbacked(num_slots - len(refs))
        if len(refs) < num_slots:
            with suppress(TimeoutError):
                async with asyncio.timeout(_MAKING_TIMEOUT_S), self.making_rows:
                    pass
            refs += self._grant_free(num_slots - len(refs))
        if len(refs) < num_slots:
            evicted = self.table.make_room(num_slots - len(refs))
            self.stores.counters.host_evictions += evicted.num_slots
            self.forget_lost(evicted.lost)
            refs += self._grant_free(num_slots - len(refs))
        self.stores.counters.store_credits_short += len(refs) < num_slots
        return refs

    def _grant_free(self, num_slots: int) -> list[SlotRef]:
        refs: list[SlotRef] = []
        while len(refs) < num_slots and (ref := self.table.grant()) is not None:
            self.arena.set_generation(ref.slot, ref.generation)
            refs.append(ref)
        return refs

    async def _grant_unbacked(self, num_slots: int) -> list[SlotRef]:
        rows = await self.take_new(num_slots, SlotState.GRANTED, self._back)
        if rows.error is not None:
            log_event(logger, "arena_not_backed", level=logging.ERROR, problem=str(rows.error))
        self.stores.counters.io_errors_host_back += rows.num_refused
        if rows.num_refused:
            log_event(logger, "arena_out_of_memory", level=logging.WARNING, path=self.arena.path, backed=len(rows.refs))
        return rows.refs

    def _back(self, slots: Sequence[int]) -> int:
        return self.arena.back(slots)

    async def take_new(self, num_slots: int, state: SlotState, back: Callable[[Sequence[int]], int]) -> NewRows:
        """Take up to `num_slots` slots that have no pages, and have them made; those that get none are nobody's again.

        Args:
            num_slots: As many as budget and arena have are taken.
            state: Of those taken.
            back: As `Arena.back`; worker thread.
        """
        refs: list[SlotRef] = []
        while len(refs) < num_slots and (ref := self.slots.take_unbacked(state)) is not None:
            refs.append(ref)
        if not refs:
            return NewRows([], 0)
        num_backed, error = 0, None
        try:
            num_backed = await self.stores.in_io(back, [ref.slot for ref in refs])
        except ArenaError as exc:
            error = exc
        for ref in refs[:num_backed]:
            self.slots.mark_backed(ref.slot)
            self.arena.set_generation(ref.slot, ref.generation)
        for ref in refs[num_backed:]:
            self.slots.free(ref.slot)
        return NewRows(refs[:num_backed], len(refs) - num_backed, error)

    # What engines know

    def announce(self, keys: Sequence[ChunkKey], *, held: bool) -> None:
        """Tell every session that these chunks are held, or are not held any more, in bounded messages."""
        for start in range(0, len(keys), MAX_HELD_BATCH):
            batch = keys[start : start + MAX_HELD_BATCH]
            for session in self.sessions:
                if not session.ended:
                    session.peer.chunks_held(batch, held)

    def _announce(self, keys: Sequence[ChunkKey], held: bool) -> None:
        self.announce(keys, held=held)

    def forget_lost(self, keys: Sequence[ChunkKey]) -> None:
        """Chunks went out of the last tier they were in."""
        self.announce(keys, held=False)

    def evict_rows(self, num_slots: int) -> int:
        """Evict up to `num_slots` chunks from host memory, those of pinned prompts last; return how many."""
        evicted = self.table.make_room(num_slots)
        self.stores.counters.host_evictions += evicted.num_slots
        self.forget_lost(evicted.lost)
        return evicted.num_slots

    def evict_ordinary(self, num_slots: int) -> int:
        """Evict up to `num_slots` chunks of no pinned prompt from host memory; return how many rows came free."""
        evicted = self.table.make_room(num_slots, ordinary_only=True)
        self.stores.counters.host_evictions += evicted.num_slots
        self.forget_lost(evicted.lost)
        return evicted.num_slots

    async def close(self, *, keep_arena: bool = False) -> None:
        """End its tasks and unmap the arena; running disk calls are waited for.

        Args:
            keep_arena: Leave the file to the next start. Not if it has fewer slots than a new one would get.
        """
        await self.spiller.close()
        await self.promoter.close()
        await self.tasks.close()
        if self._arena is not None:
            kept = keep_arena and not self.ephemeral and self.slots.num_slots >= self._num_possible_slots
            self._arena.close(unlink=not kept)
            self._arena = None
