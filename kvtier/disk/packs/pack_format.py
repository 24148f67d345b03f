"""The bytes of a pack, without I/O. A pack is a valid safetensors file, so that any tool can open one.

    0           header length N, 8 bytes little endian
    8           header: JSON, padded with spaces; 8 + N is a multiple of 4096
    8 + N       stored bytes of the chunks, back to back

Each chunk is a 1-D uint8 tensor named by its key in hex. `__metadata__` (strings only, as safetensors wants) states the
format version, the namespace, and codec, length and checksum of every chunk: the chunk rows of a lost ledger can be
rebuilt from the packs. From version 2 on the header has a checksum of its own: a chunk's checksum says nothing about
the key and namespace that stand beside it. In version 3 the chunks are sealed, and the header says with which key;
plain packs are written in version 2. Byte layout and versions: docs/format.md.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from kvtier.core.layout import ALIGNMENT_BYTES, ChunkKey
from kvtier.core.limits import MAX_SAFETENSORS_HEADER_BYTES
from kvtier.core.stored import MAX_CHUNK_BYTES, SEAL_BYTES, SEAL_MARK, PackRecord, StoredChunk
from kvtier.errors import ChunkDamagedError, FormatVersionError

PLAIN_VERSION, SEALED_VERSION = 2, 3
FORMAT_VERSION = SEALED_VERSION
"""The newest that is read. 1: no header checksum."""
LENGTH_PREFIX = struct.Struct("<Q")

_META = "__metadata__"
_META_FORMAT = "kvtier.format"
_META_CHECKSUM = "kvtier.header_xxh3_64"
_META_KEY = "kvtier.key"
_META_NAMESPACE = "kvtier.namespace"
_META_CHUNKS = "kvtier.chunks"
_NO_CHECKSUM = "0" * 16
"""Stands for the header's checksum while that is computed."""


def reserve_bytes(namespace_id: str, sizes: Sequence[tuple[ChunkKey, int]], key_name: str = "") -> int:
    """Return the offset where data can start, given key and raw bytes of each chunk, before any stored size is known.

    The header is written last, in front of the data, so that chunks are compressed and written one by one. A chunk's
    stored size never exceeds its raw size, and a tag if it is sealed, so no number in it is longer than one of them, or
    than their sum. `key_name`: of the key that the chunks are sealed with; empty: they are not.
    """
    key_bytes, raw_bytes = max(len(key) for key, _ in sizes), sum(raw_bytes for _, raw_bytes in sizes)
    return data_offset_of(namespace_id, len(sizes), key_bytes, raw_bytes, key_name)


