"""Where each chunk of a namespace lies on disk: chunk table, ledger rows and pack files change together, only here."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from kvtier.concurrency.tasks import shielded
from kvtier.concurrency.turns import SLICE_KEYS
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.base import DiskTier
from kvtier.disk.disk_usage import DiskUsage
from kvtier.disk.pack_usage import PackUsage
from kvtier.errors import InvalidArgumentError, LedgerError, TierIOError
from kvtier.ledger import Ledger
from kvtier.ledger.stored_packs import StoredPacks
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)


P = ParamSpec("P")
T = TypeVar("T")


class Dropped(NamedTuple):
    """What left the disk: chunks, and their stored bytes."""

    num_chunks: int
    num_bytes: int


class DiskResources(Protocol):
    """What an index shares with those of all namespaces."""

    @property
    def ledger(self) -> Ledger: ...  # called through `in_ledger` only

    @property
    def disk(self) -> DiskTier: ...

    @property
    def disk_usage(self) -> DiskUsage: ...

    @property
    def counters(self) -> Counters: ...

    async def in_ledger(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on the ledger's thread, in the order in which calls were made."""

    async def in_io(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a short blocking call on another thread."""


AnnounceHeld = Callable[[Sequence[ChunkKey]], None]
"""Reports to all engines of the namespace that chunks are held."""
AnnounceLost = Callable[[Sequence[ChunkKey], MissingCause], None]
"""Reports to all engines of the namespace that chunks are not held any longer, and why."""


class ChunkIndex:
    """The only code that changes where the chunks of one namespace lie on disk. `tests/contract` holds it to this.

    Nothing else calls `ChunkTable.place` or `unplace`, or the ledger's operations on packs and chunks of a running
    daemon. Loop thread only; what blocks runs in the threads of `resources`.

    Invariants, whenever no change is being made:

    1. A chunk has a location in the table if and only if the ledger has a row for it, and both are equal. One
       exception: a damaged chunk whose row the ledger refused to delete has a row and no location (`reject`).
    2. The pack file of every row exists: file, row, table on the way in; table, row, file on the way out. So a crash
       leaves pack files without rows, which the next start adopts or sweeps, and never a row without its file.
    3. The usage counts every pack file from `record` or `move` on until the file is unlinked. A file that cannot be
       unlinked is logged, counts, and is left to the next start; the change has succeeded all the same.
    4. `packs` is what the locations in the table add up to.

    Changes are made one at a time, in the order of the calls, under a private lock. Each looks at places and pins when
    its turn comes. Readers need no lock: they find a chunk where it was, where it will be, or, if it is being dropped,
    not at all. A file may be unlinked while it is read: compare the location again before you call a chunk damaged.

    Cancellation: a change that was called is made to its end, because a commit cannot be taken back. A caller that is
    cancelled meanwhile is cancelled after that, and an error of the change is lost then. `reconcile` and the start of a
    `hold` block end at once, with nothing changed.

    After a LedgerError table, rows, usage and files are as before the call, unless the method says otherwise.

    What `drop` deletes, and what `record` adds, is the caller's to announce. The index announces what the caller cannot
    know: what an eviction or a rejection left in no tier, what a refused drop put back, what a repair found.

    Args:
        namespace_id: The namespace of all rows.
        table: Its chunks.
        packs: Follows the table (`ChunkTable` reports each change to `PackUsage.moved`).
        resources: Ledger, pack files, usage and counters.
        announce_held: Reports what is held.
        announce_lost: Reports what is not held any longer.
        write_again: Given chunks whose damaged bytes were rejected: those that host memory holds go to disk again.
    """

    def __init__(
        self,
        namespace_id: str,
        table: ChunkTable,
        packs: PackUsage,
        resources: DiskResources,
        announce_held: AnnounceHeld,
        announce_lost: AnnounceLost,
        write_again: Callable[[Iterable[ChunkKey]], None],
    ) -> None:
        self.packs = packs
        self._namespace_id, self._table, self._resources = namespace_id, table, resources
        self._announce_held, self._announce_lost = announce_held, announce_lost
        self._write_again = write_again
        self._lock = asyncio.Lock()
        self.num_not_unlinked = 0
        """How often a pack's file could not be unlinked."""

    # In

    async def load(self, stored: StoredPacks, file_bytes: Mapping[str, int], payload_bytes: Collection[int]) -> None:
        """At a start, take in all rows of the namespace. Those beyond the end of their file are deleted: damaged.

        fsck decides about a pack without chunks; until then its file counts in the disk's usage.

        Args:
            stored: What the ledger has; its columns are the table's from now on.
            file_bytes: The length of each pack's file; one that is not there has none.
            payload_bytes: The lengths that chunks of the namespace have. A row with another is damaged, as if its chunk
                lay beyond the file.

        Raises:
            LedgerError: The ledger refused to delete rows.
        """
        for pack_id in stored.packs:
            self._resources.disk_usage.add(pack_id, file_bytes.get(pack_id, 0))
        ends_of = np.array(
            [
                file_bytes.get(part.pack_id, 0) if part and part.raw_bytes in payload_bytes else 0
                for part in stored.places.parts
            ],
            np.uint64,
        )
        is_lost = stored.places.ends > ends_of[stored.places.part_numbers]
        if is_lost.any():
            await self._delete_lost(stored, np.flatnonzero(is_lost).tolist(), file_bytes)
            stored = stored.only(~is_lost)
        self._table.fill(stored.keys, stored.places)
        self.packs.fill(stored.keys, stored.places)

    async def _delete_lost(self, stored: StoredPacks, rows: Sequence[int], file_bytes: Mapping[str, int]) -> None:
        keys = [stored.keys[row] for row in rows]
        lost = Counter(
            place.pack_id for row, key in zip(rows, keys, strict=True) if (place := stored.places.get(row, key))
        )
        self._resources.counters.damaged_chunks_disk += len(keys)
        for pack_id, number in lost.items():
            num_bytes = file_bytes.get(pack_id, 0)
            log_event(logger, "pack_damaged", level=logging.WARNING, pack=pack_id, lost=number, file_bytes=num_bytes)
        self._announce_lost(keys, MissingCause.DROPPED_AS_DAMAGED)
        emptied = await self._delete_rows(keys)
        self.packs.damaged |= {*lost, *emptied}  # compaction moves what is whole out of them
        await self._unlink(emptied)

    @shielded
    async def record(self, record: PackRecord) -> None:
        """Commit a new pack: from now on its chunks are read from it, and are durable.

        Args:
            record: Its file is durable under its final name.

        Raises:
            LedgerError: The ledger refused. The pack file is unlinked; everything else is as before.
        """
        self._resources.disk_usage.add(record.pack_id, record.file_bytes)
        try:
            async with self.hold() as change:
                await change.record([record])
        except LedgerError:
            await self._unlink([record.pack_id])  # each retry would leave one more
            raise

    @asynccontextmanager
    async def hold(self) -> AsyncIterator["IndexChange"]:
        """Hold all other changes until the end of the block, so that what was looked at stays true while it is changed.

        Only reads of the table and the yielded object may be used in the block: this index's other methods would wait
        for its end. Packs that lost their last row are unlinked after it, also when the block raises: what it has
        committed by then stays committed.
        """
        change = IndexChange(self._table, self._resources)
        try:
            async with self._lock:
                yield change
        finally:
            await self._unlink(change.emptied)

    @shielded
    async def move(self, record: PackRecord, copied: Mapping[ChunkKey, StoredChunk]) -> int:
        """Commit a pack of copies: a chunk is read from it from now on if it still lies where it was copied from.

        Args:
            record: The new pack; its file is durable under its final name.
            copied: For each of its chunks, what was copied.

        Returns:
            By how many bytes the pack files shrank, less those that could not be unlinked; negative if they grew.

        Raises:
            LedgerError: The ledger refused. The new pack file is unlinked; everything else is as before.
        """
        resources = self._resources
        resources.disk_usage.add(record.pack_id, record.file_bytes)
        moved_from = {key: stored.pack_id for key, stored in copied.items()}
        try:
            async with self._lock:
                emptied = await resources.in_ledger(resources.ledger.packs.move_chunks, record, moved_from)
                for stored in record.chunks:
                    chunk = self._table.get(stored.key)
                    if chunk is not None and chunk.location == copied[stored.key]:
                        self._table.place(stored.key, stored)
        except LedgerError:
            await self._unlink([record.pack_id])
            raise
        return await self._unlink(emptied) - record.file_bytes

    # Out

    @shielded
    async def drop(
        self,
        keys: Collection[ChunkKey],
        *,
        only_at: Mapping[ChunkKey, StoredChunk] | None = None,
        unpinned_only: bool = False,
        keep_files: bool = False,
    ) -> Dropped:
        """Delete chunks from disk. They stop being found as soon as the changes before this one are made.

        Args:
            keys: What is not on disk is ignored.
            only_at: Ignore what lies elsewhere by now.
            unpinned_only: Ignore what is pinned by now.
            keep_files: Leave packs that lost their last row where they are; they count until someone removes them.

        Raises:
            LedgerError: The ledger refused; the chunks are on disk as before, and engines are notified of that.
        """
        async with self._lock:
            dropped = self._unplace(keys, only_at=only_at, unpinned_only=unpinned_only)
            try:
                emptied = await self._delete_rows(dropped)
            except LedgerError:
                for key, stored in dropped.items():
                    self._table.place(key, stored)
                self._announce_held(list(dropped))  # engines may have been notified that they are gone
                raise
        if not keep_files:
            await self._unlink(emptied)
        return Dropped(len(dropped), sum(stored.stored_bytes for stored in dropped.values()))

    def _unplace(
        self,
        keys: Iterable[ChunkKey],
        *,
        only_at: Mapping[ChunkKey, StoredChunk] | None = None,
        unpinned_only: bool = False,
    ) -> dict[ChunkKey, StoredChunk]:
        """Take chunks out of the table, the lock held; return where they lay."""
        dropped: dict[ChunkKey, StoredChunk] = {}
        for key in keys:
            chunk = self._table.get(key)
            if chunk is None or (unpinned_only and chunk.num_pins):
                continue
            location = chunk.location
            if location is not None and (only_at is None or only_at.get(key) == location):
                dropped[key] = location
                self._table.unplace(key)
        return dropped

    async def _delete_rows(self, keys: Collection[ChunkKey]) -> list[str]:
        """Return packs that lost their last row."""
        if not keys:
            return []
        return await self._resources.in_ledger(self._resources.ledger.packs.drop_chunks, self._namespace_id, keys)

    async def drop_cheapest(self, num_bytes: int) -> int:
        """Delete unpinned chunks of `num_bytes`, the least valuable first; return the stored bytes deleted.

        Raises:
            LedgerError: The ledger refused; they are on disk as before.
        """
        return await self._evict(self._table.disk.take_cheapest(num_bytes))

    async def drop_packs(self, pack_ids: Sequence[str], *, unpinned_only: bool = True) -> int:
        """Delete every chunk of these packs, or every unpinned one; return the stored bytes deleted.

        Raises:
            LedgerError: The ledger refused; they are on disk as before.
        """
        keys = [stored.key for stored in await self.chunks_in(pack_ids)]
        return await self._evict(keys, unpinned_only=unpinned_only)

    @shielded
    async def _evict(self, keys: Sequence[ChunkKey], *, unpinned_only: bool = True) -> int:
        dropped = await self.drop(keys, unpinned_only=unpinned_only)
        if not unpinned_only:  # a pinned chunk that is in memory only would stay there for ever
            num_freed = sum(self._table.host.evict_when_unprotected(key) for key in keys)
            self._resources.counters.evicted_chunks_host += num_freed
        self._resources.counters.evicted_chunks_disk += dropped.num_chunks
        lost = [key for key in keys if not self._table.holds(key)]
        self._announce_lost(lost, MissingCause.EVICTED_FOR_DISK_SPACE)
        return dropped.num_bytes

    @shielded
    async def reject(self, damaged: Mapping[ChunkKey, StoredChunk]) -> None:
        """Delete chunks whose stored bytes are damaged, where they still lie there: they are not served again.

        That holds even if the ledger refuses. Their rows stay then, and keep the pack file: the next start, or a
        repair, finds the damage again, unless a new store replaces them first.
        """
        async with self._lock:
            dropped = self._unplace(damaged, only_at=damaged)
            try:
                emptied = await self._delete_rows(dropped)
            except LedgerError as error:
                log_event(logger, "damage_not_recorded", level=logging.ERROR, chunks=len(dropped), problem=str(error))
                emptied = []
        lost = [key for key in dropped if not self._table.holds(key)]  # or host memory evicted it since
        self._announce_lost(lost, MissingCause.DROPPED_AS_DAMAGED)
        await self._unlink(emptied)
        self._write_again(damaged)
        self.packs.report_hole()

    # Looking

    async def chunks_in(self, pack_ids: Sequence[str]) -> list[StoredChunk]:
        """Return what is read from these packs, in the order of the packs and in each by offset.

        What a drop is deleting is left out, although the ledger may refuse.
        """
        wanted = {pack_id: number for number, pack_id in enumerate(pack_ids)}
        found = self._table.located_in(wanted)
        return sorted(found, key=lambda stored: (wanted[stored.pack_id], stored.offset))

    async def reconcile(self, keys: Collection[ChunkKey], *, repair: bool) -> int:
        """Compare table and ledger for these chunks, while nothing changes them; return how many differ.

        Args:
            keys: Suspects; each is looked up in the ledger.
            repair: Make the table follow the ledger, and notify engines.

        Raises:
            LedgerError: The ledger cannot be read.
        """
        resources = self._resources
        async with self._lock:
            rows = await resources.in_ledger(resources.ledger.packs.find_chunks, self._namespace_id, keys)
            wrong = [key for key in keys if _place(self._location(key)) != _place(rows.get(key))]
            if not repair:
                return len(wrong)
            for key in wrong:
                if (row := rows.get(key)) is not None:
                    self._table.place(key, row)
                else:
                    self._table.unplace(key)
        self._announce_held([key for key in wrong if self._table.holds(key)])
        lost = [key for key in wrong if not self._table.holds(key)]
        self._announce_lost(lost, MissingCause.DROPPED_AS_DAMAGED)
        return len(wrong)

    def _location(self, key: ChunkKey) -> StoredChunk | None:
        chunk = self._table.get(key)
        return chunk.location if chunk is not None else None

    # Files

    @shielded
    async def _unlink(self, pack_ids: Iterable[str]) -> int:
        """Unlink packs that have no row any longer, or set them aside if damage was found in them.

        What cannot be unlinked still counts, and the next start sweeps or adopts it. A file that is not there may come
        back, with a mount or a backup: then the next start adopts it.

        Returns:
            The length of the files that are gone.
        """
        resources, freed_bytes, absent = self._resources, 0, list[str]()
        for pack_id in pack_ids:
            is_damaged = pack_id in self.packs.damaged
            remove = resources.disk.set_aside_pack if is_damaged else resources.disk.delete_pack
            try:
                if not await resources.in_io(remove, pack_id):
                    absent.append(pack_id)
            except (TierIOError, InvalidArgumentError) as error:  # the latter: what a damaged row names, and is no id
                until = "it is not read any longer, and takes its space until the next start removes it"
                log_event(logger, "pack_not_deleted", level=logging.WARNING, problem=str(error), consequence=until)
                self.num_not_unlinked += 1
                continue
            file_bytes = resources.disk_usage.file_bytes(pack_id)
            freed_bytes += file_bytes
            resources.disk_usage.remove(pack_id)
            self.packs.damaged.discard(pack_id)
            if is_damaged and file_bytes:
                resources.counters.packs_set_aside += 1
                log_event(logger, "pack_set_aside", level=logging.WARNING, pack=pack_id)
        if absent:
            try:
                await resources.in_ledger(resources.ledger.packs.forget_removed, absent)
            except LedgerError as error:
                log_event(logger, "removed_packs_not_forgotten", level=logging.WARNING, problem=str(error))
        return freed_bytes


class IndexChange:
    """What `ChunkIndex.hold` yields.

    Attributes:
        emptied: Packs that lost their last row in the block.
    """

    def __init__(self, table: ChunkTable, resources: DiskResources) -> None:
        self.emptied: list[str] = []
        self._table, self._resources = table, resources

    @shielded
    async def record(self, records: Sequence[PackRecord], *, also: Callable[[Ledger], None] | None = None) -> None:
        """Commit new packs, all in one transaction: from now on their chunks are read from them, and are durable.

        Args:
            records: Their files are durable under their final names. A chunk that an older pack has too is read from
                the new one.
            also: Writes other rows in the same transaction, on the ledger's thread.

        Raises:
            LedgerError: The ledger refused. The files are the caller's to delete; everything else is as before.
        """
        resources = self._resources
        self.emptied += await resources.in_ledger(_commit, resources.ledger, records, also)
        for record in records:
            resources.disk_usage.add(record.pack_id, record.file_bytes)
            for number, chunk in enumerate(record.chunks):
                if number and not number % SLICE_KEYS:
                    await asyncio.sleep(0)
                self._table.place(chunk.key, chunk)


def _commit(ledger: Ledger, records: Sequence[PackRecord], also: Callable[[Ledger], None] | None) -> list[str]:
    """Ledger thread: one transaction; returns packs that lost their last row."""
    with ledger.together():
        if also is not None:
            also(ledger)
        return [pack_id for record in records for pack_id in ledger.packs.commit_pack(record)]


def _place(stored: StoredChunk | None) -> tuple[str, int] | None:
    return (stored.pack_id, stored.offset) if stored is not None else None
