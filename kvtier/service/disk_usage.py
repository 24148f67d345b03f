"""Bytes of all packs on disk, against `disk_bytes` and against what the file system has left."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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

    def shortage(self, num_bytes: int) -> int:
        """Return how many bytes must go before a pack of at most `num_bytes` may be written; 0 or less: none."""
        num_bytes += self._promised_bytes
        return max(self.used_bytes + num_bytes - self.limit_bytes, num_bytes - self._file_system_bytes)

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
