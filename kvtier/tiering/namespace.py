"""One namespace: its chunks, its arena while engines use it, the sessions attached to it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from kvtier.concurrency.tasks import Tasks
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.layout import GROUP_SUFFIX_BYTES, ChunkKey, KVLayout, group_idx_of, suffix_of
from kvtier.core.limits import MAX_PREFETCHED_KEYS
from kvtier.disk.chunk_index import ChunkIndex
from kvtier.disk.pack_usage import PackUsage
from kvtier.errors import TierIOError
from kvtier.host.arena_tier import ArenaTier, drop_pages
from kvtier.ledger import NamespaceRow, PromptRow
from kvtier.tiering.promotion.promoter import Promoter
from kvtier.tiering.quarantine import Quarantine
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Inventory, Tiers
from kvtier.tiering.write_back import WriteBack

logger = logging.getLogger(__name__)

NO_MODELS = frozenset[str]()
_EVICTED_AT_ONCE = 500
"""A few milliseconds of the loop."""


class RecomputeCost:
    """What the chunks of a namespace are worth: seconds of prefill saved per byte occupied.

    Attributes:
        prefill_tokens_per_s: As its engines measured it last.
    """

    def __init__(self, layout: KVLayout) -> None:
        # Assumed of engines that have not measured it: it only weighs namespaces against each other.
        self.prefill_tokens_per_s = 2000.0
        self._row_bytes = layout.row_bytes
        self._tokens = {suffix_of(group.group_idx): group.chunk_tokens for group in layout.groups}
        self._payload_bytes = {group_idx: layout.payload_bytes(group_idx) for group_idx in layout.group_indexes()}

    def host_worth(self, key: ChunkKey) -> float:
        """Return what a byte of its row saves; see `core.chunks.eviction.CostModel` for all of these."""
        return self._seconds(key) / self._row_bytes

    def disk_worth(self, key: ChunkKey, stored_bytes: int) -> float:
        """Return what a byte of it on disk saves."""
        return self._seconds(key) / (stored_bytes or 1)

    def payload_bytes(self, key: ChunkKey) -> int:
        """See `core.chunks.eviction.CostModel`."""
        return self._payload_bytes.get(group_idx_of(key), 0)

    def _seconds(self, key: ChunkKey) -> float:
        return self._tokens.get(key[-GROUP_SUFFIX_BYTES:], 1) / self.prefill_tokens_per_s


class AttachedEngine(Protocol):
    """A session, as its namespace sees it."""

    @property
    def model(self) -> str:
        """The name by which it serves the model; the first, if there are several."""

    @property
    def ended(self) -> bool:
        """Its stream is gone; processes of the engine may still touch rows."""

    def serves(self, prompt: PromptRow) -> bool:
        """Say whether the engine recognizes the prompt."""


class Namespace:
    """KV bytes that are interchangeable: one layout, one chunk table, at most one arena.

    Args:
        row: What the ledger keeps of it (an ephemeral namespace has a row too, but it is never written).
        ephemeral: It dies with its last session and never reaches disk.
        find_host_capacity: Has other namespaces reclaim host memory until the budget has n free bytes, if it ever does.
        find_disk_capacity: `Capacity.find_disk_capacity`.
        top_up_all: Host memory came free: grants it to sessions that are short of credits, in all namespaces.

    Attributes:
        idle_since_s: Monotonic; when it was opened, or an engine left it last.
        quarantine: Why it serves and stores nothing; None: it does.
        packs_without_key: Packs whose key the daemon lacks, as the start has found them.
        is_recorded: The ledger has a row of it, perhaps an older one. Its packs and bindings refer to that.
    """

    def __init__(
        self,
        row: NamespaceRow,
        resources: Resources,
        *,
        ephemeral: bool,
        find_host_capacity: Callable[["Namespace", int], None],
        find_disk_capacity: Callable[..., Awaitable[None]],
        top_up_all: Callable[[], None],
    ) -> None:
        self.row, self.resources, self.ephemeral = row, resources, ephemeral
        self.namespace_id, self.model = row.namespace_id, row.model
        self.layout, self.fingerprint = row.layout, row.fingerprint
        self.sessions: list[AttachedEngine] = []
        self.idle_since_s = time.monotonic()
        self.quarantine: Quarantine | None = None
        self.packs_without_key: frozenset[str] = frozenset()
        self.is_recorded = True
        self.attaching = False  # an engine's session is about to be one of `sessions`
        self.tasks = Tasks()
        self.cost = RecomputeCost(row.layout)
        self.inventory = Inventory(row.namespace_id, resources.lost_chunks)
        self._find_disk_capacity = find_disk_capacity
        self.top_up_all = top_up_all
        self.host = ArenaTier(
            row.namespace_id,
            row.layout,
            budget=resources.budget,
            counters=resources.counters,
            in_thread=resources.in_io,
            find_bytes=lambda num_bytes: find_host_capacity(self, num_bytes),
            evict=lambda num_slots: self.tiers.evict_rows(num_slots),
        )
        packs = PackUsage(resources.holes.set)
        self.table = ChunkTable(self.host.slots, self.cost, resources.host_clock, resources.disk_clock, packs.moved)
        self.index = ChunkIndex(
            row.namespace_id,
            self.table,
            packs,
            resources,
            announce_held=lambda keys: self.inventory.announce(keys, held=True),
            announce_lost=self.inventory.announce_lost,
            write_again=lambda keys: self.write_back.add(keys),
        )
        self.tiers = Tiers(
            namespace_id=row.namespace_id,
            layout=row.layout,
            table=self.table,
            host=self.host,
            index=self.index,
            inventory=self.inventory,
            counters=resources.counters,
        )
        self.write_back = WriteBack(
            self.tiers,
            resources,
            ephemeral=ephemeral,
            find_disk_capacity=self.find_disk_capacity,
            on_evictable=top_up_all,
        )
        self.promoter = Promoter(
            self.tiers, resources, write_again=self.write_back.add, on_ready=top_up_all, start_task=self.tasks.start
        )

    def left(self, now_unix_s: float) -> None:
        """An engine has left it."""
        self.row, self.idle_since_s = replace(self.row, seen_unix_s=now_unix_s), time.monotonic()

    @property
    def seen_unix_s(self) -> float:
        """When an engine used it last."""
        return self.row.seen_unix_s

    @property
    def live(self) -> bool:
        """An engine is attached."""
        return any(not session.ended for session in self.sessions)

    @property
    def superseded_models(self) -> frozenset[str]:
        """The models whose other namespaces it supersedes: those of its engines, if pins are stored for good for them.

        Not `row.model`: that is the name of the engine that came last, which may be gone while others serve.
        """
        if self.ephemeral or self.quarantine is not None:
            return frozenset()
        return frozenset(session.model for session in self.sessions if not session.ended)

    @property
    def is_idle(self) -> bool:
        """It has an arena that no engine, of this daemon or of a previous one, may touch, and nothing is under way."""
        if self.sessions or self.attaching:
            return False
        return self.host.is_open and not (self.host.recovering or self.ephemeral or self.tasks.running)

    @property
    def holds_chunks(self) -> bool:
        """Some chunk is in host memory or on disk."""
        return self.table.host.num_chunks > 0 or self.table.disk.num_chunks > 0

    def has_spare_memory(self) -> bool:
        """Say whether a row can be had below the low watermark of host memory, so that nothing is evicted for it.

        Its free rows, preallocated ones too, are spare.
        """
        usage = self.host.usage
        used_bytes = self.resources.budget.used_bytes - (usage.num_free - 1) * usage.row_bytes
        return usage.num_takable > 0 and used_bytes <= self.resources.config.host.low_watermark_bytes

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of its chunks that are not evictable because they are on their way to disk."""
        return self.write_back.queue.num_bytes

    @property
    def is_prefetched(self) -> bool:
        """Nothing is left to prefetch into host memory."""
        return self.promoter.is_prefetched

    async def evict_all(self) -> bool:
        """Evict what is in host memory while the namespace is idle; say whether nothing is left there."""
        while self.is_idle and self.tiers.evict_rows(_EVICTED_AT_ONCE):  # noqa: ASYNC110 - no waiting: turns for others
            await asyncio.sleep(0)
        return not self.table.host.num_chunks

    async def find_disk_capacity(self, num_bytes: int, *, for_pins: bool, is_refused: bool = False) -> None:
        """See `Capacity.find_disk_capacity`; superseded ones only for pins."""
        pins_of = self.superseded_models if for_pins else NO_MODELS
        await self._find_disk_capacity(num_bytes, pins_of=pins_of, is_refused=is_refused)

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Promote chunks that no request waits for, as far as the queue of such chunks has a place."""
        num_more = max(0, MAX_PREFETCHED_KEYS - self.promoter.num_to_prefetch)
        self.promoter.prefetch(keys[:num_more])

    def arena_changed(self) -> None:
        """Its arena was opened, or closed: what could not be read for want of one is read, or is left on disk."""
        if self.host.is_open:
            self.promoter.prefetch(())
        else:
            self.promoter.cancel_prefetch()

    def recovered(self, key: ChunkKey) -> None:
        """A chunk was found in a row that a previous daemon left."""
        chunk = self.table.get(key)
        self.write_back.add([key])
        self.inventory.announce([key] if chunk is not None and not chunk.on_disk else [], held=True)

    async def close(self) -> None:
        """End it, and remove its arena, which no engine uses."""
        await self.end()
        with suppress(TierIOError):  # no thread is left: the pages go with the last process that maps them
            while await self.resources.in_io(drop_pages, self.host, keep=False):
                pass
        self.host.close(keep=False)

    async def end(self) -> None:
        """End its tasks; running disk calls are waited for. The arena is left to the caller."""
        await self.write_back.close()
        await self.promoter.close()
        await self.tasks.close()
        self.table.end()
