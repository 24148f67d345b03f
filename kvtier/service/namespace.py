"""One namespace: its chunks, its arena while engines use it, the sessions attached to it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvtier.core import limits
from kvtier.core.chunks import ChunkTable
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.disk.base import StoredChunk
from kvtier.disk.index import ChunkIndex
from kvtier.disk.pack_index import PackIndex
from kvtier.host.arena_tier import ArenaTier
from kvtier.ledger import NamespaceRow
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
DEFAULT_PREFILL_TOKENS_PER_S = 2000.0
"""Assumed of engines that have not measured it: it only weighs namespaces against each other."""


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
        find_room: Asks other namespaces to reclaim host memory until the budget has n free bytes, if it ever does.
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
        self.host = ArenaTier(
            row.namespace_id,
            row.layout,
            budget=stores.budget,
            counters=stores.counters,
            in_thread=stores.in_io,
            find_bytes=lambda num_bytes: find_room(self, num_bytes),
            evict=self.evict_rows,
        )
        self.attaching = False  # an engine's session is about to be one of `sessions`
        self.prefill_tokens_per_s = DEFAULT_PREFILL_TOKENS_PER_S
        self.packs = PackIndex(stores.holes.set)
        self.table: ChunkTable[StoredChunk] = ChunkTable(
            self.host, RecomputeCost(self), stores.host_clock, stores.disk_clock, self.packs.moved
        )
        self.index = ChunkIndex(self.namespace_id, self.table, self.packs, stores, self._announce)
        self.promoter = Promoter(self)
        self.spiller = Spiller(self)
        self.find_disk_room = find_disk_room
        self.top_up_all = top_up_all

    @property
    def namespace_id(self) -> str:
        """The digest of its fingerprint."""
        return self.row.namespace_id

    @property
    def model(self) -> str:
        """The model's name, as its first engine gave it."""
        return self.row.model

    @property
    def seen_unix_s(self) -> float:
        """When an engine used it last."""
        return self.row.seen_unix_s

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
    def is_idle(self) -> bool:
        """It has an arena that no engine, of this daemon or of a previous one, may touch, and nothing is under way."""
        if self.sessions or self.attaching:
            return False
        return self.host.is_open and not (self.host.recovering or self.ephemeral or self.tasks.running)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of its chunks that are not evictable because they are on their way to disk."""
        return self.spiller.queued_bytes

    @property
    def is_warm(self) -> bool:
        """Nothing is left to prefetch into host memory."""
        return self.promoter.is_warm

    async def evict_all(self) -> bool:
        """Evict what is in host memory while the namespace is idle; say whether nothing is left there."""
        while self.is_idle and self.evict_rows(_EVICTED_AT_ONCE):  # noqa: ASYNC110 - no waiting: turns for others
            await asyncio.sleep(0)
        return not self.table.num_host

    def arena_changed(self) -> None:
        """Its arena was opened, or closed: what could not be read for want of one is read, or is left on disk."""
        if self.host.is_open:
            self.promoter.warm_up(())
        else:
            self.promoter.forget_background()

    def recovered(self, key: ChunkKey) -> None:
        """A chunk was found in a row that a previous daemon left."""
        chunk = self.table.get(key)
        self.spiller.add([key])
        self.announce([key] if chunk is not None and chunk.location is None else [], held=True)

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

    async def prepare_disk_room(self, num_bytes: int) -> None:
        """Have ordinary chunks dropped from disk if a pack of `num_bytes` does not fit; `disk_usage.fits` says whether.

        Raises:
            LedgerError: The ledger refused to drop them.
        """
        await self.stores.measure_disk()
        if not self.stores.disk_usage.fits(num_bytes):
            await self.find_disk_room(num_bytes)

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

    def evict_rows(self, num_slots: int, *, ordinary_only: bool = False) -> int:
        """Evict up to `num_slots` chunks from host memory; return how many rows came free.

        Args:
            num_slots: The cheapest first.
            ordinary_only: Spare those of pinned prompts, which else go last.
        """
        evicted = self.table.make_room(num_slots, ordinary_only=ordinary_only)
        self.stores.counters.host_evictions += evicted.num_slots
        self.forget_lost(evicted.lost)
        return evicted.num_slots

    async def close(self, *, keep_arena: bool = False) -> None:
        """End its tasks and unmap the arena; running disk calls are waited for.

        Args:
            keep_arena: Leave the file to the next start, if it is of the size that a new one would get.
        """
        await self.spiller.close()
        await self.promoter.close()
        await self.tasks.close()
        self.host.close(keep=keep_arena and not self.ephemeral)
