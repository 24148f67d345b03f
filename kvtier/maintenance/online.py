"""fsck inside the daemon, while it serves: the looking in a thread of its own, each change on the loop.

Packs come and go meanwhile. So what is reported was seen twice: a pack counts as unknown to the ledger only when it was
there before every write that was going on then had ended, and its row is in no snapshot after that; a row counts as
dangling only when it is in a snapshot that is younger than the look that missed its file.
"""

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvtier.concurrency.turns import Breather, slices
from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.packs.pack_directory import UNCLAIMED_FOLDER
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import NamespaceMismatchError
from kvtier.ledger import LedgerSnapshot
from kvtier.ledger.checks import LedgerHealth, inspect_ledger, read_ledger
from kvtier.ledger.promise_copies import FOLDER_NAME, PromiseCopies
from kvtier.maintenance.compare import PackFiles, both, compare
from kvtier.maintenance.compare_promises import compare_promises, read_copies
from kvtier.maintenance.findings import Code, Finding, Report
from kvtier.maintenance.observe import Verifier, list_names, read_headers
from kvtier.maintenance.repair import Repairer
from kvtier.service import Cache
from kvtier.tiering.namespace import Namespace

_GRACE_POLL_S = 0.01

T = TypeVar("T")
OnLoop = Callable[[Coroutine[Any, Any, T]], T]
_RowsByKey = Mapping[ChunkKey, StoredChunk]
_Rows = Mapping[str, _RowsByKey]  # by namespace


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
        self._tier = PackTier(self._state_dir / "packs")

    def run(self) -> Report:
        verifier = Verifier(self._tier, self._left.is_set)
        health = inspect_ledger(self._cache.resources.ledger.path)
        findings = self._check_ledger(health)
        if health.problems or health.altered:
            return Report(findings=findings)  # such a ledger is no measure of anything else
        copies = dict(self._copies().revisions)
        counted = set(self._cache.resources.disk_usage.packs)
        before = list_names(self._tier.directory)
        known = self._on_loop(self._writes_ended())
        earlier = read_ledger(self._cache.resources.ledger.path)
        headers = read_headers(self._tier, sorted(PackFiles(sizes=before).packs), self._left.is_set)
        damaged = verifier.damaged(_present(earlier, before)) if self._deep else {}
        after = list_names(self._tier.directory)
        later = read_ledger(self._cache.resources.ledger.path)
        ledger = both(earlier, later)
        files = PackFiles(
            sizes=_settled(before, after, set(ledger.packs), {*earlier.packs, *later.packs, *known}),
            headers=headers,
            damaged=_still_there(damaged, ledger),
            unclaimed=sorted(list_names(self._state_dir / UNCLAIMED_FOLDER)),
        )
        findings += compare(ledger, files)
        findings += self._check_promises(later, copies)
        findings += [
            Finding(code=Code.UNREADABLE, subject=pack_id, detail=what) for pack_id, what in verifier.unreadable.items()
        ]
        findings += self._on_loop(self._check_memory(_all_rows(ledger), _all_rows(later)))
        gone = counted - PackFiles(sizes=before).packs.keys() - earlier.packs.keys() - later.packs.keys()
        findings += self._on_loop(self._check_usage(ledger, files, gone))
        if self._repair and not self._left.is_set():
            Repairer(self._tier, _ServiceRows(self._cache, self._on_loop), verifier).repair(
                findings, ledger.packs, files
            )
            self._on_loop(self._recount(list_names(self._tier.directory), gone, findings))
        return Report(
            findings=findings,
            num_packs=len(files.packs),
            num_chunks=sum(len(record.chunks) for record in ledger.packs.values()),
            verified_bytes=verifier.verified_bytes,
            num_arena_slots=sum(namespace.table.host.num_chunks for namespace in list(self._cache.namespaces.values())),
        )

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _copies(self) -> PromiseCopies:
        return PromiseCopies(self._state_dir / FOLDER_NAME)

    def _check_promises(self, ledger: LedgerSnapshot, before: Mapping[str, int]) -> list[Finding]:
        """Judge copies that were there, at one revision, before the ledger was copied and after they were read.

        Others change now: one that is replaced between its listing and its reading looks damaged.

        Args:
            ledger: The copy of it.
            before: Revisions of the copies as they were before.
        """
        read = read_copies(self._copies())
        after = self._copies().revisions
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

    def _check_ledger(self, health: LedgerHealth) -> list[Finding]:
        path = str(self._cache.resources.ledger.path)
        findings = [
            Finding(code=Code.ROW_DANGLING, subject=table, detail=f"{number} rows refer to rows that are not there")
            for table, number in health.dangling.items()
        ]
        if findings and self._repair:
            self._on_loop(self._cache.changes.exclusively("fsck", self._drop_dangling))
            for finding in findings:
                finding.mend("deleted")
        remedy = "stop the daemon and run `kvtier fsck --offline --repair`"
        if health.problems:
            what = f"{'; '.join(health.problems[:3])}; {remedy}"
            findings.append(Finding(code=Code.LEDGER_DAMAGED, subject=path, detail=what))
        for table, names in health.altered.items():
            what = f"not what was written, the storage changed them: {', '.join(names)}; {remedy}"
            findings.append(Finding(code=Code.ROW_ALTERED, subject=table, detail=what))
        return findings

    # On the loop

    async def _drop_dangling(self) -> None:
        resources = self._cache.resources
        await resources.in_ledger(resources.ledger.drop_dangling_rows)

    async def _writes_ended(self) -> set[str]:
        """Wait until every pack write that is going on now has ended: its row is there then, or its file is gone.

        Returns:
            Packs that the daemon counts, with a row or without: it is still dealing with the latter.
        """
        usage = self._cache.resources.disk_usage
        begun = usage.writes
        while begun & usage.writes:  # noqa: ASYNC110 - an event per write would cost every write
            await asyncio.sleep(_GRACE_POLL_S)
        return set(usage.packs)

    async def _check_memory(self, rows: _Rows, later: _Rows) -> list[Finding]:
        """Compare the chunk tables with rows; looked at again under the change lock before it is believed."""
        suspects: dict[str, set[ChunkKey]] = {}
        for namespace in list(self._cache.namespaces.values()):
            if not namespace.ephemeral:
                name = namespace.namespace_id
                suspects[name] = await _differing_keys(namespace, rows.get(name, {}), later.get(name, {}))
        suspects = {name: keys for name, keys in suspects.items() if keys}
        if not suspects:
            return []
        return await self._cache.changes.exclusively("fsck", lambda: self._judge_memory(suspects))

    async def _judge_memory(self, suspects: dict[str, set[ChunkKey]]) -> list[Finding]:
        findings = []
        for namespace_id, keys in suspects.items():
            namespace = self._cache.namespaces.get(namespace_id)
            if namespace is None or not (num_wrong := await namespace.index.reconcile(keys, repair=self._repair)):
                continue
            what = f"{num_wrong} chunks lie elsewhere in the daemon's memory than in the ledger"
            findings.append(Finding(code=Code.MEMORY_DIFFERS, subject=namespace_id, detail=what, num_chunks=num_wrong))
            if self._repair:
                findings[-1].mend("memory follows the ledger now")
        return findings

    async def _check_usage(self, ledger: LedgerSnapshot, files: PackFiles, suspects: set[str]) -> list[Finding]:
        counted, sizes = self._cache.resources.disk_usage.packs, files.packs
        wrong = [pack_id for pack_id in ledger.packs if pack_id in sizes and sizes[pack_id] != counted.get(pack_id)]
        if wrong:  # or dropped since: on the ledger's own connection, after all that was asked of it before
            resources = self._cache.resources
            rows = (await resources.in_ledger(resources.ledger.load)).packs
            await asyncio.sleep(0)
            wrong = [pack_id for pack_id in wrong if pack_id in rows and sizes[pack_id] != counted.get(pack_id)]
        gone = [pack_id for pack_id in suspects if pack_id in counted]
        if not wrong and not gone:
            return []
        what = f"{len(wrong)} packs are counted with another length, {len(gone)} are counted and not there"
        return [Finding(code=Code.USAGE_DIFFERS, subject="disk usage", detail=what)]

    async def _recount(self, sizes: dict[str, int], gone: set[str], findings: Sequence[Finding]) -> None:
        """Make the usage follow files that were repaired away, and lengths that were wrong."""
        usage, present = self._cache.resources.disk_usage, PackFiles(sizes=sizes).packs
        for finding in findings:
            if finding.subject in usage.packs and finding.subject not in present:
                usage.remove(finding.subject)
        for finding in findings:
            if finding.code is Code.USAGE_DIFFERS:
                for pack_id, file_bytes in list(usage.packs.items()):
                    if pack_id in gone:
                        usage.remove(pack_id)
                    elif pack_id in present and present[pack_id] != file_bytes:
                        usage.add(pack_id, present[pack_id])
                finding.mend("counted again")


