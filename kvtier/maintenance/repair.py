"""Making ledger and packs agree. Blocks; works the same with a daemon and without one, through `Rows`.

The rules of the disk tier hold here too: a file is durable before its row, a row goes before its file. A crash between
any two steps leaves something that the next check finds. Nothing that reads right is deleted: a file is unlinked only
if each of its good chunks reads right elsewhere. Every other file is kept, under its name or as a damaged pack.
"""

import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.packs.pack_directory import PACK_SUFFIX, UNCLAIMED_FOLDER
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, KvtierError, TierIOError
from kvtier.fsync import fsync_directory
from kvtier.ledger import LedgerSnapshot
from kvtier.maintenance.findings import Code, Finding
from kvtier.maintenance.observe import Verifier

_DOUBTFUL_ROWS = {
    *(Code.PACK_LENGTH, Code.CHUNK_BEYOND_END, Code.CHUNK_DAMAGED, Code.PACK_MISSING, Code.PACK_EMPTY),
    *(Code.HEADER_UNREADABLE, Code.HEADER_DIFFERS, Code.HEADER_NAMESPACE),
}


def fits(layout: KVLayout, chunk: StoredChunk) -> bool:
    """Return whether a chunk has a group of a layout, and its length."""
    group_idx = group_idx_of(chunk.key)
    return group_idx in layout.group_indexes() and layout.payload_bytes(group_idx) == chunk.raw_bytes


class Rows(Protocol):
    """What a repair changes besides files; with a daemon, its memory follows."""

    def places(self, namespace_id: str, keys: Collection[ChunkKey]) -> Mapping[ChunkKey, StoredChunk]:
        """Return where those of the keys lie that have a row."""

    def drop_chunks(self, record: PackRecord, chunks: Sequence[StoredChunk]) -> None:
        """Forget rows of a pack, as far as they still lie there, and the pack's own row with the last of them."""

    def commit(self, record: PackRecord, *, instead_of: str | None) -> int:
        """Record a durable pack and those of its chunks that still lie where they did; return how many.

        What was dropped, or stored again, since they were looked at stays as it is. Without any the pack gets no row.

        Args:
            record: The pack.
            instead_of: The pack in which its chunks had their rows; None: they had none.
        """


