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
from functools import cached_property
from typing import Any

from kvtier.core.fingerprint import namespace_id
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.errors import InvalidArgumentError
from kvtier.ledger.rows import encode_layout

FORMAT_VERSION = 2
"""Version 1 had no priorities. A prompt that has none is written as 1, so that an older kvtier can take it in."""
DATA_ALIGNMENT_BYTES = 4096
LENGTH_PREFIX = struct.Struct("<Q")
MAX_HEADER_BYTES = 32 * 1024**2
"""A chunk takes some 460 bytes of it and a token 7: a prompt of 900,000 tokens in chunks of 16 fits, one of 3 million
in those of 128. Reading a header takes ten times its length in memory, and 0.1 to 0.3 s of a thread for each MiB."""

META = "__metadata__"
VERSION = "kvtier.bundle"
DIGEST = "kvtier.digest"
DIGEST_MARK = b'"kvtier.digest":"'
ZEROS = "0" * 64


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


@dataclass(frozen=True, kw_only=True, slots=True)
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

    @cached_property
    def namespace_id(self) -> str:
        """The id of the only namespace that may take it."""
        return namespace_id(self.fingerprint)

    @cached_property
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
        remedy = (
            f"{len(bundle.keys)} chunks and {len(bundle.prompt.tokens)} tokens are too many for a bundle, whose header "
            f"has at most {MAX_HEADER_BYTES} bytes; larger chunks (blocks_per_chunk) need less of it"
        )
        raise InvalidArgumentError("prompt", bundle.prompt.name, remedy)
    blank = LENGTH_PREFIX.pack(room) + text.ljust(room)
    digest = hashlib.sha256(blank).hexdigest()
    return blank.replace(DIGEST_MARK + ZEROS.encode(), DIGEST_MARK + digest.encode(), 1)


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
        VERSION: str(FORMAT_VERSION if bundle.prompt.priority else 1),
        DIGEST: ZEROS,
        "kvtier.prompt": _compact(prompt),
        "kvtier.namespace": bundle.namespace_id,
        "kvtier.model": bundle.model,
        "kvtier.fingerprint": _compact(dict(bundle.fingerprint)),
        "kvtier.layout": encode_layout(bundle.layout),
        "kvtier.binding": _compact(binding),
        "kvtier.chunks": _compact(facts),
    }
    tensors: dict[str, Any] = {META: metadata}
    for offset, chunk in bundle.offsets(0):
        end = offset + chunk.stored_bytes
        tensors[chunk.key.hex()] = {"dtype": "U8", "shape": [chunk.stored_bytes], "data_offsets": [offset, end]}
    return _compact(tensors).encode()


def _compact(value: Mapping[str, Any] | Sequence[Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
