"""What is known of durable chunks: value objects that the disk tier makes, the ledger keeps and the service reads."""

from dataclasses import dataclass
from typing import NamedTuple

from kvtier.core.layout import ChunkKey


class StoredChunk(NamedTuple):
    """Where a durable chunk lies. Construct it with keywords, read it by attribute.

    Not a frozen dataclass: start-up makes one per chunk on disk, and that took 0.33 s for 80,000 against 0.17 s this
    way.

    Attributes:
        key: Its key.
        pack_id: File stem of the pack.
        offset: Absolute file offset of the stored bytes.
        stored_bytes: Their length.
        raw_bytes: Length of the payload before the codec.
        codec: `zstd` or `raw`.
        checksum: xxh3_64 of the payload, before the codec, over its segments in order.
    """

    key: ChunkKey
    pack_id: str
    offset: int
    stored_bytes: int
    raw_bytes: int
    codec: str
    checksum: int


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
