"""The directory of the packs: names, what is there, and how files leave it.

    <pack_id>.kvpack             a complete pack
    <pack_id>.kvpack.tmp         being written, or left by a crash; also a probe's file
    <pack_id>.kvpack-damaged     set aside for people to look at; bounded, never read, swept or counted

Files with other names are left alone.
"""

import errno
import os
import re
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from kvtier.disk.files.file_ops import FileFacts, FileOps
from kvtier.errors import InvalidArgumentError, TierIOError

PACK_SUFFIX = ".kvpack"
TEMP_SUFFIX = ".kvpack.tmp"
QUARANTINE_SUFFIX = ".kvpack-damaged"
QUARANTINE_MAX_BYTES = 1024**3
QUARANTINE_MAX_PACKS = 16
UNCLAIMED_FOLDER = "unclaimed"
"""Beside the packs: packs whose namespace nothing describes. No start sweeps it."""

_PACK_ID = re.compile(r"[0-9a-f]{32}")
_PROBE = b"kvtier probe\n"


class PackDirectory:
    """Names and files of one directory. Its state is a set of names, so threads need no lock.

    Attributes:
        made: Ids that were given out and not deleted since: packs of this process, recorded or not.
    """

    def __init__(
        self,
        directory: Path,
        ops: FileOps,
        *,
        quarantine_max_bytes: int = QUARANTINE_MAX_BYTES,
        quarantine_max_packs: int = QUARANTINE_MAX_PACKS,
    ) -> None:
        """Use a directory, which is created (0700) when it is missing.

        Args:
            directory: Belongs to kvtier.
            ops: Every system call goes through it.
            quarantine_max_bytes: Damaged packs kept aside, in all; the oldest go.
            quarantine_max_packs: Likewise, in files.

        Raises:
            TierIOError: The directory cannot be created.
        """
        self.path = directory
        self.made: set[str] = set()
        self._ops = ops
        self._quarantine_max_bytes, self._quarantine_max_packs = quarantine_max_bytes, quarantine_max_packs
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise TierIOError(directory, "create", exc) from exc

    def new_pack_id(self) -> str:
        """Return an id that was never used: random, so that no pack is ever taken for an older one."""
        pack_id = uuid.uuid4().hex
        self.made.add(pack_id)
        return pack_id

    def pack_path(self, pack_id: str) -> Path:
        """Return where a complete pack lies.

        Raises:
            InvalidArgumentError: It is no pack id; an id is never a path.
        """
        if not _PACK_ID.fullmatch(pack_id):
            raise InvalidArgumentError("pack_id", pack_id, "must be 32 lower-case hex digits")
        return self.path / (pack_id + PACK_SUFFIX)

    def temp_path(self, pack_id: str) -> Path:
        """Return where a pack is written before it has its name."""
        return self.path / (pack_id + TEMP_SUFFIX)

    def lengths(self) -> dict[str, int]:
        """Return the length of every complete pack, by pack id; raises TierIOError."""
        return {name.removesuffix(PACK_SUFFIX): facts.file_bytes for name, facts in self._listing(PACK_SUFFIX).items()}

    def quarantined(self) -> dict[str, FileFacts]:
        """Return the packs that were set aside, by pack id; raises TierIOError."""
        found = self._listing(QUARANTINE_SUFFIX)
        return {name.removesuffix(QUARANTINE_SUFFIX): facts for name, facts in found.items()}

    def delete(self, pack_id: str) -> None:
        """Remove a pack's name; one that is gone is fine. Raises TierIOError."""
        # Without fsync of the directory: a name that comes back after a crash is one that the ledger calls removed.
        self._remove(self.pack_path(pack_id), "delete")
        self.made.discard(pack_id)

    def sweep(self, removed: Collection[str]) -> list[str]:
        """Remove temporary files and the packs named; return the names of those that were there. Raises TierIOError."""
        packs = {pack_id + PACK_SUFFIX for pack_id in removed} & self._listing(PACK_SUFFIX).keys()
        leftovers = sorted(packs | self._listing(TEMP_SUFFIX).keys())
        for name in leftovers:
            self._remove(self.path / name, "remove")
        if leftovers:
            self._sync_names()
        return leftovers

    def _sync_names(self) -> None:
        """Make removals durable: the caller forgets what it has removed."""
        try:
            self._ops.fsync_dir(self.path)
        except OSError as exc:
            raise TierIOError(self.path, "fsync", exc) from exc

    def move_unclaimed(self, pack_id: str) -> None:
        """See `PackTier.move_unclaimed`."""
        path, folder = self.pack_path(pack_id), self.path.parent / UNCLAIMED_FOLDER
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._ops.rename(path, folder / path.name)
            for changed in (folder, self.path):
                self._ops.fsync_dir(changed)
        except OSError as exc:
            raise TierIOError(path, f"move to {UNCLAIMED_FOLDER}/", exc) from exc

    def quarantine(self, pack_id: str) -> None:
        """Set a pack aside and keep what is set aside within its bounds; one that is gone is fine.

        Raises:
            TierIOError: It could not be renamed, or an old one not removed.
        """
        path = self.pack_path(pack_id)
        # Without fsync: what a crash undoes is a pack that the ledger calls removed, or a damaged one with its row.
        with suppress(FileNotFoundError):
            try:
                self._ops.rename(path, self.path / (pack_id + QUARANTINE_SUFFIX))
            except FileNotFoundError:
                raise
            except OSError as exc:
                raise TierIOError(path, "quarantine", exc) from exc
        self._trim_quarantine()

    def probe(self) -> None:
        """Write, fsync, read back and remove a small file; raises TierIOError when any of it fails."""
        path = self.temp_path(self.new_pack_id())
        try:
            self._write_probe(path)
            self._read_probe(path)
            self._ops.unlink(path)
        except OSError as exc:
            with suppress(OSError):  # what stays has a temporary name, and is swept
                self._ops.unlink(path)
            raise TierIOError(path, "probe", exc) from exc

    def _write_probe(self, path: Path) -> None:
        with self._ops.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            self._ops.write_all(fd, [memoryview(_PROBE)], 0)
            self._ops.fsync(fd)
        self._ops.fsync_dir(self.path)

    def _read_probe(self, path: Path) -> None:
        found = bytearray(len(_PROBE) + 1)
        with self._ops.opened(path, os.O_RDONLY) as fd:
            num_bytes = self._ops.read_all(fd, [memoryview(found)], 0)
        if found[:num_bytes] != _PROBE:
            raise OSError(errno.EIO, "read other bytes than were written")

    def _trim_quarantine(self) -> None:
        """Remove the oldest that are set aside until the rest is within its bounds."""
        packs = sorted(self._listing(QUARANTINE_SUFFIX).items(), key=lambda item: (item[1].changed_ns, item[0]))
        num_packs, num_bytes = len(packs), sum(facts.file_bytes for _, facts in packs)
        for name, facts in packs:
            if num_packs <= self._quarantine_max_packs and num_bytes <= self._quarantine_max_bytes:
                return
            self._remove(self.path / name, "remove")
            num_packs, num_bytes = num_packs - 1, num_bytes - facts.file_bytes

    def _listing(self, suffix: str) -> dict[str, FileFacts]:
        try:
            found = self._ops.listing(self.path)
        except OSError as exc:
            raise TierIOError(self.path, "list", exc) from exc
        return {name: facts for name, facts in found.items() if _is_ours(name, suffix)}

    def _remove(self, path: Path, action: str) -> None:
        try:
            self._ops.unlink(path)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise TierIOError(path, action, exc) from exc


def _is_ours(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and _PACK_ID.fullmatch(name.removesuffix(suffix)) is not None
