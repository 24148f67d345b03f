"""Bytes of all packs on disk, against `disk_bytes` and against what the file system has left."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

_UNMEASURED_BYTES = 1 << 62


class DiskUsage:
    """Exact at any time: it is rebuilt from the ledger at start and follows every pack.

    A pack counts from the moment its file is there, which is before its row: what fails between the two has to be
    unlinked to be given back.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._packs: dict[str, int] = {}
        self._promised_bytes = 0  # packs being written
        self._scratch_bytes = 0  # of scratch files, what is still to be written
        self._writes: set[object] = set()
        self._file_system_bytes, self._is_measured = _UNMEASURED_BYTES, False

    def add(self, pack_id: str, file_bytes: int) -> None:
        """A pack came into being."""
        self.remove(pack_id)
        self._packs[pack_id] = file_bytes
        self.used_bytes += file_bytes
        self._file_system_bytes -= file_bytes

    def remove(self, pack_id: str) -> None:
        """A pack is gone; unknown ones are ignored."""
        file_bytes = self._packs.pop(pack_id, 0)
        self.used_bytes -= file_bytes
        self._file_system_bytes += file_bytes

    def measured(self, file_system_bytes: int) -> None:
        """Note what the file system has left beyond the reserve, packs being written not counted yet."""
        self._file_system_bytes, self._is_measured = file_system_bytes, True

    @property
    def unreserved_bytes(self) -> float:
        """What the file system has left beyond the reserve, NaN until it was measured."""
        return self._file_system_bytes if self._is_measured else math.nan

    def shortage(self, num_bytes: int, scratch_bytes: int = 0) -> int:
        """Return how many bytes must go before packs of at most `num_bytes` may be written; 0 or less: none.

        Args:
            num_bytes: Of packs, which count against the quota too.
            scratch_bytes: Of a scratch file beside them, which takes room of the file system only.
        """
        num_bytes += self._promised_bytes
        short_bytes = num_bytes + scratch_bytes + self._scratch_bytes - self._file_system_bytes
        return max(self.used_bytes + num_bytes - self.limit_bytes, short_bytes)

    @property
    def promised_bytes(self) -> int:
        """What is kept for packs on their way."""
        return self._promised_bytes

    @property
    def kept_bytes(self) -> int:
        """What is kept for packs and scratch files on their way."""
        return self._promised_bytes + self._scratch_bytes

    @property
    def free_bytes(self) -> int:
        """What the file system has left beyond the reserve, what is kept of it included."""
        return self._file_system_bytes

    def file_bytes(self, pack_id: str) -> int:
        """Return a pack's length, 0 when there is no such pack."""
        return self._packs.get(pack_id, 0)

    @property
    def packs(self) -> Mapping[str, int]:
        """Length by pack id."""
        return self._packs

    @property
    def writes(self) -> frozenset[object]:
        """Tokens of the writes in progress: a check that saw a pack without its row waits until these have ended."""
        return frozenset(self._writes)

    def fits(self, num_bytes: int) -> bool:
        """Say whether a pack of at most `num_bytes` may be written."""
        return self.shortage(num_bytes) <= 0

    @contextmanager
    def promised(self, num_bytes: int) -> Iterator[None]:
        """Keep room for a pack while it is written: namespaces write at the same time."""
        write = object()
        self._promised_bytes += num_bytes
        self._writes.add(write)
        try:
            yield
        finally:
            self._promised_bytes -= num_bytes
            self._writes.discard(write)

    def scratch_space(self) -> "ScratchSpace":
        """Return room for one scratch file, none yet."""
        return ScratchSpace(self)


class ScratchSpace:
    """Room kept for a scratch file that is being written, and for the packs to be made of it. Loop thread only.

    Several calls at once each find room for the whole of their file, or do not begin to write it.
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
        self._usage._file_system_bytes += self._written_bytes
        self._file_bytes = self._written_bytes = 0

    def shortage(self, file_bytes: int, pack_bytes: int = 0) -> int:
        """Return how many bytes must go before there is room for a file of this length, and packs; see `DiskUsage`."""
        return self._usage.shortage(pack_bytes - self._pack_bytes, file_bytes - self._file_bytes)

    def file_shortage(self, file_bytes: int) -> int:
        """Return how many bytes the file system is short of for a file of this length, whatever the quota says."""
        return file_bytes - self._file_bytes + self._usage.kept_bytes - self._usage.free_bytes

    def keep(self, file_bytes: int, pack_bytes: int = 0) -> None:
        """Keep room for a file that will be this long, and packs, instead of what was kept before."""
        self._keep(max(file_bytes, self._written_bytes))
        self._usage._promised_bytes += pack_bytes - self._pack_bytes
        self._pack_bytes = pack_bytes

    def _keep(self, file_bytes: int) -> None:
        self._usage._scratch_bytes += file_bytes - self._file_bytes
        self._file_bytes = file_bytes

    def grew(self, written_bytes: int) -> None:
        """So much of the file is there: the file system says so the next time that it is asked."""
        num_bytes = written_bytes - self._written_bytes
        self._written_bytes = written_bytes
        self._usage._scratch_bytes -= num_bytes
        self._usage._file_system_bytes -= num_bytes

    def release_packs(self) -> None:
        """The packs are about to be written, and are promised room as all packs are."""
        self._usage._promised_bytes -= self._pack_bytes
        self._pack_bytes = 0
