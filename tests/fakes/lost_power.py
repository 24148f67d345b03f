"""A model of lost power: what was done to a directory, and what may be left of it when the machine stops.

The model is harsher than a journaling file system. Until its fsync, each 512-byte sector of each write survives or not,
in any combination, and the file's length is anything up to what was written; until the directory's fsync, each name
that was made, renamed or removed survives or not, in any combination. What was synced survives.
"""

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.disk.files.file_ops import FileOps

SECTOR_BYTES = 512


@dataclass(frozen=True)
class Write:
    """Bytes given to a file."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Names:
    """One atomic change of the directory: names and the files they mean from now on, None for no file."""

    changes: Mapping[str, int | None]


@dataclass(frozen=True)
class Sync:
    """A file's fsync returned."""

    file: int


@dataclass(frozen=True)
class SyncNames:
    """The directory's fsync returned."""


@dataclass(frozen=True)
class Commit:
    """The ledger's transaction is durable: SQLite's own promise, tested where the ledger is."""

    rows: Mapping[bytes, object]


Event = Write | Names | Sync | SyncNames | Commit


class RecordingOps(FileOps):
    """Does and notes everything that changes the directory.

    Attributes:
        events: What happened.
        forgets: Names of calls that return without having done anything: a tier that leaves them out.
    """

    def __init__(self, forgets: Sequence[str] = ()) -> None:
        self.events: list[Event] = []
        self.forgets = forgets
        self.fail_fsync = False
        self._names: dict[str, int] = {}
        self._open: dict[int, int] = {}
        self._num_files = 0

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        if flags & os.O_CREAT:
            self._num_files += 1
            self._change({path.name: self._num_files})
        self._open[fd] = self._names[path.name]
        return fd

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        written = super().pwritev(fd, pieces, offset)
        self.events.append(Write(self._open[fd], offset, b"".join(pieces)[:written]))
        return written

    def fsync(self, fd: int) -> None:
        if self.fail_fsync:
            self.fail_fsync = False
            raise OSError(5, "Input/output error")
        if "fsync" not in self.forgets:
            self.events.append(Sync(self._open[fd]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._change({source.name: None, target.name: self._names[source.name]})

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._change({path.name: None})

    def fsync_dir(self, path: Path) -> None:
        if "fsync_dir" not in self.forgets:
            self.events.append(SyncNames())

    def _change(self, changes: dict[str, int | None]) -> None:
        self.events.append(Names(changes))
        _apply(changes, self._names)


class Survival:
    """Decides what of the unsynced survives: with one probability for each thing, from a seed."""

    def __init__(self, seed: int, probability: float) -> None:
        self._random, self._probability = random.Random(seed), probability

    def __call__(self) -> bool:
        return self._random.random() < self._probability


def left_after(events: Sequence[Event], survives: Survival) -> dict[str, bytes]:
    """Return the files of the directory after power was lost behind these events."""
    synced: dict[int, bytearray] = {}
    unsynced: dict[int, list[Write]] = {}
    names: dict[str, int] = {}
    changes: list[Mapping[str, int | None]] = []
    for event in events:
        if isinstance(event, Write):
            unsynced.setdefault(event.file, []).append(event)
        elif isinstance(event, Sync):
            for write in unsynced.pop(event.file, []):
                _put(synced.setdefault(event.file, bytearray()), write.offset, write.data)
        elif isinstance(event, Names):
            changes.append(event.changes)
        elif isinstance(event, SyncNames):
            for change in changes:
                _apply(change, names)
            changes = []
    for change in changes:
        if survives():
            _apply(change, names)
    for file, writes in unsynced.items():
        content = synced.setdefault(file, bytearray())
        for write in writes:
            for offset, sector in _sectors(write):
                if survives():
                    _put(content, offset, sector)
                elif survives():  # the length, not the bytes
                    _put(content, offset + len(sector), b"")
    return {name: bytes(synced.get(file, b"")) for name, file in names.items()}


def _sectors(write: Write) -> list[tuple[int, bytes]]:
    pieces, start, end = [], write.offset, write.offset + len(write.data)
    while start < end:
        stop = min(end, start - start % SECTOR_BYTES + SECTOR_BYTES)
        pieces.append((start, write.data[start - write.offset : stop - write.offset]))
        start = stop
    return pieces


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content += bytes(offset - len(content))
    content[offset : offset + len(data)] = data


def _apply(changes: Mapping[str, int | None], names: dict[str, int]) -> None:
    for name, file in changes.items():
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file
