"""fsck inside the daemon, while it serves: the looking in a thread of its own, each change on the loop.

Packs come and go meanwhile. Files are listed after the ledger was read, and rows are read once more at the end: a pack
that has its row both times had its file in between, because a file is there before its row and is unlinked after it. A
file without a row is reported only if it stays after every write that was going on has ended, and the daemon does
not count it.
"""

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvtier.concurrency.pauses import POLL_S
from kvtier.concurrency.turns import Breather, slices
from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.disk.packs.pack_directory import PACK_SUFFIX
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import NamespaceMismatchError
from kvtier.ledger import LedgerSnapshot
from kvtier.ledger.checks import inspect_ledger, read_ledger, read_pack_ids
from kvtier.ledger.promise_copies import FOLDER_NAME, PromiseCopies
from kvtier.maintenance.compare import PackFiles, compare_promises, row_findings
from kvtier.maintenance.findings import Code, Finding, Report
from kvtier.maintenance.observe import Verifier, list_names, read_copies
from kvtier.maintenance.repair import Repairer
from kvtier.service import Cache
from kvtier.tiering.namespace import Namespace

T = TypeVar("T")
_WITHOUT_ROWS = (Code.PACK_ORPHAN, Code.NOTE_PACK_REMOVED)
_OFFLINE = "packs were not looked at; stop the daemon and run `kvtier fsck --offline --repair`"


