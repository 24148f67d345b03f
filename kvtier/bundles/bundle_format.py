"""The bytes of a bundle, without I/O. Like a pack, a bundle is a valid safetensors file.

    0           header length N, 8 bytes little endian
    8           header: JSON, padded with spaces; 8 + N is a multiple of 4096
    8 + N       stored bytes of the chunks, back to back, each a 1-D uint8 tensor named by its key in hex

`__metadata__` has what an import needs: the prompt, the fingerprint, the layout, the binding's keys, and of every
chunk codec, lengths, the payload's xxh3_64 and the stored bytes' SHA-256. `kvtier.digest` is the SHA-256 of the first
8 + N bytes with its own 64 digits taken as zeros. So every byte of the file is under a digest.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.core.fingerprint import namespace_id
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.errors import BundleDamagedError, InvalidArgumentError
from kvtier.ledger.rows import decode_layout, encode_layout

FORMAT_VERSION = 2
"""Version 1 had no priorities. A prompt that has none is written as 1, so that an older kvtier can take it in."""
DATA_ALIGNMENT_BYTES = 4096
LENGTH_PREFIX = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit. Source: safetensors 0.8.0, tensor.rs, MAX_HEADER_SIZE."""

_META = "__metadata__"
_VERSION = "kvtier.bundle"
_DIGEST = "kvtier.digest"
_DIGEST_MARK = b'"kvtier.digest":"'
_ZEROS = "0" * 64


@dataclass(frozen=True, kw_only=True)
class BundlePrompt:
    """The prompt as it was pinned; see `PromptRow`."""

    name: str
    tokens: tuple[int, ...]
    model: str
    lora_name: str
    lora_path: str
    cache_salt: str
    recipe_json: str
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class BundleChunk:
    """One chunk; chunks lie back to back in the order of their entries.

    Attributes:
        checksum: xxh3_64 of the payload, before the codec.
        sha256: Of the stored bytes, hex.
    """

    key: ChunkKey
    stored_bytes: int
    raw_bytes: int
    codec: str
    checksum: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """All that a bundle's header says.

    Attributes:
        prompt: What is pinned.
        model: Of the namespace, for people.
        fingerprint: Of the namespace; only an equal one may take the bundle.
        layout: Of the namespace.
        keys: The binding's, in the engine's order.
        covered_tokens: Tokens of the prompt that whole chunks cover.
        chunks: Each key once, in the order of the data.
    """

    prompt: BundlePrompt
    model: str
    fingerprint: Mapping[str, str]
    layout: KVLayout
    keys: tuple[ChunkKey, ...]
    covered_tokens: int
    chunks: tuple[BundleChunk, ...]

    @property
    def namespace_id(self) -> str:
        """The id of the only namespace that may take it."""
        return namespace_id(self.fingerprint)

    @property
    def data_bytes(self) -> int:
        """Stored bytes of all chunks."""
        return sum(chunk.stored_bytes for chunk in self.chunks)

    def offsets(self, data_offset: int) -> Iterable[tuple[int, BundleChunk]]:
        """Yield where in the file each chunk's stored bytes begin."""
        for chunk in self.chunks:
            yield data_offset, chunk
            data_offset += chunk.stored_bytes


