"""fsck without a daemon: over a disk folder whose lock the caller holds. Blocks."""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import LedgerError
from kvtier.host.arena import ARENA_PREFIX
from kvtier.ledger import Ledger, LedgerSnapshot
from kvtier.ledger.checks import inspect_ledger, is_not_writable, read_ledger, remove_database, salvage_ledger
from kvtier.ledger.namespace_files import load_namespaces, save_namespace
from kvtier.ledger.promise_copies import FOLDER_NAME, PromiseCopies
from kvtier.ledger.sql.schema import SIDE_FILES
from kvtier.maintenance.compare import PackFiles, compare, compare_promises, row_findings
from kvtier.maintenance.findings import Code, Finding, Report
from kvtier.maintenance.observe import Verifier, list_names, read_copies
from kvtier.maintenance.repair import Repairer, fits
from kvtier.sealing import KeyRing

LEDGER_NAME = "ledger.sqlite"
_EMPTY = LedgerSnapshot()
_LEDGER_UNUSABLE = (Code.LEDGER_MISSING, Code.LEDGER_DAMAGED, Code.ROW_ALTERED)


def check_offline(
    state_dir: Path, *, arena_dir: Path | None = None, repair: bool, deep: bool, ring: KeyRing | None = None
) -> Report:
    """Compare ledger and packs both ways, and with `repair` make them agree.

    Without `repair` nothing is changed, a ledger of an older version included. The caller holds the directory's lock.

    Args:
        state_dir: Folder of ledger and packs.
        arena_dir: Where a previous daemon's arenas would lie; counted only.
        repair: Put right what can be put right.
        deep: Read and verify every chunk.
        ring: What is sealed opens with it.

    Raises:
        KeyMissingError: A promise is sealed with a key that the ring lacks.
        FormatVersionError: A newer kvtier wrote the ledger.
        TierIOError: The directory cannot be read.
        LedgerError: The ledger cannot be opened, for example for want of permission.
    """
    return _OfflineCheck(state_dir, ring, repair=repair, deep=deep).run(arena_dir)


