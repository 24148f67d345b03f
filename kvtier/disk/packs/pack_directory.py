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
SET_ASIDE_SUFFIX = ".kvpack-damaged"
SET_ASIDE_MAX_BYTES = 1024**3
SET_ASIDE_MAX_PACKS = 16
UNCLAIMED_FOLDER = "unclaimed"
"""Beside the packs: packs whose namespace nothing describes. No start sweeps it."""

_PACK_ID = re.compile(r"[0-9a-f]{32}")
_PROBE = b"kvtier probe\n"


class PackDirectory:
    """Names and files of one directory, created (0700) when it is missing; this part of `DiskTier` needs no encoding.

    Args:
        directory: Belongs to kvtier.
        ops: Every system call goes through it.
        set_aside_max_bytes: Damaged packs kept aside, in all; the oldest go.
        set_aside_max_packs: Likewise, in files.

    Raises:
        TierIOError: The directory cannot be created.
    """

    def __init__(
        self,
        directory: Path,
        ops: FileOps,
        set_aside_max_bytes: int = SET_ASIDE_MAX_BYTES,
        set_aside_max_packs: int = SET_ASIDE_MAX_PACKS,
    ) -> None:
        self.directory = directory
        self._ops = ops
        self._set_aside_max_bytes, self._set_aside_max_packs = set_aside_max_bytes, set_aside_max_packs
        self._written: set[str] = set()  # each step is atomic, so threads need no lock
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise TierIOError(directory, "create", exc) from exc

    def list_packs(self) -> dict[str, int]:
        """See `DiskTier.list_packs`."""
        return {name.removesuffix(PACK_SUFFIX): facts.file_bytes for name, facts in self._listing(PACK_SUFFIX).items()}

    def packs_set_aside(self) -> dict[str, int]:
        """Return the size of each damaged pack that kvtier keeps, in bytes, by pack id; raises TierIOError."""
        found = self._listing(SET_ASIDE_SUFFIX)
        return {name.removesuffix(SET_ASIDE_SUFFIX): facts.file_bytes for name, facts in found.items()}

    def gone(self, pack_ids: Collection[str]) -> set[str]:
        """See `DiskTier.gone`."""
        if found := set(pack_ids) - self.list_packs().keys():
            self._sync_names()
        return found

    def written_packs(self) -> set[str]:
        """See `DiskTier.written_packs`."""
        return set(self._written)

    def delete_pack(self, pack_id: str) -> bool:
        """See `DiskTier.delete_pack`."""
        # Without fsync of the directory: a name that comes back after a crash is one that the ledger calls removed.
        was_there = self._remove(pack_path(self.directory, pack_id), "delete")
        self._written.discard(pack_id)
        return was_there

    def sweep(self, removed: Collection[str]) -> list[str]:
        """See `DiskTier.sweep`. It leaves damaged packs that kvtier keeps, and files of others."""
        packs = {pack_id + PACK_SUFFIX for pack_id in removed} & self._listing(PACK_SUFFIX).keys()
        leftovers = sorted(packs | self._listing(TEMP_SUFFIX).keys())
        for name in leftovers:
            self._remove(self.directory / name, "remove")
        if leftovers or removed:  # durably: the caller forgets what is gone, also what was unlinked before
            self._sync_names()
        return leftovers

    def move_unclaimed(self, pack_id: str) -> None:
        """Move a pack whose namespace nothing describes beside the directory, durably, until it is known.

        Raises:
            TierIOError: The operating system refused; the pack is in one of the two folders.
        """
        path, folder = pack_path(self.directory, pack_id), self.directory.parent / UNCLAIMED_FOLDER
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._ops.rename(path, folder / path.name)
            for changed in (folder, folder.parent, self.directory):
                self._ops.fsync_dir(changed)
        except OSError as exc:
            raise TierIOError(path, f"move to {UNCLAIMED_FOLDER}/", exc) from exc

    def set_aside_pack(self, pack_id: str) -> bool:
        """See `DiskTier.set_aside_pack`. Keeps a bounded number; the oldest go."""
        path, was_there = pack_path(self.directory, pack_id), True
        # Without fsync: what a crash undoes is a pack that the ledger calls removed, or a damaged one with its row.
        try:
            self._ops.rename(path, self.directory / (pack_id + SET_ASIDE_SUFFIX))
        except FileNotFoundError:
            was_there = False
        except OSError as exc:
            raise TierIOError(path, "set aside", exc) from exc
        self._trim_set_aside()
        return was_there

    def probe(self) -> None:
        """See `DiskTier.probe`."""
        path, found = temp_path(self.directory, self._new_pack_id()), bytearray(len(_PROBE) + 1)
        try:
            with self._ops.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                self._ops.write_all(fd, [memoryview(_PROBE)], 0)
                self._ops.fsync(fd)
            self._ops.fsync_dir(self.directory)
            with self._ops.opened(path, os.O_RDONLY) as fd:
                num_bytes = self._ops.read_all(fd, [memoryview(found)], 0)
            self._ops.unlink(path)
        except OSError as exc:
            with suppress(OSError):  # what stays has a temporary name, and is swept
                self._ops.unlink(path)
            raise TierIOError(path, "probe", exc) from exc
        if found[:num_bytes] != _PROBE:
            raise TierIOError(path, "probe", OSError(errno.EIO, "read other bytes than were written"))

    def _new_pack_id(self) -> str:
        """Return an id that was never used: random, so that no pack is ever taken for an older one."""
        pack_id = uuid.uuid4().hex
        self._written.add(pack_id)
        return pack_id

    def _trim_set_aside(self) -> None:
        """Remove the oldest that are set aside until the rest is within its bounds."""
        packs = sorted(self._listing(SET_ASIDE_SUFFIX).items(), key=lambda item: (item[1].changed_ns, item[0]))
        num_packs, num_bytes = len(packs), sum(facts.file_bytes for _, facts in packs)
        for name, facts in packs:
            if num_packs <= self._set_aside_max_packs and num_bytes <= self._set_aside_max_bytes:
                return
            self._remove(self.directory / name, "remove")
            num_packs, num_bytes = num_packs - 1, num_bytes - facts.file_bytes

    def _listing(self, suffix: str) -> dict[str, FileFacts]:
        try:
            found = self._ops.listing(self.directory)
        except OSError as exc:
            raise TierIOError(self.directory, "list", exc) from exc
        return {name: facts for name, facts in found.items() if _is_ours(name, suffix)}

    def _sync_names(self) -> None:
        try:
            self._ops.fsync_dir(self.directory)
        except OSError as exc:
            raise TierIOError(self.directory, "fsync", exc) from exc

    def _remove(self, path: Path, action: str) -> bool:
        try:
            self._ops.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise TierIOError(path, action, exc) from exc
        return True


def pack_path(directory: Path, pack_id: str) -> Path:
    """Return where a complete pack lies.

    Raises:
        InvalidArgumentError: It is no pack id; an id is never a path.
    """
    if not _PACK_ID.fullmatch(pack_id):
        raise InvalidArgumentError("pack_id", pack_id, "must be 32 lower-case hex digits")
    return directory / (pack_id + PACK_SUFFIX)


def temp_path(directory: Path, pack_id: str) -> Path:
    """Return where a pack is written before it has its name."""
    return directory / (pack_id + TEMP_SUFFIX)


def _is_ours(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and _PACK_ID.fullmatch(name.removesuffix(suffix)) is not None
