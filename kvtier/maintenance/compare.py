"""Ledger against packs, both ways: plain values in, findings out. No I/O, so that every case is a unit test."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.ledger import LedgerSnapshot
from kvtier.maintenance.findings import Code, Finding
from kvtier.printable import printable

PACK_SUFFIX = ".kvpack"
PACK_FILE = re.compile(r"([0-9a-f]{32})\.kvpack")
TEMP_FILE = re.compile(r"[0-9a-f]{32}\.kvpack\.tmp")
QUARANTINED = re.compile(r"[0-9a-f]{32}\.kvpack-damaged|quarantine")

_PLACE = ("offset", "stored_bytes", "raw_bytes", "codec", "checksum")


@dataclass(frozen=True, kw_only=True)
class PackFiles:
    """What the pack directory holds.

    Attributes:
        sizes: Length by name, of every entry; 0 for what is no regular file.
        headers: Of packs, by pack id: what the header states, or in words why it states nothing.
        damaged: By pack id: chunks (by row) whose bytes are not what was written; only after a deep check.
        unclaimed: Names of packs that wait for a namespace, outside of the pack directory.
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
    """Return every disagreement, and notes on what is in order but worth knowing."""
    packs = files.packs
    namespaces = {row.namespace_id for row in ledger.namespaces}
    findings: list[Finding] = []
    for pack_id, record in sorted(ledger.packs.items()):
        if record.namespace_id not in namespaces:
            findings.append(_unknown_namespace(record))
        if not record.chunks:
            findings.append(
                Finding(code=Code.PACK_EMPTY, subject=pack_id, detail="the ledger has the pack, but no chunk of it")
            )
        if pack_id not in packs:
            what = "the ledger has the pack, its file is gone: its chunks are stored again when next computed"
            findings.append(
                Finding(code=Code.PACK_MISSING, subject=pack_id, detail=what, num_chunks=len(record.chunks))
            )
        else:
            findings += _compare_pack(record, packs[pack_id], files)
    findings += [_orphan(pack_id, files) for pack_id in sorted(packs.keys() - ledger.packs.keys())]
    findings += _other_files(files)
    findings += _incomplete_prompts(ledger)
    return findings


def _compare_pack(record: PackRecord, file_bytes: int, files: PackFiles) -> Iterator[Finding]:
    pack_id, header = record.pack_id, files.headers.get(record.pack_id)
    if file_bytes != record.file_bytes:
        what = f"the file has {file_bytes} bytes, the ledger says {record.file_bytes}"
        yield Finding(code=Code.PACK_LENGTH, subject=pack_id, detail=what)
    beyond = [chunk for chunk in record.chunks if chunk.offset + chunk.stored_bytes > file_bytes]
    if beyond:
        what = f"{len(beyond)} chunks lie beyond the end of the file"
        yield Finding(code=Code.CHUNK_BEYOND_END, subject=pack_id, detail=what, num_chunks=len(beyond))
    if isinstance(header, str):
        yield Finding(code=Code.HEADER_UNREADABLE, subject=pack_id, detail=header, num_chunks=len(record.chunks))
    elif header is not None:
        yield from _compare_header(record, header)
    if damaged := files.damaged.get(pack_id):
        what = f"{len(damaged)} of {len(record.chunks)} chunks are not what was written"
        yield Finding(code=Code.CHUNK_DAMAGED, subject=pack_id, detail=what, num_chunks=len(damaged))