def data_offset_of(namespace_id: str, num_chunks: int, key_bytes: int, raw_bytes: int, key_name: str = "") -> int:
    """Return the same from the number of chunks, the length of the longest key, and the raw bytes of all chunks."""
    codec = "x" * 16
    if key_name:
        codec, raw_bytes = f"{codec}{SEAL_MARK}{key_name}", raw_bytes + num_chunks * SEAL_BYTES
    one, two = (
        len(_header_json(namespace_id, _longest_chunks(number, key_bytes, raw_bytes, codec), 0)) for number in (1, 2)
    )
    needed = LENGTH_PREFIX.size + one + num_chunks * (two - one)
    return -(-needed // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def build_header(namespace_id: str, chunks: Sequence[StoredChunk], data_offset: int) -> bytes:
    """Return the first `data_offset` bytes of a pack; its chunks lie back to back from there on.

    Raises:
        ValueError: The header does not fit; `data_offset` did not come from `reserve_bytes`.
    """
    header_bytes = data_offset - LENGTH_PREFIX.size
    header = _header_json(namespace_id, chunks, data_offset)
    if len(header) > header_bytes:
        raise ValueError(f"pack header needs {len(header)} bytes, {header_bytes} are reserved")
    padded = header.ljust(header_bytes)
    checksum = _header_checksum(padded)
    # Its place comes first in the header, before anything that could look like it.
    return LENGTH_PREFIX.pack(header_bytes) + padded.replace(_NO_CHECKSUM.encode(), checksum.encode(), 1)


def header_bytes_of(path: Path, prefix: bytes, file_bytes: int) -> int:
    """Return N, the length of the JSON header, from the first 8 bytes of a pack.

    Raises:
        ChunkDamagedError: The prefix is short, or N cannot be.
    """
    if len(prefix) < LENGTH_PREFIX.size:
        raise ChunkDamagedError(path, f"has {file_bytes} bytes, a pack has at least {LENGTH_PREFIX.size}")
    (header_bytes,) = LENGTH_PREFIX.unpack_from(prefix)
    if header_bytes > min(MAX_SAFETENSORS_HEADER_BYTES, file_bytes - LENGTH_PREFIX.size):
        raise ChunkDamagedError(path, f"states a header of {header_bytes} bytes in a file of {file_bytes}")
    return int(header_bytes)


def parse_header(path: Path, header: bytes, file_bytes: int) -> PackRecord:
    """Return what a pack's JSON header states.

    Args:
        path: The pack; its stem is the pack id.
        header: The JSON, padding included, without the length prefix.
        file_bytes: Length of the file.

    Raises:
        FormatVersionError: A newer kvtier wrote it.
        ChunkDamagedError: It is not a pack's header, or the file is shorter than it says.
    """
    try:
        tensors = json.loads(header)
        metadata = tensors.pop(_META)
        version = int(metadata[_META_FORMAT])
        if version > FORMAT_VERSION:
            raise FormatVersionError(path, version, FORMAT_VERSION)
        _verify_header(header, version, metadata)
        key_name = metadata[_META_KEY] if version >= SEALED_VERSION else ""
        data_offset = LENGTH_PREFIX.size + len(header)
        facts = json.loads(metadata[_META_CHUNKS])
        chunks = [_stored_chunk(path.stem, data_offset, name, tensors[name], facts[name]) for name in tensors]
        namespace_id = str(metadata[_META_NAMESPACE])
        _check_keys(chunks, key_name)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise ChunkDamagedError(path, f"is not a kvtier pack ({type(exc).__name__}: {exc})") from exc
    chunks.sort(key=lambda chunk: chunk.offset)
    end = max((chunk.offset + chunk.stored_bytes for chunk in chunks), default=data_offset)
    if end != file_bytes:
        raise ChunkDamagedError(path, f"has {file_bytes} bytes, its header says {end}")
    return PackRecord(pack_id=path.stem, namespace_id=namespace_id, file_bytes=file_bytes, chunks=tuple(chunks))


def _verify_header(header: bytes, version: int, metadata: dict[str, str]) -> None:
    """Raise ValueError when a header is not what was written."""
    stated = metadata.get(_META_CHECKSUM)
    if stated is None and version == 1:
        return
    if stated is None or version < 1:
        raise ValueError(f"version {version}, header checksum {stated!r}")
    found = _header_checksum(header.replace(str(stated).encode(), _NO_CHECKSUM.encode(), 1))
    if found != stated:
        raise ValueError(f"the header has checksum {found}, written as {stated!r}")


def _check_keys(chunks: Sequence[StoredChunk], key_name: str) -> None:
    """Raise ValueError unless all chunks are sealed with this key; empty: none is sealed."""
    if any(chunk.sealed_by != key_name for chunk in chunks):
        raise ValueError(f"a chunk is not sealed with the pack's key {key_name!r}")


def _header_checksum(padded: bytes) -> str:
    """Return the xxh3_64, in hex, of a padded header in which zeros stand for it."""
    return f"{xxhash.xxh3_64_intdigest(padded):016x}"


def _header_json(namespace_id: str, chunks: Sequence[StoredChunk], data_offset: int) -> bytes:
    key_name = chunks[0].sealed_by if chunks else ""
    facts = {
        chunk.key.hex(): {"codec": chunk.codec, "raw_bytes": chunk.raw_bytes, "xxh3_64": f"{chunk.checksum:016x}"}
        for chunk in chunks
    }
    metadata = {
        _META_FORMAT: str(SEALED_VERSION if key_name else PLAIN_VERSION),
        _META_CHECKSUM: _NO_CHECKSUM,
        **({_META_KEY: key_name} if key_name else {}),
        _META_NAMESPACE: namespace_id,
        _META_CHUNKS: json.dumps(facts, separators=(",", ":")),
    }
    tensors: dict[str, Any] = {_META: metadata}
    for chunk in chunks:
        start = chunk.offset - data_offset
        offsets = [start, start + chunk.stored_bytes]
        tensors[chunk.key.hex()] = {"dtype": "U8", "shape": [chunk.stored_bytes], "data_offsets": offsets}
    return json.dumps(tensors, separators=(",", ":")).encode()


def _longest_chunks(number: int, key_bytes: int, raw_bytes: int, codec: str) -> list[StoredChunk]:
    """Return chunks of which the second is at least as long in a header as any of a pack of `raw_bytes`."""
    chunk_bytes = min(raw_bytes, MAX_CHUNK_BYTES)
    return [
        StoredChunk(
            key=position.to_bytes(key_bytes, "big"),
            pack_id="",
            offset=position * raw_bytes,
            stored_bytes=chunk_bytes,
            raw_bytes=chunk_bytes,
            codec=codec,
            checksum=2**64 - 1,
        )
        for position in range(number)
    ]


def _stored_chunk(
    pack_id: str, data_offset: int, name: str, tensor: dict[str, Any], facts: dict[str, Any]
) -> StoredChunk:
    start, end = (int(offset) for offset in tensor["data_offsets"])
    if start < 0 or end < start:
        raise ValueError(f"tensor {name} spans {start}..{end}")
    return StoredChunk(
        key=bytes.fromhex(name),
        pack_id=pack_id,
        offset=data_offset + start,
        stored_bytes=end - start,
        raw_bytes=int(facts["raw_bytes"]),
        codec=str(facts["codec"]),
        checksum=int(facts["xxh3_64"], 16),
    )
