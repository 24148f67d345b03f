"""A chunk index over a real ledger and a disk tier, through the lives of a daemon, and what has to hold in between."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvtier.concurrency.pool import Pool
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.eviction import EvictionClock
from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import HostBudget, SlotState, SlotTable
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.base import DiskTier
from kvtier.disk.chunk_index import ChunkIndex
from kvtier.disk.disk_usage import DiskUsage
from kvtier.disk.pack_usage import Live, PackUsage
from kvtier.ledger import Ledger, NamespaceRow
from kvtier.obs.counters import Counters
from tests.fakes.chunks import key_of, noise, payload_of, read_back
from tests.fakes.memory_tier import MemoryTier
from tests.fakes.scripted_engine import ONE_GROUP

P = ParamSpec("P")
T = TypeVar("T")
NS = "ns"
NUM_SLOTS = 4


def keys_of(*numbers: int) -> list[ChunkKey]:
    """Return the keys of chunks."""
    return [key_of(number) for number in numbers]


class StoredBytes:
    """Chunks are worth the less the longer they are."""

    def host_worth(self, key: ChunkKey) -> float:
        """See `core.chunks.eviction.CostModel`."""
        return 1.0

    def disk_worth(self, key: ChunkKey, stored_bytes: int) -> float:
        """See `core.chunks.eviction.CostModel`."""
        return 1 / stored_bytes

    def payload_bytes(self, key: ChunkKey) -> int:
        """See `core.chunks.eviction.CostModel`."""
        return 100


class ThreadResources:
    """What an index takes of the daemon, with its real threads."""

    def __init__(self, ledger: Ledger, disk: DiskTier) -> None:
        self.ledger, self.disk = ledger, disk
        self.disk_usage, self.counters = DiskUsage(1 << 40), Counters()
        self._ledger_thread, self._io_threads = (
            Pool(name, 1, refusal=lambda error: error) for name in ("ledger", "io")
        )

    async def in_ledger(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """See `DiskResources`."""
        return await self._ledger_thread.run(lambda: call(*args, **kwargs))

    async def in_io(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """See `DiskResources`."""
        return await self._io_threads.run(lambda: call(*args, **kwargs))

    def close(self) -> None:
        """End the threads and close the ledger."""
        self._ledger_thread.shutdown()
        self._io_threads.shutdown()
        self.ledger.close()


MAX_BYTES = 1 << 20
"""Of a chunk."""


class IndexRig:
    """One index after the other over the same ledger and the same files. Chunk `n` has the key `key_of(n)`.

    Attributes:
        announced: What engines were notified of last, by key.
        lost_for: Why they were lost, of chunks that the index announced as lost.
        rewritten: Keys that were to be written again.
        num_holes: How often a pack got a hole.
        strays: Packs that have a file and no row, as the test expects it.
        unknown: Packs that were written, and that the index has not been given yet.
        unrecorded: Damaged chunks whose rows the ledger refused to delete, as the test expects it.
    """

    def __init__(
        self,
        folder: Path,
        tier: DiskTier,
        new_resources: Callable[[Ledger, DiskTier], ThreadResources] = ThreadResources,
    ) -> None:
        self.folder, self.tier, self._new_resources = folder, tier, new_resources
        self.contents: dict[tuple[str, ChunkKey], bytes] = {}
        self.strays: set[str] = set()
        self.unknown: set[str] = set()
        self.unrecorded: set[ChunkKey] = set()
        self._start()
        row = NamespaceRow(
            namespace_id=NS, model="m", fingerprint={}, layout=ONE_GROUP, created_unix_s=0.0, seen_unix_s=0.0
        )
        self.ledger.put_namespace(row)

    def _start(self) -> None:
        self.ledger = Ledger.open(self.folder / "ledger.sqlite", with_copies=False)
        self.ledger._database.connection.execute("PRAGMA synchronous = OFF")  # no power is cut here
        self.resources = self._new_resources(self.ledger, self.tier)
        self.usage, self.counters = self.resources.disk_usage, self.resources.counters
        self.announced: dict[ChunkKey, bool] = {}
        self.lost_for: dict[ChunkKey, MissingCause] = {}
        self.rewritten: list[ChunkKey] = []
        self.num_holes = 0
        self.packs = PackUsage(self._count_hole)
        self.slots = SlotTable(NUM_SLOTS, 4096, HostBudget(NUM_SLOTS * 4096))
        self.table = ChunkTable(self.slots, StoredBytes(), EvictionClock(), EvictionClock(), self.packs.moved)
        self.index = ChunkIndex(
            NS,
            self.table,
            self.packs,
            self.resources,
            announce_held=lambda keys: self.announce(keys, True),
            announce_lost=self._announce_lost,
            write_again=self.rewritten.extend,
        )

    def _count_hole(self) -> None:
        self.num_holes += 1

    def announce(self, keys: Sequence[ChunkKey], held: bool) -> None:
        """Notify engines, as the index and its callers do."""
        self.announced |= dict.fromkeys(keys, held)

    def _announce_lost(self, keys: Sequence[ChunkKey], cause: MissingCause) -> None:
        self.lost_for |= dict.fromkeys(keys, cause)
        self.announce(keys, False)

    def announce_again(self) -> None:
        """Announce what is held: the caller of a change whose part that is has left, or was one of two."""
        self.announce([key for key in self.announced if not self.table.holds(key)], False)
        self.announce([chunk.key for chunk in self.table if chunk.held], True)

    def close(self) -> None:
        """End this life of the daemon."""
        self.resources.close()

    async def restart(self) -> None:
        """End this life of the daemon in whatever state it is, and begin the next one, as a start does."""
        self.close()
        self._start()
        self.strays, self.unknown, self.unrecorded = set(), set(), set()
        removed = self.ledger.packs.removed_packs()
        self.tier.sweep(removed)
        self.ledger.packs.forget_removed(removed)
        await self.load()
        for pack_id in self.tier.list_packs().keys() - self.ledger.packs.pack_ids():  # a start adopts what they hold
            self.tier.delete_pack(pack_id)
        self.announce([chunk.key for chunk in self.table], True)  # which engines ask for when they attach

    async def load(self) -> None:
        """Take in what the ledger has."""
        on_disk = self.tier.list_packs()
        await self.index.load(self.ledger.load().stored, on_disk, range(MAX_BYTES))

    # Chunks

    def write(self, *numbers: int, seed: int = 0) -> PackRecord:
        """Write one version of chunks into a new pack file; nothing knows of it yet."""
        data = {number: noise(200 + 50 * number, seed) for number in numbers}
        record = self.tier.write_pack(NS, [payload_of(number, data[number]) for number in numbers])
        self.contents |= {(record.pack_id, key_of(number)): data[number] for number in numbers}
        return record

    async def store(self, *numbers: int, seed: int = 0) -> PackRecord:
        """Write chunks and record them."""
        record = self.write(*numbers, seed=seed)
        await self.index.record(record)
        self.announce(keys_of(*numbers), True)
        return record

    def copy(self, *numbers: int) -> tuple[PackRecord, dict[ChunkKey, StoredChunk]]:
        """Copy chunks into a new pack file, as compaction does; return what `move` takes."""
        copied = {stored.key: stored for stored in map(self.place, numbers) if stored is not None}
        record = self.tier.rewrite_pack(NS, list(copied.values()))
        self.contents |= {(record.pack_id, key): self.contents[stored.pack_id, key] for key, stored in copied.items()}
        return record, copied

    def place(self, number: int) -> StoredChunk | None:
        """Return where a chunk lies."""
        chunk = self.table.get(key_of(number))
        return None if chunk is None else chunk.location

    def places(self, *numbers: int) -> dict[ChunkKey, StoredChunk]:
        """Return where chunks lie, of those that are on disk."""
        return {stored.key: stored for stored in map(self.place, numbers) if stored is not None}

    @property
    def located(self) -> dict[ChunkKey, StoredChunk]:
        """Where the table says that chunks lie."""
        return {chunk.key: chunk.location for chunk in self.table if chunk.location is not None}

    @property
    def rows(self) -> dict[ChunkKey, StoredChunk]:
        """Where the ledger says so."""
        return {chunk.key: chunk for record in self.ledger.load().packs.values() for chunk in record.chunks}

    def into_host(self, number: int) -> None:
        """Commit a chunk to host memory, as a store does."""
        ref = self.slots.take(SlotState.GRANTED)
        if ref is None:
            ref = self.slots.take_unbacked(SlotState.GRANTED)
            assert ref is not None
            self.slots.mark_backed(ref)
        assert self.slots.seal(ref)
        self.table.host.commit_store(key_of(number), ref, 1)
        self.announce(keys_of(number), True)

    def out_of_host(self, number: int) -> None:
        """Evict a chunk from host memory."""
        assert self.table.host.evict(key_of(number))
        if not self.table.holds(key_of(number)):
            self.announce(keys_of(number), False)

    def cut(self, pack_id: str, num_bytes: int) -> None:
        """Shorten a pack's file."""
        if isinstance(self.tier, MemoryTier):
            del self.tier.packs[pack_id][num_bytes:]
        else:
            os.truncate(self.folder / "packs" / f"{pack_id}.kvpack", num_bytes)

    # What has to hold

    def check(self) -> None:
        """Whenever no change is being made: table, rows, files, usage and counts agree, and engines know it."""
        packs, located = self.ledger.load().packs, self.located
        files = {name: length for name, length in self.tier.list_packs().items() if name not in self.unknown}
        rows = {chunk.key: chunk for record in packs.values() for chunk in record.chunks}
        assert located == _without(rows, self.unrecorded), "table and rows"
        assert rows.keys() >= self.unrecorded
        assert files.keys() == packs.keys() | self.strays, "rows and files"
        assert dict(self.usage.packs) == files, "usage and files"
        assert self.usage.used_bytes == sum(files.values())
        assert {pack_id: self.packs.live(pack_id) for pack_id in self.packs} == _live(located.values())
        assert self.packs.damaged <= files.keys(), "what is gone is not remembered as damaged"
        wrong = {key for key, held in self.announced.items() if held is not self.table.holds(key)}
        assert not wrong, "engines know what is held"
        self.table.check()
        for key, stored in located.items():
            assert read_back(self.tier, stored) == self.contents[stored.pack_id, key]


def _without(rows: Mapping[ChunkKey, StoredChunk], keys: Collection[ChunkKey]) -> dict[ChunkKey, StoredChunk]:
    return {key: row for key, row in rows.items() if key not in keys}


def _live(located: Iterable[StoredChunk]) -> dict[str, Live]:
    counted: dict[str, Live] = {}
    for stored in located:
        old = counted.get(stored.pack_id, Live())
        counted[stored.pack_id] = Live(
            old.num_chunks + 1,
            old.stored_bytes + stored.stored_bytes,
            old.raw_bytes + stored.raw_bytes,
            max(old.key_bytes, len(stored.key)),
        )
    return counted
