"""Ledger rows for tests."""

from collections.abc import Iterable

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.ledger import BindingRow, NamespaceRow, PromptRow
from tests.fakes.chunks import key_of, layout_of


def namespace_row(namespace_id: str = "ns", seen_unix_s: float = 2.5) -> NamespaceRow:
    """Return a namespace."""
    return NamespaceRow(
        namespace_id=namespace_id,
        model="llama",
        fingerprint={"dtype": '"bf16"', "model": '"läma"'},
        layout=layout_of(num_ranks=2),
        created_unix_s=1.25,
        seen_unix_s=seen_unix_s,
    )


def prompt_row(
    name: str = "support",
    pin_id: str = "pin-1",
    tokens: Iterable[int] = (1, 2, 2**32 - 1),
    pinned: bool = True,
    expires_unix_s: float = 0.0,
) -> PromptRow:
    """Return a prompt."""
    return PromptRow(
        name=name,
        pin_id=pin_id,
        pinned=pinned,
        tokens=tuple(tokens),
        model="llama",
        lora_name="",
        lora_path="",
        cache_salt="salt",
        recipe_json='{"kind": "text"}',
        created_unix_s=3.5,
        expires_unix_s=expires_unix_s,
    )


def binding_row(pin_id: str = "pin-1", namespace_id: str = "ns", numbers: Iterable[int] = (1, 2)) -> BindingRow:
    """Return a binding of the chunks with these numbers."""
    keys = tuple(key_of(number) for number in numbers)
    return BindingRow(pin_id=pin_id, namespace_id=namespace_id, keys=keys, covered_tokens=16 * len(keys))


def pack_record(pack_id: str, numbers: Iterable[int], namespace_id: str = "ns") -> PackRecord:
    """Return a pack of the chunks with these numbers, in this order."""
    chunks = tuple(stored_chunk(key_of(number), pack_id, 4096 + 100 * index) for index, number in enumerate(numbers))
    return PackRecord(pack_id=pack_id, namespace_id=namespace_id, file_bytes=4096 + 100 * len(chunks), chunks=chunks)


def stored_chunk(key: ChunkKey, pack_id: str, offset: int) -> StoredChunk:
    """Return where a chunk of 100 stored bytes lies; its checksum has the high bit set."""
    return StoredChunk(
        key=key, pack_id=pack_id, offset=offset, stored_bytes=100, raw_bytes=200, codec="zstd", checksum=2**64 - 1
    )
