"""What fsck can find, and how it reports it. docs/format.md lists the codes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

NOTE_PREFIX = "note-"
"""Codes that begin like this are said for people: nothing is wrong, nothing needs repair."""


class Code(StrEnum):
    """One kind of finding; the value is what scripts see."""

    LEDGER_MISSING = "ledger-missing"
    LEDGER_DAMAGED = "ledger-damaged"
    ROW_DANGLING = "row-dangling"
    ROW_ALTERED = "row-altered"
    PROMISE_LOST = "promise-lost"
    COPY_DAMAGED = "copy-damaged"
    PACK_MISSING = "pack-missing"
    PACK_EMPTY = "pack-empty"
    PACK_LENGTH = "pack-length"
    PACK_NAMESPACE_UNKNOWN = "pack-namespace-unknown"
    PACK_ORPHAN = "pack-orphan"
    CHUNK_BEYOND_END = "chunk-beyond-end"
    CHUNK_DAMAGED = "chunk-damaged"
    HEADER_UNREADABLE = "header-unreadable"
    HEADER_DIFFERS = "header-differs"
    HEADER_NAMESPACE = "header-namespace"
    TEMPORARY_FILE = "temporary-file"
    UNREADABLE = "unreadable"
    USAGE_DIFFERS = "usage-differs"
    MEMORY_DIFFERS = "memory-differs"
    NOTE_SET_ASIDE = "note-set-aside"
    NOTE_UNKNOWN_FILE = "note-unknown-file"
    NOTE_UNCLAIMED = "note-unclaimed"
    NOTE_PACK_REMOVED = "note-pack-removed"
    NOTE_PROMPT_INCOMPLETE = "note-prompt-incomplete"
    NOTE_ARENA_FILE = "note-arena-file"
    NOTE_COPY_MISSING = "note-copy-missing"


@dataclass
class Finding:
    """One finding; a repair adds to `detail` what it did and sets `repaired`.

    Attributes:
        code: What is wrong.
        subject: Where: a pack id, a file's name, a prompt's name, a table.
        detail: For people.
        num_chunks: Chunks concerned.
        repaired: It is put right now.
    """

    code: Code
    subject: str
    detail: str
    num_chunks: int = 0
    repaired: bool = False

    @property
    def is_note(self) -> bool:
        """Nothing is wrong."""
        return self.code.startswith(NOTE_PREFIX)

    def mend(self, done: str) -> None:
        """Say that it was repaired, and how."""
        self.repaired = True
        self.detail += f"; {done}"


@dataclass(kw_only=True)
class Report:
    """What a check found.

    Attributes:
        findings: In the order of subjects.
        num_packs: Packs compared.
        num_chunks: Chunk rows compared.
        verified_bytes: Payload bytes whose checksums were compared.
        num_arena_slots: Arena slots compared with the chunk tables (online).
    """

    findings: list[Finding] = field(default_factory=list)
    num_packs: int = 0
    num_chunks: int = 0
    verified_bytes: int = 0
    num_arena_slots: int = 0

    @property
    def remaining(self) -> Sequence[Finding]:
        """Findings that are neither repaired nor mere notes."""
        return [finding for finding in self.findings if not finding.repaired and not finding.is_note]