class OnlineFsck:
    """Checks a running daemon, one check at a time."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._one_at_a_time = asyncio.Lock()

    async def run(self, *, repair: bool, deep: bool) -> Report:
        """Compare ledger, packs and memory, and with `repair` make them agree. A caller that leaves ends it.

        Raises:
            TierIOError: The pack directory cannot be read.
            LedgerError: The ledger cannot be read.
        """
        left = threading.Event()
        async with self._one_at_a_time:
            check = _OnlineCheck(self._cache, asyncio.get_running_loop(), left, repair=repair, deep=deep)
            try:
                # Not `Pool.run`: a caller that leaves does not wait for a check that may take minutes; it tells it.
                return await asyncio.wrap_future(self._cache.resources.check_thread.submit(check.run))
            finally:
                left.set()


class _OnlineCheck:
    """One check; everything here runs in its thread except what `_on_loop` runs."""

    def __init__(
        self, cache: Cache, loop: asyncio.AbstractEventLoop, left: threading.Event, *, repair: bool, deep: bool
    ) -> None:
        self._cache, self._loop, self._left = cache, loop, left
        self._repair, self._deep = repair, deep
        self._state_dir = cache.config.disk.disk_dir
        self._ring = cache.resources.ledger.ring
        self._tier = PackTier(self._state_dir / "packs", seals=ChunkSeals(self._ring))
        self._ledger_path = cache.resources.ledger.path
        self._uncounted: set[str] = set()

    def run(self) -> Report:
        health = inspect_ledger(self._ledger_path, self._ring)
        findings = row_findings(health)
        for finding in findings:
            if finding.code is Code.ROW_ALTERED:
                finding.detail += f"; {_OFFLINE}"
        if health.problems:
            what = f"{'; '.join(health.problems[:3])}; {_OFFLINE}"
            findings.append(Finding(Code.LEDGER_DAMAGED, str(self._ledger_path), what))
        if health.dangling and self._repair:
            self._on_loop(self._drop_dangling(findings))
        if health.problems or health.altered:
            return Report(findings=findings)  # such a ledger is no measure of anything else
        copies = PromiseCopies(self._state_dir / FOLDER_NAME).revisions
        counted = set(self._cache.resources.disk_usage.packs)
        ledger = read_ledger(self._ledger_path, self._ring)
        findings += self._check_promises(ledger, copies)
        findings += self._on_loop(self._check_memory(_rows_by_key(ledger)))
        verifier = Verifier(self._tier, self._left.is_set)
        files, of_packs = verifier.check(ledger, deep=self._deep)
        findings += self._confirmed(of_packs, ledger, counted)
        findings += self._on_loop(self._check_usage(ledger, files.packs, counted))
        if self._repair and not self._left.is_set():
            Repairer(self._tier, _ServiceRows(self._cache, self._loop), verifier, ledger).repair(findings)
            self._on_loop(self._recount(PackFiles(sizes=list_names(self._tier.directory)).packs, findings))
        return Report(
            findings=findings,
            num_packs=len(files.packs),
            num_chunks=sum(len(record.chunks) for record in ledger.packs.values()),
            verified_bytes=verifier.verified_bytes,
            num_arena_slots=sum(namespace.table.host.num_chunks for namespace in list(self._cache.namespaces.values())),
        )

    def _confirmed(self, findings: list[Finding], ledger: LedgerSnapshot, counted: set[str]) -> list[Finding]:
        """Leave out findings on packs and temporary files that came or went during the check.

        `counted` are the packs that the daemon counted before the ledger was read.
        """
        unknown = [finding for finding in findings if finding.code in (*_WITHOUT_ROWS, Code.TEMPORARY_FILE)]
        counted_later = self._on_loop(self._writes_ended()) if unknown else set()
        rows = read_pack_ids(self._ledger_path)
        come = counted | counted_later | rows
        # Listed after the sets were read: what was written and deleted meanwhile is in none of them.
        names = list_names(self._tier.directory) if unknown else {}

        def is_confirmed(finding: Finding) -> bool:
            if finding.code in _WITHOUT_ROWS:
                return finding.subject not in come and finding.subject + PACK_SUFFIX in names
            if finding.code is Code.TEMPORARY_FILE:
                return finding.subject in names
            return finding.subject not in ledger.packs or finding.subject in rows

        return [finding for finding in findings if is_confirmed(finding)]

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return _run_on(self._loop, coroutine)

    def _check_promises(self, ledger: LedgerSnapshot, before: Mapping[str, int]) -> list[Finding]:
        """Judge copies that were there, at one revision, `before` the ledger was read and after they were read.

        Others change now: one that is replaced between its listing and its reading looks damaged.
        """
        read = read_copies(PromiseCopies(self._state_dir / FOLDER_NAME, self._ring))
        after = PromiseCopies(self._state_dir / FOLDER_NAME).revisions
        copies = {
            copy_id: copy
            for copy_id, copy in read.items()
            if before.get(copy_id) == after.get(copy_id) == copy.revision
        }
        findings = [
            finding for finding in compare_promises(ledger, copies) if finding.code is not Code.NOTE_COPY_MISSING
        ]  # which the daemon writes by itself
        damaged = [finding for finding in findings if finding.code is Code.COPY_DAMAGED]
        if damaged and self._repair:
            resources, ids = self._cache.resources, [finding.subject for finding in damaged]
            self._on_loop(resources.in_ledger(resources.ledger.promises.renew_copies, ids))
            for finding in damaged:
                finding.mend("set aside; the daemon writes it again")
        for finding in findings:
            if finding.code is Code.PROMISE_LOST:
                finding.detail += "; restart the daemon, which puts it back"
        return findings

    # On the loop

    async def _drop_dangling(self, findings: Sequence[Finding]) -> None:
        resources = self._cache.resources
        await self._cache.changes.exclusively("fsck", lambda: resources.in_ledger(resources.ledger.drop_dangling_rows))
        for finding in findings:
            if finding.code is Code.ROW_DANGLING:
                finding.mend("deleted")

    async def _writes_ended(self) -> set[str]:
        """Wait until every write that is going on now has ended; return the packs that the daemon counts then."""
        usage = self._cache.resources.disk_usage
        begun = set(usage.writes)
        while begun & usage.writes:  # noqa: ASYNC110 - an event per write would cost every write
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(POLL_S)  # a write that has just ended is counted in the next turn of the loop
        return set(usage.packs)

    async def _check_memory(self, rows: Mapping[str, Mapping[ChunkKey, StoredChunk]]) -> list[Finding]:
        """Compare the chunk tables with rows; looked at again under the change lock before it is believed."""
        findings = []
        for namespace in list(self._cache.namespaces.values()):
            name = namespace.namespace_id
            suspects = await _differing_keys(namespace, rows.get(name, {})) if not namespace.ephemeral else set()
            if not suspects:
                continue
            judge = partial(self._num_wrong, namespace, suspects)
            if num_wrong := await self._cache.changes.exclusively("fsck", judge):
                what = f"{num_wrong} chunks lie elsewhere in the daemon's memory than in the ledger"
                findings.append(Finding(Code.MEMORY_DIFFERS, name, what, num_wrong))
                if self._repair:
                    findings[-1].mend("memory follows the ledger now")
        return findings

    async def _num_wrong(self, namespace: Namespace, suspects: set[ChunkKey]) -> int:
        if self._cache.namespaces.get(namespace.namespace_id) is not namespace:  # it ended meanwhile
            return 0
        return await namespace.index.reconcile(suspects, repair=self._repair)

    async def _check_usage(self, ledger: LedgerSnapshot, sizes: dict[str, int], counted: set[str]) -> list[Finding]:
        resources = self._cache.resources
        usage = resources.disk_usage.packs
        wrong = [pack_id for pack_id in ledger.packs if pack_id in sizes and sizes[pack_id] != usage.get(pack_id)]
        if wrong:  # or dropped since: asked of the ledger's own connection, after all that was asked of it before
            rows = await resources.in_ledger(resources.ledger.packs.pack_ids)
            await asyncio.sleep(0)
            wrong = [pack_id for pack_id in wrong if pack_id in rows and sizes[pack_id] != usage.get(pack_id)]
        self._uncounted = {pack_id for pack_id in counted - sizes.keys() - ledger.packs.keys() if pack_id in usage}
        if not wrong and not self._uncounted:
            return []
        what = f"{len(wrong)} packs are counted with another length, {len(self._uncounted)} are counted and not there"
        return [Finding(Code.USAGE_DIFFERS, "disk usage", what)]

    async def _recount(self, sizes: dict[str, int], findings: Sequence[Finding]) -> None:
        """Make the usage follow files that were repaired away, and lengths that were wrong."""
        usage = self._cache.resources.disk_usage
        for finding in findings:
            if finding.subject in usage.packs and finding.subject not in sizes:
                usage.remove(finding.subject)
            elif finding.code is Code.USAGE_DIFFERS:
                for pack_id, file_bytes in list(usage.packs.items()):
                    if pack_id in self._uncounted:
                        usage.remove(pack_id)
                    elif sizes.get(pack_id, file_bytes) != file_bytes:
                        usage.add(pack_id, sizes[pack_id])
                finding.mend("counted again")


class _ServiceRows:
    """`Rows` of a running daemon: called in the check's thread, done on the loop; memory follows the ledger."""

    def __init__(self, cache: Cache, loop: asyncio.AbstractEventLoop) -> None:
        self._cache, self._loop = cache, loop

    def places(self, namespace_id: str, keys: Collection[ChunkKey]) -> Mapping[ChunkKey, StoredChunk]:
        """See `Rows`."""
        return _run_on(self._loop, self._places(namespace_id, keys))

    def drop_chunks(self, record: PackRecord, chunks: Sequence[StoredChunk]) -> None:
        """See `Rows`."""
        self._exclusively(lambda: self._drop(record, chunks))

    def commit(self, record: PackRecord, *, instead_of: str | None) -> int:
        """See `Rows`."""
        return self._exclusively(lambda: self._commit(record, instead_of))

    def _exclusively(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return _run_on(self._loop, self._cache.changes.exclusively("fsck", change))

    def _namespace(self, namespace_id: str) -> Namespace:
        namespace = self._cache.namespaces.get(namespace_id)
        if namespace is None:
            raise NamespaceMismatchError(f"namespace {namespace_id} ended meanwhile; run fsck again")
        return namespace

    async def _places(self, namespace_id: str, keys: Collection[ChunkKey]) -> dict[ChunkKey, StoredChunk]:
        """On the loop, as all that asks the table: it makes objects of chunks, and of one chunk there must be one."""
        namespace, places = self._namespace(namespace_id), dict[ChunkKey, StoredChunk]()
        for part in slices(list(keys)):
            places |= {key: place for key in part if (place := _location(namespace, key)) is not None}
            await asyncio.sleep(0)
        return places

    async def _drop(self, record: PackRecord, chunks: Sequence[StoredChunk]) -> None:
        """The file stays: it may hold what reads right by its own header."""
        namespace, resources = self._cache.namespaces.get(record.namespace_id), self._cache.resources
        if not record.chunks:
            await resources.in_ledger(resources.ledger.packs.drop_pack, record.pack_id)
        if namespace is None:
            return
        found = {chunk.key: _location(namespace, chunk.key) for chunk in chunks}
        dropped = {key: place for key, place in found.items() if place is not None and place.pack_id == record.pack_id}
        await namespace.index.drop(dropped, only_at=dropped, keep_files=True)
        namespace.write_back.add(dropped)  # what is in host memory still is written again
        lost = [key for key in dropped if not namespace.table.holds(key)]
        namespace.inventory.announce_lost(lost, MissingCause.DROPPED_AS_DAMAGED)
        await resources.in_ledger(resources.ledger.packs.forget_removed, [record.pack_id])  # else a start sweeps it

    async def _commit(self, record: PackRecord, instead_of: str | None) -> int:
        namespace = self._namespace(record.namespace_id)
        async with namespace.index.hold() as change:
            chunks = tuple(chunk for chunk in record.chunks if _pack_of(namespace, chunk.key) == instead_of)
            if chunks:
                await change.record([replace(record, chunks=chunks)])
        namespace.inventory.announce([chunk.key for chunk in chunks], held=True)
        return len(chunks)


def _run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def _rows_by_key(snapshot: LedgerSnapshot) -> dict[str, dict[ChunkKey, StoredChunk]]:
    """Return the chunks of each namespace. Not on the loop: there may be millions."""
    rows: dict[str, dict[ChunkKey, StoredChunk]] = {}
    for record in snapshot.packs.values():
        rows.setdefault(record.namespace_id, {}).update((chunk.key, chunk) for chunk in record.chunks)
    return rows


async def _differing_keys(namespace: Namespace, rows: Mapping[ChunkKey, StoredChunk]) -> set[ChunkKey]:
    """Return what seems to differ: the chunks change while the loop takes its turns in between."""
    suspects: set[ChunkKey] = set()
    breather = Breather()
    for part in slices(list(rows)):
        suspects.update(key for key in part if not _agree(namespace, key, rows[key]))
        await breather.pause()
    for part in slices(namespace.table.keys()):
        suspects.update(key for key in part if key not in rows and not _agree(namespace, key, None))
        await breather.pause()
    return suspects


def _agree(namespace: Namespace, key: ChunkKey, row: StoredChunk | None) -> bool:
    location = _location(namespace, key)
    if row is None or location is None:
        return row is location
    return (row.pack_id, row.offset) == (location.pack_id, location.offset)


def _location(namespace: Namespace, key: ChunkKey) -> StoredChunk | None:
    chunk = namespace.table.get(key)
    return chunk.location if chunk is not None else None


def _pack_of(namespace: Namespace, key: ChunkKey) -> str | None:
    location = _location(namespace, key)
    return location.pack_id if location is not None else None
