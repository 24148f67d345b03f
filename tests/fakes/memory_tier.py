"""A disk tier in memory, for tests of the service. Passes `tests/contract`."""

import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.base import ChunkPayload, ChunkRead, ReadDone, checksum_of
from kvtier.errors import ChunkDamagedError, InvalidArgumentError, TierIOError


class MemoryTier:
    """Packs in a dict. Raises TierIOError from the next writes while `fail_writes` is above 0.

    Attributes:
        packs: Stored bytes by pack id; tests damage them in place.
        leftovers: Names of temporary files that a crash would have left.
        fail_writes: How many more writes and probes fail.
        fail_reads: How many more reads fail.
        set_aside: Damaged packs, by id.
    """

    def __init__(self) -> None:
        self.packs: dict[str, bytearray] = {}
        self.made: set[str] = set()
        self.leftovers: list[str] = []
        self.fail_writes = 0
        self.fail_reads = 0
        self.set_aside: dict[str, bytearray] = {}

    @property
    def writes_with(self) -> str:
        """It seals nothing."""
        return ""

    def can_open(self, key_name: str) -> bool:
        """See `DiskTier.can_open`."""
        return not key_name

    def write_pack(self, namespace_id: str, chunks: Sequence[ChunkPayload], *, compressed: bool = True) -> PackRecord:
        """See `DiskTier.write_pack`."""
        if not chunks or len({chunk.key for chunk in chunks}) != len(chunks):
            raise InvalidArgumentError("chunks", len(chunks), "a pack needs chunks, each key once")
        pack_id = uuid.uuid4().hex
        self.made.add(pack_id)
        if self.fail_writes:
            self.fail_writes -= 1
            raise TierIOError(Path(pack_id), "write", OSError(28, "No space left on device"))
        data, stored = bytearray(), []
        for chunk in chunks:
            if checksum_of(chunk.segments) != chunk.checksum:
                raise ChunkDamagedError(Path(pack_id), "changed in host memory", chunk.key)
            stored.append(_stored(chunk, pack_id, len(data)))
            for segment in chunk.segments:
                data += segment
        self.packs[pack_id] = data
        return PackRecord(pack_id=pack_id, namespace_id=namespace_id, file_bytes=len(data), chunks=tuple(stored))

    def read_rate(self) -> float | None:
        """There is no disk."""
        return None

    def prepare_reads(self) -> None:
        """There is nothing to make."""

    def read_chunk(self, chunk: StoredChunk, into: Sequence[memoryview]) -> None:
        """See `DiskTier.read_chunk`."""
        path, data = Path(chunk.pack_id), self.packs.get(chunk.pack_id)
        if self.fail_reads:
            self.fail_reads -= 1
            raise TierIOError(path, "read", OSError(5, "Input/output error"))
        num_bytes = sum(segment.nbytes for segment in into)
        if data is None or num_bytes != chunk.raw_bytes or len(data) < chunk.offset + num_bytes:
            raise ChunkDamagedError(path, "missing or short", chunk.key)
        offset = chunk.offset
        for segment in into:
            segment[:] = data[offset : offset + segment.nbytes]
            offset += segment.nbytes
        if checksum_of(into) != chunk.checksum:
            raise ChunkDamagedError(path, "checksum differs", chunk.key)

    def read_chunks(self, reads: Sequence[ChunkRead], done: ReadDone, cancelled: Callable[[], bool]) -> None:
        """See `DiskTier.read_chunks`."""
        for read in reads:
            if cancelled():
                return
            try:
                self.read_chunk(read.chunk, read.into)
            except (ChunkDamagedError, TierIOError) as error:
                done(read, error)
            else:
                done(read, None)

    def write_stored(
        self, namespace_id: str, chunks: Sequence[StoredChunk], read: Callable[[StoredChunk], bytes]
    ) -> PackRecord:
        """See `DiskTier.write_stored`. It keeps chunks raw."""
        payloads = []
        for chunk in chunks:
            view = memoryview(read(chunk))
            if checksum_of([view]) != chunk.checksum:
                raise ChunkDamagedError(Path(chunk.pack_id), "checksum differs", chunk.key)
            payloads.append(ChunkPayload(key=chunk.key, segments=[view], checksum=chunk.checksum))
        return self.write_pack(namespace_id, payloads)

    def open_stored(self, chunk: StoredChunk, stored: bytes) -> bytes:
        """See `DiskTier.open_stored`."""
        return stored

    def rewrite_pack(self, namespace_id: str, chunks: Sequence[StoredChunk]) -> PackRecord:
        """See `DiskTier.rewrite_pack`."""
        payloads = []
        for chunk in chunks:
            payload = memoryview(bytearray(chunk.raw_bytes))
            self.read_chunk(chunk, [payload])
            payloads.append(ChunkPayload(key=chunk.key, segments=[payload], checksum=chunk.checksum))
        return self.write_pack(namespace_id, payloads)

    def set_aside_pack(self, pack_id: str) -> bool:
        """See `DiskTier.set_aside_pack`."""
        if pack_id not in self.packs:
            return False
        self.set_aside[pack_id] = self.packs.pop(pack_id)
        return True

    def probe(self) -> None:
        """See `DiskTier.probe`."""
        if self.fail_writes:
            self.fail_writes -= 1
            raise TierIOError(Path("probe"), "probe", OSError(28, "No space left on device"))

    def delete_pack(self, pack_id: str) -> bool:
        """See `DiskTier.delete_pack`."""
        self.made.discard(pack_id)
        return self.packs.pop(pack_id, None) is not None

    def written_packs(self) -> set[str]:
        """See `DiskTier.written_packs`."""
        return set(self.made)

    def list_packs(self) -> dict[str, int]:
        """See `DiskTier.list_packs`."""
        return {pack_id: len(data) for pack_id, data in self.packs.items()}

    def gone(self, pack_ids: Collection[str]) -> set[str]:
        """See `DiskTier.gone`."""
        return set(pack_ids) - self.packs.keys()

    def sweep(self, removed: Collection[str]) -> list[str]:
        """See `DiskTier.sweep`."""
        gone = [pack_id for pack_id in removed if self.packs.pop(pack_id, None) is not None]
        leftovers, self.leftovers = sorted(gone + self.leftovers), []
        return leftovers


def _stored(chunk: ChunkPayload, pack_id: str, offset: int) -> StoredChunk:
    return StoredChunk(
        key=chunk.key,
        pack_id=pack_id,
        offset=offset,
        stored_bytes=chunk.raw_bytes,
        raw_bytes=chunk.raw_bytes,
        codec="raw",
        checksum=chunk.checksum,
    )
