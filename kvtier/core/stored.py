"""What is known of durable chunks: value objects that the disk tier makes, the ledger keeps and the service reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvtier.core.layout import ChunkKey

SEAL_MARK = "@"
"""Between codec and key in what a sealed chunk names as its codec; in the name of neither."""
SEAL_BYTES = 16
"""By how much a sealed chunk is longer: its tag."""
MAX_CHUNK_BYTES = 2**40 - 1
MAX_OFFSET = 2**63 - 1
_MAX_CHECKSUM = 2**64 - 1


class _Fields(NamedTuple):
    key: ChunkKey
    pack_id: str
    offset: int
    stored_bytes: int
    raw_bytes: int
    codec: str
    checksum: int


class StoredChunk(_Fields):
    """Where a durable chunk lies: in which pack, in which codec.

    Of the chunks of a namespace, `PlaceColumns` keeps this in columns, and makes a StoredChunk for who asks.

    Attributes:
        key: The chunk's key.
        pack_id: File stem of the pack.
        offset: Absolute file offset of the stored bytes.
        stored_bytes: Length of the stored bytes.
        raw_bytes: Length of the payload before the codec.
        codec: Its name; of a sealed chunk also `@` and the name of the key.
        checksum: xxh3_64 of the payload, before the codec, over its segments in order.
    """

    __slots__ = ()

    def __new__(
        cls, key: ChunkKey, pack_id: str, offset: int, stored_bytes: int, raw_bytes: int, codec: str, checksum: int
    ) -> "StoredChunk":
        """Check the numbers.

        Raises:
            ValueError: One is negative or too large.
        """
        if not (
            0 <= offset <= MAX_OFFSET
            and 0 <= stored_bytes <= MAX_CHUNK_BYTES
            and 0 <= raw_bytes <= MAX_CHUNK_BYTES
            and 0 <= checksum <= _MAX_CHECKSUM
        ):
            raise ValueError(
                f"chunk {key.hex()}: offset {offset}, stored_bytes {stored_bytes}, raw_bytes {raw_bytes} or checksum "
                f"{checksum} is out of range; the pack or ledger row that says so is damaged"
            )
        return tuple.__new__(cls, (key, pack_id, offset, stored_bytes, raw_bytes, codec, checksum))

    @property
    def codec_name(self) -> str:
        """The codec of its stored bytes, or of what is sealed in them."""
        return self.codec.partition(SEAL_MARK)[0]

    @property
    def sealed_by(self) -> str:
        """The name of the key that it is sealed with; empty: it is not."""
        return key_name_of(self.codec)

    def opened(self) -> "StoredChunk":
        """Return the same chunk as it is when its stored bytes are not sealed, or are opened."""
        if SEAL_MARK not in self.codec:
            return self
        return self._replace(codec=self.codec_name, stored_bytes=max(0, self.stored_bytes - SEAL_BYTES))


def key_name_of(codec: str) -> str:
    """Return the name of the key in what a chunk names as its codec; empty: it is not sealed."""
    return codec.partition(SEAL_MARK)[2]


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

    @property
    def sealed_by(self) -> str:
        """The name of the key that all its chunks are sealed with; empty: they are not."""
        return self.chunks[0].sealed_by if self.chunks else ""


def checksum_of(segments: Iterable[memoryview]) -> int:
    """Return the xxh3_64 of a payload given as segments in order."""
    digest = xxhash.xxh3_64()
    for segment in segments:
        digest.update(segment)
    return digest.intdigest()
