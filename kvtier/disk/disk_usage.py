"""Bytes of all packs on disk, against `disk_bytes` and against what the file system has left."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class DiskUsage:
    """Exact at any time: it is rebuilt from the ledger at start and follows every pack.

    A pack counts from the moment its file is there, which is before its row: what fails between the two has to be
    unlinked before its space is free.

    Attributes:
        limit_bytes: `disk.bytes`.
        used_bytes: Of all packs.
        packs: Length of each, by pack id.
        promised_bytes: What is kept for packs being written.
        free_bytes: What the file system has left beyond the reserve, what is kept of it included; infinite until
            `measured`.
        writes: A token for each write in progress: a check that saw a pack without its row waits until these have
            ended.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self.promised_bytes = 0
        self.packs: dict[str, int] = {}
        self.free_bytes: float = math.inf
        self.writes: set[object] = set()
        self._scratch_bytes = 0  # of scratch files, what is still to be written

    def add(self, pack_id: str, file_bytes: int) -> None:
        """A pack was written."""
        self.remove(pack_id)
        self.packs[pack_id] = file_bytes
        self.used_bytes += file_bytes
        self.free_bytes -= file_bytes

    def remove(self, pack_id: str) -> None:
        """A pack is gone; unknown ones are ignored."""
        file_bytes = self.packs.pop(pack_id, 0)
        self.used_bytes -= file_bytes
        self.free_bytes += file_bytes

    def measured(self, file_system_bytes: int) -> None:
        """Note what the file system has left beyond the reserve, packs being written not counted yet."""
        self.free_bytes = file_system_bytes

    @property
    def unreserved_bytes(self) -> float:
        """What the file system has left beyond the reserve, NaN until it was measured."""
        return self.free_bytes if math.isfinite(self.free_bytes) else math.nan

    def shortage(self, num_bytes: int, scratch_bytes: int = 0) -> int:
        """Return how many bytes must go before packs of at most `num_bytes` may be written; 0 or less: none.

        Args:
            num_bytes: Of packs, which count against the quota too.
            scratch_bytes: Of a scratch file beside them, which takes space of the file system only.
        """
        num_bytes += self.promised_bytes
        short_bytes = num_bytes + scratch_bytes + self._scratch_bytes - self.free_bytes
        return int(max(self.used_bytes + num_bytes - self.limit_bytes, short_bytes))

    @property
    def kept_bytes(self) -> int:
        """What is kept for packs and scratch files on their way."""
        return self.promised_bytes + self._scratch_bytes

    def file_bytes(self, pack_id: str) -> int:
        """Return a pack's length, 0 when there is no such pack."""
        return self.packs.get(pack_id, 0)

    def fits(self, num_bytes: int) -> bool:
        """Say whether a pack of at most `num_bytes` may be written."""
        return self.shortage(num_bytes) <= 0

    @contextmanager
    def promised(self, num_bytes: int) -> Iterator["PackSpace"]:
        """Keep space for packs while they are written: namespaces write at the same time."""
        space = PackSpace(self, num_bytes)
        self.promised_bytes += num_bytes
        self.writes.add(space)
        try:
            yield space
        finally:
            self.promised_bytes -= space.left_bytes
            self.writes.discard(space)

    def scratch_space(self) -> "ScratchSpace":
        """Return space for one scratch file, none yet."""
        return ScratchSpace(self)


class PackSpace:
    """Space promised to packs that are written one after the other. Loop thread only.

    Attributes:
        left_bytes: What is still kept for those to come.
    """

    def __init__(self, usage: DiskUsage, num_bytes: int) -> None:
        self._usage, self.left_bytes = usage, num_bytes

    def written(self, pack_id: str, file_bytes: int) -> None:
        """One of them is there: it counts as what it is, and the file system reports it when it is next measured."""
        self._usage.add(pack_id, file_bytes)
        num_bytes = min(file_bytes, self.left_bytes)
        self.left_bytes -= num_bytes
        self._usage.promised_bytes -= num_bytes


class ScratchSpace:
    """Space kept for a scratch file that is being written, and for the packs to be made of it. Loop thread only.

    Several calls at once each find space for the whole of their file, or do not begin to write it.
    """

    def __init__(self, usage: DiskUsage) -> None:
        self._usage = usage
        self._file_bytes = self._written_bytes = self._pack_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The file is gone."""
        self.release_packs()
        self._keep(self._written_bytes)
        self._usage.free_bytes += self._written_bytes
        self._file_bytes = self._written_bytes = 0

    def shortage(self, file_bytes: int, pack_bytes: int = 0) -> int:
        """Return how many bytes must go before a file of this length and packs fit; see `DiskUsage`."""
        return self._usage.shortage(pack_bytes - self._pack_bytes, file_bytes - self._file_bytes)

    def file_shortage(self, file_bytes: int) -> float:
        """Return how many bytes the file system is short of for a file of this length, whatever the quota says."""
        return file_bytes - self._file_bytes + self._usage.kept_bytes - self._usage.free_bytes

    def keep(self, file_bytes: int, pack_bytes: int = 0) -> None:
        """Keep space for a file that will be this long, and packs, instead of what was kept before."""
        self._keep(max(file_bytes, self._written_bytes))
        self._usage.promised_bytes += pack_bytes - self._pack_bytes
        self._pack_bytes = pack_bytes

    def _keep(self, file_bytes: int) -> None:
        self._usage._scratch_bytes += file_bytes - self._file_bytes
        self._file_bytes = file_bytes

    def grew(self, written_bytes: int) -> None:
        """This much of the file is written; the file system reports it when it is next measured."""
        num_bytes = written_bytes - self._written_bytes
        self._written_bytes = written_bytes
        self._usage._scratch_bytes -= num_bytes
        self._usage.free_bytes -= num_bytes

    def release_packs(self) -> None:
        """The packs are about to be written, and are promised space as all packs are."""
        self._usage.promised_bytes -= self._pack_bytes
        self._pack_bytes = 0