def build_header(bundle: Bundle) -> bytes:
    """Return all bytes in front of the data.

    Raises:
        InvalidArgumentError: More chunks than a header may name.
    """
    text = _header_json(bundle)
    room = -(-(LENGTH_PREFIX.size + len(text)) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES - LENGTH_PREFIX.size
    if room > MAX_HEADER_BYTES:
        raise InvalidArgumentError("prompt", bundle.prompt.name, f"{len(bundle.keys)} chunks are too many for a bundle")
    blank = LENGTH_PREFIX.pack(room) + text.ljust(room)
    digest = hashlib.sha256(blank).hexdigest()
    return blank.replace(_DIGEST_MARK + _ZEROS.encode(), _DIGEST_MARK + digest.encode(), 1)


def header_bytes_of(prefix: bytes, file_bytes: int) -> int:
    """Return N from the first 8 bytes.

    Raises:
        BundleDamagedError: N cannot be.
    """
    if len(prefix) < LENGTH_PREFIX.size:
        raise BundleDamagedError(f"it has {file_bytes} bytes, a bundle has at least {DATA_ALIGNMENT_BYTES}")
    (header_bytes,) = LENGTH_PREFIX.unpack_from(prefix)
    if header_bytes > MAX_HEADER_BYTES:
        raise BundleDamagedError("it does not begin like a bundle; was it made by `kvtier export`?")
    if header_bytes > file_bytes - LENGTH_PREFIX.size:
        raise BundleDamagedError(f"it is cut short: {file_bytes} bytes, its header alone needs {header_bytes + 8}")
    return int(header_bytes)


def parse_header(start: bytes, file_bytes: int) -> Bundle:
    """Return what a bundle's header says, after checking its digest and the file's length.

    Args:
        start: The first 8 + N bytes.
        file_bytes: Length of the whole file.

    Raises:
        BundleDamagedError: It is not a bundle, or not whole, or changed, or of a newer version.
    """
    try:
        tensors = json.loads(start[LENGTH_PREFIX.size :])
        metadata = tensors.pop(_META)
        version = int(metadata[_VERSION])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise BundleDamagedError("its header is no bundle's; was it made by `kvtier export`?") from exc
    if version > FORMAT_VERSION:
        raise BundleDamagedError(f"its format version is {version}, this kvtier knows {FORMAT_VERSION}; upgrade kvtier")
    _check_digest(start, str(metadata.get(_DIGEST)))
    try:
        bundle = _parse(tensors, metadata)
    except (ValueError, KeyError, TypeError, AttributeError, InvalidArgumentError) as exc:
        raise BundleDamagedError(f"its header makes no sense ({type(exc).__name__}: {exc})") from exc
    end = len(start) + bundle.data_bytes
    if end != file_bytes:
        what = "it is cut short" if file_bytes < end else "something follows its end"
        raise BundleDamagedError(f"{what}: {file_bytes} bytes, its header says {end}")
    return bundle


def _check_digest(start: bytes, stated: str) -> None:
    marked = _DIGEST_MARK + stated.encode()
    blank = start.replace(marked, _DIGEST_MARK + _ZEROS.encode(), 1)
    if len(stated) != len(_ZEROS) or marked not in start or hashlib.sha256(blank).hexdigest() != stated:
        raise BundleDamagedError("its header is not what was written (digest differs); copy it again")


def _header_json(bundle: Bundle) -> bytes:
    facts = {
        chunk.key.hex(): {
            "codec": chunk.codec,
            "raw_bytes": chunk.raw_bytes,
            "xxh3_64": f"{chunk.checksum:016x}",
            "sha256": chunk.sha256,
        }
        for chunk in bundle.chunks
    }
    prompt = {name: getattr(bundle.prompt, name) for name in BundlePrompt.__dataclass_fields__}
    if not bundle.prompt.priority:
        del prompt["priority"]
    binding = {"keys": [key.hex() for key in bundle.keys], "covered_tokens": bundle.covered_tokens}
    metadata = {
        _VERSION: str(FORMAT_VERSION if bundle.prompt.priority else 1),
        _DIGEST: _ZEROS,
        "kvtier.prompt": _compact(prompt),
        "kvtier.namespace": bundle.namespace_id,
        "kvtier.model": bundle.model,
        "kvtier.fingerprint": _compact(dict(bundle.fingerprint)),
        "kvtier.layout": encode_layout(bundle.layout),
        "kvtier.binding": _compact(binding),
        "kvtier.chunks": _compact(facts),
    }
    tensors: dict[str, Any] = {_META: metadata}
    for offset, chunk in bundle.offsets(0):
        end = offset + chunk.stored_bytes
        tensors[chunk.key.hex()] = {"dtype": "U8", "shape": [chunk.stored_bytes], "data_offsets": [offset, end]}
    return _compact(tensors).encode()


def _parse(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> Bundle:
    binding = json.loads(metadata["kvtier.binding"])
    facts = json.loads(metadata["kvtier.chunks"])
    bundle = Bundle(
        prompt=_parse_prompt(json.loads(metadata["kvtier.prompt"])),
        model=metadata["kvtier.model"],
        fingerprint=json.loads(metadata["kvtier.fingerprint"]),
        layout=decode_layout(metadata["kvtier.layout"]),
        keys=tuple(bytes.fromhex(key) for key in binding["keys"]),
        covered_tokens=int(binding["covered_tokens"]),
        chunks=_parse_chunks(tensors, facts),
    )
    if bundle.namespace_id != metadata["kvtier.namespace"]:
        raise ValueError("the namespace id is not its fingerprint's")
    if {chunk.key for chunk in bundle.chunks} != set(bundle.keys) or not bundle.keys:
        raise ValueError("the chunks are not those of the binding")
    return bundle


def _parse_prompt(fields: Mapping[str, Any]) -> BundlePrompt:
    tokens = tuple(int(token) for token in fields["tokens"])
    return BundlePrompt(**{**fields, "tokens": tokens, "priority": int(fields.get("priority", 0))})


def _parse_chunks(tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[BundleChunk, ...]:
    names = sorted(tensors, key=lambda name: tensors[name]["data_offsets"])
    chunks: list[BundleChunk] = []
    offset = 0
    for name in names:
        start, end = tensors[name]["data_offsets"]
        if start != offset or end < start:
            raise ValueError(f"chunk {name} spans {start}..{end}, expected to begin at {offset}")
        offset = end
        chunks.append(_parse_chunk(name, end - start, facts[name]))
    return tuple(chunks)


def _parse_chunk(name: str, stored_bytes: int, facts: Mapping[str, Any]) -> BundleChunk:
    return BundleChunk(
        key=bytes.fromhex(name),
        stored_bytes=stored_bytes,
        raw_bytes=int(facts["raw_bytes"]),
        codec=str(facts["codec"]),
        checksum=int(facts["xxh3_64"], 16),
        sha256=str(facts["sha256"]),
    )


def _compact(value: Mapping[str, Any] | Sequence[Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