def _compare_header(record: PackRecord, header: PackRecord) -> Iterator[Finding]:
    if header.namespace_id != record.namespace_id:
        what = f"the header says namespace {header.namespace_id}, the ledger {record.namespace_id}"
        yield Finding(code=Code.HEADER_NAMESPACE, subject=record.pack_id, detail=what, num_chunks=len(record.chunks))
    stated = {chunk.key: chunk for chunk in header.chunks}
    # More in the header than in the ledger is in order: a newer pack has taken such a chunk over, or it was dropped.
    differing = [chunk for chunk in record.chunks if _differing_fields(chunk, stated.get(chunk.key))]
    if differing:
        fields = sorted({name for chunk in differing for name in _differing_fields(chunk, stated.get(chunk.key))})
        what = f"header and ledger disagree about {len(differing)} chunks in {', '.join(fields)}"
        yield Finding(code=Code.HEADER_DIFFERS, subject=record.pack_id, detail=what, num_chunks=len(differing))


def _differing_fields(row: StoredChunk, header: StoredChunk | None) -> list[str]:
    if header is None:
        return ["presence"]
    return [name for name in _PLACE if getattr(row, name) != getattr(header, name)]


def _unknown_namespace(record: PackRecord) -> Finding:
    what = f"the ledger has the pack, but not its namespace {record.namespace_id}"
    return Finding(code=Code.PACK_NAMESPACE_UNKNOWN, subject=record.pack_id, detail=what, num_chunks=len(record.chunks))


def _orphan(pack_id: str, files: PackFiles) -> Finding:
    header = files.headers.get(pack_id)
    if isinstance(header, PackRecord):
        what = f"a pack of {len(header.chunks)} chunks that the ledger does not know"
        return Finding(code=Code.PACK_ORPHAN, subject=pack_id, detail=what, num_chunks=len(header.chunks))
    return Finding(
        code=Code.PACK_ORPHAN, subject=pack_id, detail=f"the ledger does not know the file ({header or 'not read'})"
    )


def _other_files(files: PackFiles) -> Iterator[Finding]:
    for name in sorted(files.sizes):
        if TEMP_FILE.fullmatch(name):
            yield Finding(code=Code.TEMPORARY_FILE, subject=name, detail="left by a write that did not finish")
        elif QUARANTINED.fullmatch(name):
            what = "set aside as damaged; kvtier does not read it any longer, delete it when you have looked at it"
            yield Finding(code=Code.NOTE_QUARANTINED, subject=name, detail=what)
        elif not PACK_FILE.fullmatch(name):
            # A name that is no UTF-8 would not travel to the CLI.
            yield Finding(
                code=Code.NOTE_UNKNOWN_FILE, subject=printable(name), detail="not a file of kvtier; left alone"
            )
    for name in sorted(files.unclaimed):
        what = "a pack of a namespace that the ledger does not know; `kvtier fsck --repair` takes it in when it does"
        yield Finding(code=Code.NOTE_UNCLAIMED, subject=name, detail=what)


def _incomplete_prompts(ledger: LedgerSnapshot) -> Iterator[Finding]:
    held = {(record.namespace_id, chunk.key) for record in ledger.packs.values() for chunk in record.chunks}
    pinned = {prompt.pin_id: prompt.name for prompt in ledger.prompts if prompt.pinned}
    for binding in ledger.bindings:
        num_missing = sum((binding.namespace_id, key) not in held for key in binding.keys)
        if num_missing and binding.pin_id in pinned:
            what = f"{num_missing} of {len(binding.keys)} chunks are not on disk; they are stored when next computed"
            yield Finding(
                code=Code.NOTE_PROMPT_INCOMPLETE, subject=pinned[binding.pin_id], detail=what, num_chunks=num_missing
            )


def both(earlier: LedgerSnapshot, later: LedgerSnapshot) -> LedgerSnapshot:
    """Return what two snapshots agree on: what came or went while the packs were looked at is left out."""
    packs: dict[str, PackRecord] = {}
    for pack_id, record in earlier.packs.items():
        if pack_id in later.packs:
            stayed = {chunk.key for chunk in later.packs[pack_id].chunks}
            chunks = tuple(chunk for chunk in record.chunks if chunk.key in stayed)
            if chunks or not record.chunks:
                packs[pack_id] = replace(record, chunks=chunks)
    return replace(later, packs=packs)