class Repairer:
    """Repairs findings of one comparison; `ledger` is what was compared."""

    def __init__(self, tier: PackTier, rows: Rows, verifier: Verifier, ledger: LedgerSnapshot) -> None:
        self._tier, self._rows, self._verifier = tier, rows, verifier
        self._packs, self._layouts = ledger.packs, {row.namespace_id: row.layout for row in ledger.namespaces}

    def repair(self, findings: Sequence[Finding]) -> None:
        """Repair what can be repaired, and say so in the findings."""
        by_pack: dict[str, list[Finding]] = {}
        for finding in findings:
            if finding.code is Code.TEMPORARY_FILE:
                self._guard([finding], partial(self._remove, finding.subject))
            elif finding.code is Code.NOTE_PACK_REMOVED:
                self._guard([finding], partial(self._remove, finding.subject + PACK_SUFFIX))
            elif finding.code in _DOUBTFUL_ROWS:
                by_pack.setdefault(finding.subject, []).append(finding)
        # Rows first: what a bad row claims is free then for a good copy, maybe in the file of another.
        without_rows = [
            pack_id
            for pack_id, of_pack in by_pack.items()
            if self._guard(of_pack, partial(self._keep_what_reads, self._packs[pack_id]))
        ]
        for pack_id in without_rows:  # a file into which rows still point stays
            self._guard(by_pack[pack_id], partial(self._take_in, pack_id))
        for finding in findings:
            if finding.code is Code.PACK_ORPHAN:
                self._guard([finding], partial(self._take_in, finding.subject))
            elif finding.code is Code.NOTE_UNCLAIMED and finding.subject.endswith(PACK_SUFFIX):
                self._guard([finding], partial(self._claim, finding.subject))

    def _guard(self, findings: Sequence[Finding], step: Callable[[], str]) -> bool:
        """Take one step of a repair, which returns what it did, empty for nothing; say whether it was taken."""
        try:
            done = step()
        except (KvtierError, OSError) as error:
            for finding in findings:
                finding.repaired = False
                finding.detail += f"; not repaired: {error}"
            return False
        for finding in findings:
            if done and not finding.detail.endswith(done):
                finding.mend(done)
        return True

    def _remove(self, name: str) -> str:
        (self._tier.directory / name).unlink(missing_ok=True)
        return "removed"

    # Packs whose rows are in doubt

    def _keep_what_reads(self, record: PackRecord) -> str:
        """Rewrite what reads right by its row, forget the rest. Afterwards no row points into the file."""
        good = self._verifier.good(record.chunks)
        self._check_readable(record.pack_id)
        if good:
            copy = self._tier.rewrite_pack(record.namespace_id, good)
            if not self._rows.commit(copy, instead_of=record.pack_id):
                self._tier.delete_pack(copy.pack_id)
        kept = {chunk.key for chunk in good}
        lost = [chunk for chunk in record.chunks if chunk.key not in kept]
        self._rows.drop_chunks(record, lost)
        return f"{len(good)} chunks of it read right and are kept, {len(lost)} are stored again when next computed"

    def _take_in(self, pack_id: str) -> str:
        """Adopt what a file without rows holds by its own header; then the file is unlinked, or set aside."""
        path = self._tier.directory / (pack_id + PACK_SUFFIX)
        if not path.exists():
            return ""
        try:
            header = self._tier.read_record(pack_id)
        except ChunkDamagedError:
            self._tier.set_aside_pack(pack_id)
            return "its header cannot be read: the file is set aside (renamed, and not read again)"
        if header.namespace_id not in self._layouts:
            self._tier.move_unclaimed(pack_id)
            return f"moved to {UNCLAIMED_FOLDER}/: its namespace {header.namespace_id} is not known (yet)"
        num_adopted, num_bad = self._adopt(path, header)
        adopted = f"{num_adopted} chunks verified and adopted"
        if num_bad:
            self._tier.set_aside_pack(pack_id)
            return f"{adopted}; the file is set aside (renamed, and not read again)"
        self._tier.delete_pack(pack_id)
        return adopted if num_adopted else "removed: every chunk of it is held elsewhere"

    def _claim(self, name: str) -> str:
        """Take in a pack of the unclaimed folder if its namespace is known by now."""
        tier, pack_id = self._tier.beside(UNCLAIMED_FOLDER), name.removesuffix(PACK_SUFFIX)
        header = tier.read_record(pack_id)
        if header.namespace_id not in self._layouts:
            return ""
        num_adopted, num_bad = self._adopt(tier.directory / name, header)
        if num_bad:
            return f"{num_adopted} chunks adopted; {num_bad} damaged, the file stays where it is"
        tier.delete_pack(pack_id)
        return f"{num_adopted} chunks verified and adopted"

    def _adopt(self, path: Path, header: PackRecord) -> tuple[int, int]:
        """Give rows to a file's good chunks that have none; return how many, and how many were damaged.

        The file gets another name, and thus pack id, before it gets rows: who is deleting the old name this moment
        cannot take it away from under them.

        Raises:
            ChunkDamagedError: A chunk has a row that points to other bytes: this copy may be the last one.
        """
        held = self._rows.places(header.namespace_id, [chunk.key for chunk in header.chunks])
        self._check_right(held.values())
        wanted = [chunk for chunk in header.chunks if chunk.key not in held]
        if not wanted:
            return 0, 0
        if header.sealed_by:
            return self._adopt_sealed(path, header, wanted)
        pack_id = uuid.uuid4().hex
        target = self._tier.directory / (pack_id + PACK_SUFFIX)
        renamed = [chunk._replace(pack_id=pack_id) for chunk in wanted if self._fits(header.namespace_id, chunk)]
        num_recorded = 0
        try:
            os.link(path, target)
            fsync_directory(self._tier.directory)
            good = self._verifier.good(renamed)
            self._check_readable(pack_id)
            if good:
                record = replace(header, pack_id=pack_id, chunks=tuple(good))
                num_recorded = self._rows.commit(record, instead_of=None)
        except (KvtierError, OSError):  # else, who knows whether it has rows: a stop leaves it to the next start
            target.unlink(missing_ok=True)
            raise
        if not num_recorded:
            target.unlink(missing_ok=True)
        return len(good), len(wanted) - len(good)

    def _adopt_sealed(self, path: Path, header: PackRecord, wanted: Sequence[StoredChunk]) -> tuple[int, int]:
        """Do the same by a copy: a sealed chunk opens only in the pack, under the id, for which it was sealed."""
        source = self._tier.directory / path.name
        if source != path:
            os.link(path, source)
        try:
            good = self._verifier.good([chunk for chunk in wanted if self._fits(header.namespace_id, chunk)])
            self._check_readable(header.pack_id)
            if good:
                copy = self._tier.rewrite_pack(header.namespace_id, good)
                if not self._rows.commit(copy, instead_of=None):
                    self._tier.delete_pack(copy.pack_id)
        finally:
            if source != path:
                source.unlink(missing_ok=True)
        return len(good), len(wanted) - len(good)

    def _check_right(self, places: Collection[StoredChunk]) -> None:
        """Read what rows point to: a row alone is no reason to let another copy go."""
        right = {place.key for place in self._verifier.good(places)}
        for place in places:
            self._check_readable(place.pack_id)
            if place.key not in right:
                path = self._tier.directory / (place.pack_id + PACK_SUFFIX)
                what = f"chunk {place.key.hex()} is damaged there; run `kvtier fsck --deep --repair` to take this one"
                raise ChunkDamagedError(path, what, place.key)

    def _fits(self, namespace_id: str, chunk: StoredChunk) -> bool:
        return fits(self._layouts[namespace_id], chunk)

    def _check_readable(self, pack_id: str) -> None:
        """A device that refuses says nothing about the bytes: no verdict then."""
        if pack_id in self._verifier.unreadable:
            path = self._tier.directory / (pack_id + PACK_SUFFIX)
            raise TierIOError(path, "verify", OSError(0, self._verifier.unreadable.pop(pack_id)))