class _OfflineCheck:
    def __init__(self, state_dir: Path, ring: KeyRing | None, *, repair: bool, deep: bool) -> None:
        self._ring = ring
        self._state_dir, self._repair, self._deep = state_dir, repair, deep
        self._ledger_path = state_dir / LEDGER_NAME
        self._packs_dir = state_dir / "packs"
        self._findings: list[Finding] = []
        self._salvaged: Finding | None = None  # the ledger was damaged, and what could be read of it is another now
        self._marker = state_dir / f"{LEDGER_NAME}.repairing"

    def run(self, arena_dir: Path | None) -> Report:
        report = Report(findings=self._findings)
        if not self._packs_dir.is_dir() and not self._ledger_path.exists():
            return report
        ledger = self._read_ledger()
        if ledger is not None:
            self._check_packs(self._check_promises(ledger), report)
        for finding in self._findings if ledger is None else ():
            if finding.code in _LEDGER_UNUSABLE:
                finding.detail += "; packs were not looked at: --repair mends the ledger, and then does so"
        report.findings += _arena_files(arena_dir)
        return report

    def _check_packs(self, ledger: LedgerSnapshot, report: Report) -> None:
        report.num_chunks = sum(len(record.chunks) for record in ledger.packs.values())
        if not self._packs_dir.is_dir() and not self._repair:  # PackTier would create it
            self._findings += compare(ledger, PackFiles(sizes={}))
            return
        tier = PackTier(self._packs_dir, seals=ChunkSeals(self._ring))
        verifier = Verifier(tier)
        files, findings = verifier.check(ledger, deep=self._deep)
        self._findings += findings
        if self._repair:
            with closing(Ledger.open(self._ledger_path, ring=self._ring)) as opened:
                Repairer(tier, LedgerRows(opened), verifier, ledger).repair(self._findings)
                if self._marker.exists():
                    num_added = self._add_lost_rows(opened, files)
                    self._marker.unlink()
                    if self._salvaged is not None and num_added:
                        self._salvaged.mend(f"{num_added} chunks got their rows again from the headers of their packs")
            for row in ledger.namespaces:
                save_namespace(self._state_dir, row)
        report.num_packs, report.verified_bytes = len(files.packs), verifier.verified_bytes

    def _add_lost_rows(self, ledger: Ledger, files: PackFiles) -> int:
        """Give rows to what packs hold by their headers, and the damaged ledger has lost; return to how many.

        What was dropped, and whose bytes are still there, comes back as cache.
        """
        doubtful, snapshot = {finding.subject for finding in self._findings}, ledger.load()
        layouts, num_added = {row.namespace_id: row.layout for row in snapshot.namespaces}, 0
        for pack_id, row in snapshot.stored.packs.items():
            header, layout = files.headers.get(pack_id), layouts.get(row.namespace_id)
            if pack_id in doubtful or layout is None or not isinstance(header, PackRecord):
                continue
            if header.namespace_id == row.namespace_id:
                fitting = [chunk for chunk in header.chunks if fits(layout, chunk)]
                num_added += ledger.packs.add_chunks(row.namespace_id, fitting)
        return num_added

    # The ledger

    def _read_ledger(self) -> LedgerSnapshot | None:
        """Return what the ledger says, after mending it if that was asked for; None when it says nothing."""
        # An empty file would be a new database to SQLite.
        if not self._ledger_path.exists() or not self._ledger_path.stat().st_size:
            has_content = list_names(self._packs_dir) or list_names(self._state_dir / FOLDER_NAME)
            return self._replace_missing() if has_content else _EMPTY
        health = inspect_ledger(self._ledger_path, self._ring)
        if health.problems:
            return self._replace_damaged("; ".join(health.problems[:3]))
        self._findings += row_findings(health)
        if self._repair and (health.dangling or health.altered):
            self._fill()
            for finding in self._findings:
                is_altered = finding.code is Code.ROW_ALTERED
                finding.mend("put back where there is a copy, else dropped" if is_altered else "deleted")
        elif health.altered:
            return None  # no row of it is believed before these are dropped
        try:
            return read_ledger(self._ledger_path, self._ring)
        except LedgerError as error:
            return self._replace_damaged(str(error))

    def _replace_missing(self) -> LedgerSnapshot | None:
        what = "there are packs or copies of pins, but no ledger"
        finding = Finding(Code.LEDGER_MISSING, str(self._ledger_path), what)
        self._findings.append(finding)
        if not self._repair:
            return None
        restored = self._fill()
        finding.mend(f"made again with {restored} from their copies")
        return self._read_ledger()

    def _replace_damaged(self, problem: str) -> LedgerSnapshot | None:
        finding = Finding(Code.LEDGER_DAMAGED, str(self._ledger_path), problem)
        self._findings.append(finding)
        if not self._repair:
            return None
        salvaged = self._ledger_path.with_name(LEDGER_NAME + ".salvaged")
        salvaged.unlink(missing_ok=True)
        rows = salvage_ledger(self._ledger_path, salvaged)
        if rows:
            try:
                Ledger.open(salvaged, with_copies=False).close()  # proves that it is one, and empties its WAL
            except LedgerError as error:
                if is_not_writable(error.__cause__):
                    remove_database(salvaged)
                    raise
                rows = {}
        # Until chunks have their rows again, also if this repair is cut off.
        self._marker.touch(mode=0o600)
        aside = self._move_aside(salvaged if rows else None)
        restored = self._fill()
        saved = ", ".join(f"{number} {table}" for table, number in rows.items()) or "no rows"
        finding.mend(f"saved {saved}, and {restored} from their copies; the damaged one is {aside.name}")
        self._salvaged = finding
        return self._read_ledger()

    def _move_aside(self, successor: Path | None) -> Path:
        """Give the damaged ledger another name; never delete it."""
        aside = self._ledger_path.with_name(f"{LEDGER_NAME}.damaged-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}")
        number = 0
        while aside.exists():
            number += 1
            aside = aside.with_name(f"{aside.name}-{number}")
        for suffix in SIDE_FILES:  # first: SQLite would replay an old WAL into the successor
            side = self._ledger_path.with_name(LEDGER_NAME + suffix)
            if side.exists():
                side.rename(aside.with_name(aside.name + suffix))
        os.link(self._ledger_path, aside)
        if successor is None:
            self._ledger_path.unlink()
        else:
            for suffix in SIDE_FILES:
                successor.with_name(successor.name + suffix).unlink(missing_ok=True)
            successor.rename(self._ledger_path)
        return aside

    def _fill(self, damaged_copies: Collection[str] = ()) -> str:
        """Drop altered rows, put back what copies of namespaces and promises say, and drop what still dangles."""
        with closing(Ledger.open(self._ledger_path, ring=self._ring)) as ledger:
            ledger.promises.renew_copies(damaged_copies)
            ledger.drop_altered_rows()
            known = {row.namespace_id for row in ledger.load().namespaces}
            copies = load_namespaces(self._state_dir)
            new = [row for row in copies if row.namespace_id not in known]
            for row in new:
                ledger.put_namespace(row)
            restored = ledger.promises.restore(lambda: copies)
            ledger.drop_dangling_rows()
            ledger.catch_up()
            while ledger.promises.misses_copies:
                ledger.catch_up()
            return f"{len(new)} namespaces, {len(restored.prompts)} prompts and {restored.num_bindings} bindings"

    # The copies of promises

    def _check_promises(self, ledger: LedgerSnapshot) -> LedgerSnapshot:
        """Compare with the copies; return the ledger as it is afterwards."""
        copies = read_copies(PromiseCopies(self._state_dir / FOLDER_NAME, self._ring))
        findings = compare_promises(ledger, copies)
        self._findings += findings
        if not self._repair or all(finding.is_note for finding in findings):
            return ledger
        self._fill([copy_id for copy_id, copy in copies.items() if copy.row is None and not copy.problem])
        for finding in findings:
            if not finding.is_note and finding.code is not Code.UNREADABLE:
                is_lost = finding.code is Code.PROMISE_LOST
                finding.mend("put back from its copy" if is_lost else "the copy follows the row now")
        return self._read_ledger() or ledger


