"""A disk tier in memory whose reads go one by one, as a test allows them; other calls can be held or refused."""

import errno
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.core.layout import ChunkKey
from kvtier.disk.base import ChunkPayload, PackRecord, StoredChunk
from kvtier.errors import ChunkDamagedError, TierIOError
from tests.fakes.gates import Gate
from tests.fakes.memory_tier import MemoryTier

_DEADLINE_S = 60.0  # longer than a test waits for anything while it holds a call up


class SteppedTier(MemoryTier):
    """Not stepping, it is a MemoryTier that keeps a record.

    Attributes:
        asked: Chunks whose read has begun, in order.
        written: Keys of each pack written, in order (rewritten ones too).
        compressed: Whether each pack written was to be compressed.
        damaged: Reading or rewriting these fails as damage.
        unreadable: Reading or rewriting these is refused by the system.
        refuse_writes: OSError number with which every write and probe fails.
        refuse_reads: With which every read fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[ChunkKey] = []
        self.written: list[list[ChunkKey]] = []
        self.compressed: list[bool] = []
        self.damaged: set[ChunkKey] = set()
        self.unreadable: set[ChunkKey] = set()
        self.refuse_writes = 0
        self.refuse_reads = 0
        self._steps: threading.Semaphore | None = None
        self._gates: dict[str, Gate] = {}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Reads wait for `allow`; at the end all go on."""
        steps = self._steps = threading.Semaphore(0)
        try:
            yield
        finally:
            self._steps = None
            steps.release(1000)

    def allow(self, num_reads: int) -> None:
        """Let this many reads go on."""
        assert self._steps is not None
        self._steps.release(num_reads)

    @contextmanager
    def holding(self, method: str) -> Iterator[Gate]:
        """Hold `write_pack`, `rewrite_pack` or `delete_pack` before their work, `rewrite_pack_after` after it."""
        gate = self._gates[method] = Gate()
        try:
            yield gate
        finally:
            del self._gates[method]
            gate.open()

    def _pass(self, method: str) -> None:
        if method in self._gates:
            self._gates[method].wait()

    def write_pack(self, namespace_id: str, chunks: Sequence[ChunkPayload], *, compressed: bool = True) -> PackRecord:
        """See `DiskTier.write_pack`."""
        self._pass("write_pack")
        self._refuse(self.refuse_writes)
        self.written.append([chunk.key for chunk in chunks])
        self.compressed.append(compressed)
        return super().write_pack(namespace_id, chunks, compressed=compressed)

    def rewrite_pack(self, namespace_id: str, chunks: Sequence[StoredChunk]) -> PackRecord:
        """See `DiskTier.rewrite_pack`."""
        self._pass("rewrite_pack")
        record = super().rewrite_pack(namespace_id, chunks)
        self._pass("rewrite_pack_after")
        return record

    def delete_pack(self, pack_id: str) -> bool:
        """See `DiskTier.delete_pack`."""
        self._pass("delete_pack")
        return super().delete_pack(pack_id)

    def read_chunk(self, chunk: StoredChunk, into: Sequence[memoryview]) -> None:
        """See `DiskTier.read_chunk`."""
        self.asked.append(chunk.key)
        if self._steps is not None:
            assert self._steps.acquire(timeout=_DEADLINE_S)
        self._refuse(self.refuse_reads)
        self._refuse(errno.EIO if chunk.key in self.unreadable else 0, chunk.pack_id)
        if chunk.key in self.damaged:
            raise ChunkDamagedError(Path(chunk.pack_id), "checksum differs", chunk.key)
        super().read_chunk(chunk, into)

    def probe(self) -> None:
        """See `DiskTier.probe`."""
        self._refuse(self.refuse_writes)

    def _refuse(self, number: int, path: str = "tier") -> None:
        if number:
            raise TierIOError(Path(path), "use", OSError(number, errno.errorcode[number])) from OSError(number, "no")
