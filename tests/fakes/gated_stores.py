"""The real pack tier and the real ledger, whose calls can be held at certain steps, or refused."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.base import ChunkPayload, ChunkRead, ReadDone
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import LedgerError, TierIOError
from kvtier.ledger import Ledger
from tests.fakes.waiting import wait_for

R = TypeVar("R")
STEPS = ("write", "written", "read", "rewrite", "rewritten", "delete", "commit", "committed", "drop", "dropped")
"""Before and after the calls: a pack is written, read, rewritten, deleted; the ledger commits a pack, drops chunks."""


@dataclass
class Faults:
    """What is held and refused, shared by one daemon's tier and ledger.

    Attributes:
        held: Steps at which calls wait.
        refused: With which OSError number calls fail, by kind: `read` and `write` of packs, `ledger`: its changes.
    """

    held: set[str] = field(default_factory=set)
    refused: dict[str, int] = field(default_factory=dict)
    _num_running: int = 0
    _num_waiting: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def is_calm(self) -> bool:
        """Nothing is held, nothing is refused."""
        return not (self.held or self.refused)

    def let_pass(self, step: str) -> None:
        """Hold nothing at this step any longer."""
        with self._changed:
            self.held.discard(step)
            self._changed.notify_all()

    def end(self) -> None:
        """Hold and refuse nothing any longer."""
        with self._changed:
            self.held.clear()
            self.refused.clear()
            self._changed.notify_all()

    def freeze(self) -> None:
        """Return when every call that runs waits at a step; none begins while the loop stands still."""
        wait_for(lambda: self._num_running == self._num_waiting)

    def of_tier(self, kind: str, before: str, call: Callable[[], R], after: str = "") -> R:
        """Worker thread: make a call of the tier between its steps, or refuse it."""
        return self._between(before, lambda: self._refused_or(kind, call), after)

    def of_ledger(self, call: Callable[[], R], before: str = "", after: str = "") -> R:
        """Worker thread: make a change of the ledger between its steps, or refuse it."""

        def change() -> R:
            if error := self.refusal("ledger"):
                raise LedgerError(str(error))
            return call()

        return self._between(before, change, after)

    def _between(self, before: str, call: Callable[[], R], after: str) -> R:
        with self._changed:
            self._num_running += 1
        try:
            self._wait_at(before)
            result = call()
            self._wait_at(after)
            return result
        finally:
            with self._changed:
                self._num_running -= 1

    def _wait_at(self, step: str) -> None:
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: step not in self.held)
            self._num_waiting -= 1

    def _refused_or(self, kind: str, call: Callable[[], R]) -> R:
        if error := self.refusal(kind):
            raise error
        return call()

    def refusal(self, kind: str) -> TierIOError | None:
        """Return with what a call of this kind fails now."""
        if not (number := self.refused.get(kind)):
            return None
        cause = OSError(number, os.strerror(number))
        error = TierIOError(Path(kind), kind, cause)
        error.__cause__ = cause
        return error


class GatedTier(PackTier):
    """A PackTier under `Faults`."""

    def __init__(self, directory: Path, *, faults: Faults, **options: Any) -> None:
        super().__init__(directory, **options)
        self._faults = faults

    def write_pack(self, namespace_id: str, chunks: Sequence[ChunkPayload], *, compressed: bool = True) -> PackRecord:
        """See `DiskTier`."""
        write = super().write_pack
        return self._faults.of_tier(
            "write", "write", lambda: write(namespace_id, chunks, compressed=compressed), "written"
        )

    def rewrite_pack(self, namespace_id: str, chunks: Sequence[StoredChunk]) -> PackRecord:
        """See `DiskTier`."""
        rewrite = super().rewrite_pack
        return self._faults.of_tier("write", "rewrite", lambda: rewrite(namespace_id, chunks), "rewritten")

    def write_stored(
        self, namespace_id: str, chunks: Sequence[StoredChunk], read: Callable[[StoredChunk], bytes]
    ) -> PackRecord:
        """See `DiskTier`."""
        write = super().write_stored
        return self._faults.of_tier("write", "write", lambda: write(namespace_id, chunks, read), "written")

    def read_chunks(self, reads: Sequence[ChunkRead], done: ReadDone, cancelled: Callable[[], bool]) -> None:
        """See `DiskTier`."""
        read_chunks = super().read_chunks

        def read() -> None:
            if (error := self._faults.refusal("read")) is None:
                read_chunks(reads, done, cancelled)
                return
            for each in reads:
                if not cancelled():
                    done(each, error)

        self._faults.of_tier("", "read", read)

    def delete_pack(self, pack_id: str) -> bool:
        """See `DiskTier`."""
        delete = super().delete_pack
        return self._faults.of_tier("write", "delete", lambda: delete(pack_id))

    def set_aside_pack(self, pack_id: str) -> bool:
        """See `DiskTier`."""
        quarantine = super().set_aside_pack
        return self._faults.of_tier("write", "delete", lambda: quarantine(pack_id))

    def probe(self) -> None:
        """See `DiskTier`."""
        probe = super().probe
        self._faults.of_tier("read", "", lambda: self._faults.of_tier("write", "", probe))


class GatedLedger(Ledger):
    """A Ledger under `Faults`."""

    faults: Faults

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for rows, name, steps in (
            (self, "delete_namespace", ()),
            (self.promises, "change_prompts", ()),
            (self.promises, "put_binding", ()),
            (self.packs, "commit_pack", ("commit", "committed")),
            (self.packs, "move_chunks", ("commit", "committed")),
            (self.packs, "drop_chunks", ("drop", "dropped")),
        ):
            setattr(rows, name, self._gated(getattr(rows, name), *steps))

    @classmethod
    def under(cls, faults: Faults) -> "type[GatedLedger]":
        """Return a class whose ledgers are under these faults."""
        return type("GatedLedger", (cls,), {"faults": faults})

    def _gated(self, change: Callable[..., R], *steps: str) -> Callable[..., R]:
        return lambda *args, **named: self.faults.of_ledger(lambda: change(*args, **named), *steps)