class LedgerRows:
    """`Rows` of a ledger that no one else uses.

    A pack whose rows it drops is not removed on purpose: what becomes of its file says its own header, in this repair
    or, if that is cut off, at the next start.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._packs = ledger, ledger.packs

    def places(self, namespace_id: str, keys: Collection[ChunkKey]) -> Mapping[ChunkKey, StoredChunk]:
        """See `Rows`."""
        return self._packs.find_chunks(namespace_id, keys)

    def drop_chunks(self, record: PackRecord, chunks: Sequence[StoredChunk]) -> None:
        """See `Rows`."""
        rows = self._packs.find_chunks(record.namespace_id, [chunk.key for chunk in chunks])
        here = [key for key, row in rows.items() if row.pack_id == record.pack_id]
        with self._ledger.together():
            self._packs.drop_chunks(record.namespace_id, here)
            if not record.chunks:
                self._packs.drop_pack(record.pack_id)
            self._packs.forget_removed([record.pack_id])

    def commit(self, record: PackRecord, *, instead_of: str | None) -> int:
        """See `Rows`. No one else changes anything."""
        with self._ledger.together():
            self._packs.commit_pack(record)
            self._packs.forget_removed([instead_of] if instead_of is not None else [])
        return len(record.chunks)


def _arena_files(arena_dir: Path | None) -> list[Finding]:
    names = [name for name in list_names(arena_dir) if name.startswith(ARENA_PREFIX)] if arena_dir else []
    if not names:
        return []
    what = f"{len(names)} arenas of a daemon that is not running; the next start deals with them"
    return [Finding(Code.NOTE_ARENA_FILE, str(arena_dir), what)]