class _ServiceRows:
    """`Rows` of a running daemon: called in the check's thread, changes on the loop, memory follows the ledger."""

    def __init__(self, cache: Cache, on_loop: "OnLoop[None]") -> None:
        self._cache, self._on_loop = cache, on_loop

    def knows_namespace(self, namespace_id: str) -> bool:
        """See `Rows`."""
        namespace = self._cache.namespaces.get(namespace_id)
        return namespace is not None and not namespace.ephemeral

    def payload_bytes(self, namespace_id: str, key: ChunkKey) -> int | None:
        """See `Rows`."""
        layout = self._namespace(namespace_id).layout
        return layout.payload_bytes(group_idx_of(key)) if group_idx_of(key) in layout.group_indexes() else None

    def holds(self, namespace_id: str, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """See `Rows`."""
        table = self._namespace(namespace_id).table
        return {key for key in keys if (chunk := table.get(key)) is not None and chunk.location is not None}

    def drop_chunks(self, record: PackRecord, chunks: Sequence[StoredChunk]) -> None:
        """See `Rows`."""
        self._on_loop(self._cache.changes.exclusively("fsck", lambda: self._drop(record, chunks)))

    def commit(self, record: PackRecord, *, instead_of: str | None) -> int:
        """See `Rows`."""
        num_recorded = 0

        async def change() -> None:
            nonlocal num_recorded
            num_recorded = await self._commit(record, instead_of)

        self._on_loop(self._cache.changes.exclusively("fsck", change))
        return num_recorded

    def _namespace(self, namespace_id: str) -> Namespace:
        namespace = self._cache.namespaces.get(namespace_id)
        if namespace is None:
            raise NamespaceMismatchError(f"namespace {namespace_id} ended meanwhile; run fsck again")
        return namespace

    async def _drop(self, record: PackRecord, chunks: Sequence[StoredChunk]) -> None:
        """The file stays: it may hold what reads right by its own header."""
        namespace = self._cache.namespaces.get(record.namespace_id)
        if not record.chunks:
            resources = self._cache.resources
            await resources.in_ledger(resources.ledger.packs.drop_pack, record.pack_id)
        if namespace is None:
            return
        found = ((chunk.key, _placed_in(namespace, chunk.key, record.pack_id)) for chunk in chunks)
        dropped = {key: place for key, place in found if place is not None}
        await namespace.index.drop(dropped, only_at=dropped, keep_files=True)
        namespace.write_back.add(dropped)  # what is in host memory still is written again
        namespace.inventory.announce([key for key in dropped if not namespace.table.holds(key)], held=False)

    async def _commit(self, record: PackRecord, instead_of: str | None) -> int:
        namespace = self._namespace(record.namespace_id)
        async with namespace.index.hold() as change:
            chunks = tuple(chunk for chunk in record.chunks if _pack_of(namespace, chunk.key) == instead_of)
            if chunks:
                await change.record([replace(record, chunks=chunks)])
        namespace.inventory.announce([chunk.key for chunk in chunks], held=True)
        return len(chunks)


def _settled(before: dict[str, int], after: dict[str, int], rows: set[str], changing: set[str]) -> dict[str, int]:
    """Return the files that may be judged: packs with a row, and what was there both times without one.

    Args:
        before: Names seen first.
        after: Names seen last.
        rows: Packs that had a row all the time.
        changing: Packs that had a row at some time, or that the daemon deals with: their files come or go.
    """
    packs = {f"{pack_id}.kvpack": pack_id in rows for pack_id in changing}
    return {name: num_bytes for name, num_bytes in after.items() if packs.get(name, name in before)}


def _present(ledger: LedgerSnapshot, sizes: dict[str, int]) -> dict[str, PackRecord]:
    packs = PackFiles(sizes=sizes).packs
    return {pack_id: record for pack_id, record in ledger.packs.items() if pack_id in packs}


def _still_there(damaged: dict[str, list[ChunkKey]], ledger: LedgerSnapshot) -> dict[str, list[ChunkKey]]:
    found = {
        pack_id: [key for key in keys if key in {chunk.key for chunk in ledger.packs[pack_id].chunks}]
        for pack_id, keys in damaged.items()
        if pack_id in ledger.packs
    }
    return {pack_id: keys for pack_id, keys in found.items() if keys}


def _all_rows(snapshot: LedgerSnapshot) -> _Rows:
    """Return the chunks of each namespace by key. Not on the loop: there may be millions."""
    rows: dict[str, dict[ChunkKey, StoredChunk]] = {}
    for record in snapshot.packs.values():
        rows.setdefault(record.namespace_id, {}).update((chunk.key, chunk) for chunk in record.chunks)
    return rows


async def _differing_keys(namespace: Namespace, rows: _RowsByKey, later: _RowsByKey) -> set[ChunkKey]:
    """Return what seems to differ: the chunks change while the loop takes its turns in between."""
    suspects: set[ChunkKey] = set()
    breather = Breather()
    for part in slices(list(rows)):
        suspects.update(key for key in part if not _agree(namespace, key, rows[key]))
        await breather.pause()
    for part in slices(namespace.table.keys()):
        suspects.update(key for key in part if key not in later and not _agree(namespace, key, None))
        await breather.pause()
    return suspects


def _agree(namespace: Namespace, key: ChunkKey, row: StoredChunk | None) -> bool:
    chunk = namespace.table.get(key)
    location = chunk.location if chunk is not None else None
    if row is None or location is None:
        return row is location
    return (row.pack_id, row.offset) == (location.pack_id, location.offset)


def _pack_of(namespace: Namespace, key: ChunkKey) -> str | None:
    chunk = namespace.table.get(key)
    return None if chunk is None or chunk.location is None else chunk.location.pack_id


def _placed_in(namespace: Namespace, key: ChunkKey, pack_id: str) -> StoredChunk | None:
    chunk = namespace.table.get(key)
    location = chunk.location if chunk is not None else None
    return location if location is not None and location.pack_id == pack_id else None
