"""What ledger, packs and copies say about each other: plain values in, findings out, so every case is a unit test."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.packs.only_copies import only_copies
from kvtier.disk.packs.pack_directory import PACK_SUFFIX, SET_ASIDE_SUFFIX, TEMP_SUFFIX
from kvtier.ledger import LedgerSnapshot, PromptRow
from kvtier.ledger.checks import LedgerHealth
from kvtier.ledger.promise_copies import Promise, binding_id, prompt_id
from kvtier.maintenance.findings import Code, Finding
from kvtier.printable import printable

PACK_FILE = re.compile(rf"([0-9a-f]{{32}}){re.escape(PACK_SUFFIX)}")
TEMP_FILE = re.compile(rf"[0-9a-f]{{32}}{re.escape(TEMP_SUFFIX)}")
SET_ASIDE = re.compile(rf"[0-9a-f]{{32}}{re.escape(SET_ASIDE_SUFFIX)}|quarantine")

_PLACE = ("offset", "stored_bytes", "raw_bytes", "codec", "checksum")


@dataclass(frozen=True, kw_only=True)
class PackFiles:
    """What the pack directory holds.

    Attributes:
        sizes: Length by name, of every entry; 0 for what is no regular file.
        headers: Of packs, by pack id: what the header states, or in words why it states nothing.
        damaged: By pack id: chunks (by row) whose bytes are not what was written; only after a deep check.
        unclaimed: Names in the folder of packs that wait for a namespace, outside of the pack directory.
    """

    sizes: Mapping[str, int]
    headers: Mapping[str, PackRecord | str] = field(default_factory=dict)
    damaged: Mapping[str, Collection[ChunkKey]] = field(default_factory=dict)
    unclaimed: Collection[str] = ()

    @property
    def packs(self) -> dict[str, int]:
        """Length by pack id."""
        found = ((PACK_FILE.fullmatch(name), size) for name, size in self.sizes.items())
        return {match[1]: size for match, size in found if match}


def compare(ledger: LedgerSnapshot, files: PackFiles) -> list[Finding]:
    """Return every disagreement of ledger and packs, and notes on what is in order but worth knowing."""
    packs = files.packs
    namespaces = {row.namespace_id for row in ledger.namespaces}
    findings: list[Finding] = []
    for pack_id, record in sorted(ledger.packs.items()):
        num_chunks = len(record.chunks)
        if record.namespace_id not in namespaces:
            what = f"the ledger has the pack, but not its namespace {record.namespace_id}"
            findings.append(Finding(Code.PACK_NAMESPACE_UNKNOWN, pack_id, what, num_chunks))
        if not record.chunks:
            findings.append(Finding(Code.PACK_EMPTY, pack_id, "the ledger has the pack, but no chunk of it"))
        if pack_id not in packs:
            what = "the ledger has the pack, its file is gone: its chunks are stored again when next computed"
            findings.append(Finding(Code.PACK_MISSING, pack_id, what, num_chunks))
        else:
            findings += _compare_pack(record, packs[pack_id], files)
    stated = {pack_id: header for pack_id, header in files.headers.items() if isinstance(header, PackRecord)}
    removed = set(ledger.removed_packs) - only_copies(ledger.packs, ledger.removed_packs, packs, stated.get)
    for pack_id in sorted(packs.keys() - ledger.packs.keys()):
        if pack_id in removed:
            what = "its chunks were dropped on purpose, the file was not removed yet; the next start removes it"
            findings.append(Finding(Code.NOTE_PACK_REMOVED, pack_id, what))
        else:
            findings.append(_orphan(pack_id, files.headers.get(pack_id)))
    findings += _other_files(files)
    findings += _incomplete_prompts(ledger)
    return findings


def _compare_pack(record: PackRecord, file_bytes: int, files: PackFiles) -> Iterator[Finding]:
    pack_id, header, num_chunks = record.pack_id, files.headers.get(record.pack_id), len(record.chunks)
    if file_bytes != record.file_bytes:
        what = f"the file has {file_bytes} bytes, the ledger says {record.file_bytes}"
        yield Finding(Code.PACK_LENGTH, pack_id, what)
    if num_beyond := sum(chunk.offset + chunk.stored_bytes > file_bytes for chunk in record.chunks):
        what = f"{num_beyond} chunks lie beyond the end of the file"
        yield Finding(Code.CHUNK_BEYOND_END, pack_id, what, num_beyond)
    if isinstance(header, str):
        yield Finding(Code.HEADER_UNREADABLE, pack_id, header, num_chunks)
    elif header is not None:
        yield from _compare_header(record, header)
    if damaged := files.damaged.get(pack_id):
        what = f"{len(damaged)} of {num_chunks} chunks are not what was written"
        yield Finding(Code.CHUNK_DAMAGED, pack_id, what, len(damaged))


def _compare_header(record: PackRecord, header: PackRecord) -> Iterator[Finding]:
    if header.namespace_id != record.namespace_id:
        what = f"the header says namespace {header.namespace_id}, the ledger {record.namespace_id}"
        yield Finding(Code.HEADER_NAMESPACE, record.pack_id, what, len(record.chunks))
    stated = {chunk.key: chunk for chunk in header.chunks}
    # More in the header than in the ledger is in order: a newer pack has taken such a chunk over, or it was dropped.
    differing = [fields for chunk in record.chunks if (fields := _differing_fields(chunk, stated.get(chunk.key)))]
    if differing:
        fields = sorted({name for names in differing for name in names})
        what = f"header and ledger disagree about {len(differing)} chunks in {', '.join(fields)}"
        yield Finding(Code.HEADER_DIFFERS, record.pack_id, what, len(differing))


def _differing_fields(row: StoredChunk, header: StoredChunk | None) -> list[str]:
    if header is None:
        return ["presence"]
    return [name for name in _PLACE if getattr(row, name) != getattr(header, name)]


def _orphan(pack_id: str, header: PackRecord | str | None) -> Finding:
    if isinstance(header, PackRecord):
        what = f"a pack of {len(header.chunks)} chunks that the ledger does not know"
        return Finding(Code.PACK_ORPHAN, pack_id, what, len(header.chunks))
    return Finding(Code.PACK_ORPHAN, pack_id, f"the ledger does not know the file ({header or 'not read'})")


def _other_files(files: PackFiles) -> Iterator[Finding]:
    for name in sorted(files.sizes):
        if TEMP_FILE.fullmatch(name):
            yield Finding(Code.TEMPORARY_FILE, name, "left by a write that did not finish")
        elif SET_ASIDE.fullmatch(name):
            what = "set aside as damaged; kvtier does not read it any longer, delete it when you have looked at it"
            yield Finding(Code.NOTE_SET_ASIDE, name, what)
        elif not PACK_FILE.fullmatch(name):
            yield _unknown(name)
    for name in sorted(files.unclaimed):
        if not PACK_FILE.fullmatch(name):
            yield _unknown(name)
            continue
        what = "a pack of a namespace that the ledger does not know; `kvtier fsck --repair` takes it in when it does"
        yield Finding(Code.NOTE_UNCLAIMED, name, what)


def _unknown(name: str) -> Finding:
    # A name that is no UTF-8 would not travel to the CLI.
    return Finding(Code.NOTE_UNKNOWN_FILE, printable(name), "not a file of kvtier; left alone")


def _incomplete_prompts(ledger: LedgerSnapshot) -> Iterator[Finding]:
    held = {(record.namespace_id, chunk.key) for record in ledger.packs.values() for chunk in record.chunks}
    pinned = {prompt.pin_id: prompt.name for prompt in ledger.prompts if prompt.pinned}
    for binding in ledger.bindings:
        num_missing = sum((binding.namespace_id, key) not in held for key in binding.keys)
        if num_missing and binding.pin_id in pinned:
            what = f"{num_missing} of {len(binding.keys)} chunks are not on disk; they are stored when next computed"
            yield Finding(Code.NOTE_PROMPT_INCOMPLETE, pinned[binding.pin_id], what, num_missing)


def row_findings(health: LedgerHealth) -> list[Finding]:
    """Return what SQLite's checks and the rows' checksums say of single rows."""
    findings = [
        Finding(Code.ROW_DANGLING, table, f"{num_rows} rows refer to rows that are not there")
        for table, num_rows in health.dangling.items()
    ]
    for table, names in health.altered.items():
        what = f"not what was written, the storage changed them: {', '.join(names)}"
        findings.append(Finding(Code.ROW_ALTERED, table, what))
    return findings


@dataclass(frozen=True)
class Copy:
    """One copy of a promise: its revision, and the row that it holds, None if it is not what was written.

    `problem`: Why nothing is known of it: the operating system refuses, or a newer kvtier wrote it. Empty: it is read.
    """

    revision: int
    row: Promise | None
    problem: str = ""


def compare_promises(ledger: LedgerSnapshot, copies: Mapping[str, Copy]) -> list[Finding]:
    """Return every disagreement of prompts and bindings with their copies.

    A finding's `subject` names the prompt, or else the copy's id.
    """
    rows = _rows_of(ledger)
    pins = {
        row.pin_id for row in (*ledger.prompts, *(copy.row for copy in copies.values())) if isinstance(row, PromptRow)
    }
    namespaces = {row.namespace_id for row in ledger.namespaces}
    findings = []
    for copy_id, copy in sorted(copies.items()):
        subject, revision = rows.get(copy_id, ("", -1))
        if copy.problem:
            findings.append(Finding(Code.UNREADABLE, copy_id, copy.problem))
        elif copy.row is None:
            of = f", of {subject}" if subject else ""
            findings.append(Finding(Code.COPY_DAMAGED, copy_id, f"the copy is not what was written{of}"))
        elif copy.revision > revision and copy.row.pin_id in pins:
            findings.append(_lost(copy_id, copy.row, namespaces, has_row=bool(subject)))
    for copy_id, (subject, revision) in sorted(rows.items()):
        copied = copies.get(copy_id)
        if copied is None or copied.revision < revision:
            what = ("it has no copy" if copied is None else "its copy is older") + "; the daemon writes it"
            findings.append(Finding(Code.NOTE_COPY_MISSING, subject, what))
    return findings


def _rows_of(ledger: LedgerSnapshot) -> dict[str, tuple[str, int]]:
    """Return what names each promise for people, and its revision, by the id of its copy."""
    names = {prompt.pin_id: prompt.name for prompt in ledger.prompts}
    rows = {prompt_id(prompt.name): (prompt.name, prompt.revision) for prompt in ledger.prompts}
    for binding in ledger.bindings:
        subject = f"binding of {names.get(binding.pin_id, binding.pin_id)}"
        rows[binding_id(binding.pin_id, binding.namespace_id)] = (subject, binding.revision)
    return rows


def _lost(copy_id: str, row: Promise, namespaces: Collection[str], *, has_row: bool) -> Finding:
    what = ("the ledger has an older row" if has_row else "the ledger has no row of it") + ", its copy is whole"
    if isinstance(row, PromptRow):
        return Finding(Code.PROMISE_LOST, row.name, what)
    if row.namespace_id in namespaces:
        return Finding(Code.PROMISE_LOST, f"binding {copy_id}", what)
    what = f"a binding in namespace {row.namespace_id}, which the ledger does not know; it waits for its engine"
    return Finding(Code.NOTE_UNCLAIMED, copy_id, what)
