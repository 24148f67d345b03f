"""kvtier's own tiers under a trace: the daemon's chunk table, without bytes behind it."""

from collections.abc import Sequence

from benchmarks.eviction.peers.base import Blocks
from kvtier.core.chunks.acquire import AcquirePlan, AcquirePlanner
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.eviction import EvictionClock
from kvtier.core.layout import ChunkKey, GroupLayout, KVLayout
from kvtier.core.slots import HostBudget, SlotState, SlotTable
from kvtier.core.stored import StoredChunk

_ROW_BYTES = 4096
_LAYOUT = KVLayout(
    num_ranks=1,
    rank_bytes=_ROW_BYTES,
    num_writers=1,
    groups=(GroupLayout(group_idx=0, chunk_tokens=512, useful_bytes=_ROW_BYTES),),
)


class _EqualCosts:
    def host_worth(self, key: ChunkKey) -> float:
        return 1.0

    def disk_worth(self, key: ChunkKey, stored_bytes: int) -> float:
        return 1.0

    def payload_bytes(self, key: ChunkKey) -> int:
        return 1


def _place(key: ChunkKey) -> StoredChunk:
    return StoredChunk(key=key, pack_id="pack", offset=0, stored_bytes=1, raw_bytes=1, codec="raw", checksum=0)


def _table(num_slots: int) -> ChunkTable:
    slots = SlotTable(num_slots, _ROW_BYTES, HostBudget(num_slots * _ROW_BYTES))
    return ChunkTable(slots, _EqualCosts(), EvictionClock(), EvictionClock(), lambda old, new: None)


class HostTier:
    """Host memory of `capacity` rows and no disk: acquire, store what was missed, put the prompt in order, release.

    Then the background eviction makes free rows for the next request, as many as the longest one needs: those are not
    counted, so that a policy decides about a request's chunks and those before it at once, as the peers do.
    """

    def __init__(self, capacity: int, keys: Sequence[ChunkKey], longest: int) -> None:
        self.table = _table(capacity + longest)
        self._capacity, self._keys = capacity, keys

    def request(self, blocks: Blocks) -> int:
        """See `Cache`."""
        keys = [self._keys[block] for block in blocks]
        leased = self._find(keys).leased
        num_hits = len(leased)
        for key in keys[num_hits:]:
            if not self.table.holds(key):
                self._store(key)
        self.table.use(self.table.known(keys), hit=False)
        self._write_back(keys)
        self.table.host.unlease(leased.values())
        self.table.host.evict_cheapest(self.table.host.num_chunks - self._capacity)
        return num_hits

    def _find(self, keys: Sequence[ChunkKey]) -> AcquirePlan:
        planner = AcquirePlanner(self.table, _LAYOUT, keys)
        for _ in planner.steps():
            pass
        return planner.plan

    def _write_back(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing is below host memory."""

    def _store(self, key: ChunkKey) -> None:
        slots = self.table.host.slots
        ref = slots.take(SlotState.GRANTED) or slots.take_unbacked(SlotState.GRANTED)
        assert ref is not None
        slots.mark_backed(ref)
        slots.seal(ref)
        self.table.host.commit_store(key, ref, 0)


class BothTiers(HostTier):
    """A disk of `disk_capacity` chunks below host memory: all that is stored goes to both, and disk hits are promoted.

    A chunk on disk is a hit, as one in host memory is.
    """

    def __init__(self, host_capacity: int, disk_capacity: int, keys: Sequence[ChunkKey], longest: int) -> None:
        super().__init__(host_capacity, keys, longest)
        self._disk_capacity = disk_capacity

    def _find(self, keys: Sequence[ChunkKey]) -> AcquirePlan:
        plan = super()._find(keys)
        for key in plan.promotions:
            chunk = self.table.get(key)
            assert chunk is not None
            assert chunk.slot is not None
            self.table.host.slots.mark_backed(chunk.slot)
            self.table.host.complete_promotion(key, 0)
        return plan

    def request(self, blocks: Blocks) -> int:
        """See `Cache`."""
        num_hits = super().request(blocks)
        for key in self.table.disk.take_cheapest(self.table.disk.num_bytes - self._disk_capacity):
            self.table.unplace(key)
        return num_hits

    def _write_back(self, keys: Sequence[ChunkKey]) -> None:
        for chunk in self.table.known(keys):
            if not chunk.on_disk:
                self.table.place(chunk.key, _place(chunk.key))


class DiskTier:
    """A disk of `capacity` chunks and no host memory; what exceeds it is dropped after each request."""

    def __init__(self, capacity: int, keys: Sequence[ChunkKey]) -> None:
        self.table = _table(0)
        self._capacity, self._keys = capacity, keys

    def request(self, blocks: Blocks) -> int:
        """See `Cache`."""
        keys, table = [self._keys[block] for block in blocks], self.table
        num_hits = next((number for number, key in enumerate(keys) if not table.holds(key)), len(keys))
        table.use(table.known(keys[:num_hits]))
        for key in keys[num_hits:]:
            if not table.holds(key):
                table.place(key, _place(key))
        table.use(table.known(keys), hit=False)
        for key in table.disk.take_cheapest(table.disk.num_bytes - self._capacity):
            table.unplace(key)
        return num_hits
