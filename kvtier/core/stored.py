"""What is known of durable chunks: value objects that the disk tier makes, the ledger keeps and the service reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from kvtier.core.layout import ChunkKey

MAX_CHUNK_BYTES = 2**40 - 1
_CHECKSUM_MASK = 2**64 - 1
_STORED_SHIFT, _RAW_SHIFT, _OFFSET_SHIFT = 64, 104, 144


class _Fields(NamedTuple):
    key: ChunkKey
    pack_id: str
    codec: str
    numbers: int  # offset | raw_bytes | stored_bytes | checksum, the last in the lowest bits


class StoredChunk(_Fields):
    """Where a durable chunk lies: in which pack, in which codec. Construct it with keywords, read it by attribute.

    One is kept in memory for each chunk on disk, so its four numbers share one int: four ints of their own in a tuple
    of seven took 80 bytes more. Offsets have no bound, lengths one of 1 TiB.
    """

    __slots__ = ()

    def __new__(
        cls, key: ChunkKey, pack_id: str, offset: int, stored_bytes: int, raw_bytes: int, codec: str, checksum: int
    ) -> "StoredChunk":
        """Pack the numbers.

        Raises:
            ValueError: One is negative or too large: packed, it would change its neighbours.
        """
        if not (
            offset >= 0
            and 0 <= stored_bytes <= MAX_CHUNK_BYTES
            and 0 <= raw_bytes <= MAX_CHUNK_BYTES
            and 0 <= checksum <= _CHECKSUM_MASK
        ):
            raise ValueError(
                f"chunk {key.hex()}: offset {offset}, stored_bytes {stored_bytes}, raw_bytes {raw_bytes} or checksum "
                f"{checksum} is out of range; the pack or ledger row that says so is damaged"
            )
        numbers = offset << _OFFSET_SHIFT | raw_bytes << _RAW_SHIFT | stored_bytes << _STORED_SHIFT | checksum
        return tuple.__new__(cls, (key, pack_id, codec, numbers))

    @property
    def offset(self) -> int:
        """Absolute file offset of the stored bytes."""
        return self.numbers >> _OFFSET_SHIFT

    @property
    def stored_bytes(self) -> int:
        """Length of the stored bytes."""
        return self.numbers >> _STORED_SHIFT & MAX_CHUNK_BYTES

    @property
    def raw_bytes(self) -> int:
        """Length of the payload before the codec."""
        return self.numbers >> _RAW_SHIFT & MAX_CHUNK_BYTES

    @property
    def checksum(self) -> int:
        """xxh3_64 of the payload, before the codec, over its segments in order."""
        return self.numbers & _CHECKSUM_MASK

    def _replace(self, **changed: Any) -> "StoredChunk":
        """Return a copy with some attributes changed, as a NamedTuple of all seven would."""
        names = ("key", "pack_id", "offset", "stored_bytes", "raw_bytes", "codec", "checksum")
        return StoredChunk(**{name: getattr(self, name) for name in names} | changed)


@dataclass(frozen=True, kw_only=True)
class PackRecord:
    """One pack and the chunks that are read from it.

    Attributes:
        pack_id: File stem of the pack.
        namespace_id: All its chunks belong to this namespace.
        file_bytes: Length of the file.
        chunks: Ordered by offset.
    """

    pack_id: str
    namespace_id: str
    file_bytes: int
    chunks: tuple[StoredChunk, ...]


def checksum_of(segments: Iterable[memoryview]) -> int:
    """Return the xxh3_64 of a payload given as segments in order."""
    digest = xxhash.xxh3_64()
    for segment in segments:
        digest.update(segment)
    return digest.intdigest()
