"""What a bundle says, of any version of the format, and what is checked of it whatever the version."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kvtier.bundles.safetensors_header import Tensor
from kvtier.core import limits
from kvtier.core.fingerprint import namespace_id
from kvtier.core.layout import GROUP_SUFFIX_BYTES, ChunkKey, KVLayout, group_idx_of, suffix_of
from kvtier.core.stored import StoredChunk
from kvtier.errors import BundleDamagedError, InvalidArgumentError
from kvtier.prompts.book import RequestedPin

TEXTS = ("name", "model", "lora_name", "lora_path", "cache_salt")
_LAYOUT_JSON = limits.Text(64 * 1024)
_CODEC = limits.Text(64, may_be_empty=False)


class BundleChunk(NamedTuple):
    """One chunk: where it lies in the bundle's file, or in its pack while the bundle is made; SHA-256 of its bytes."""

    stored: StoredChunk
    sha256: bytes


ChunkFacts = tuple[Tensor, object, int, bytes]
"""What a header says of a chunk: its tensor, codec, checksum, SHA-256."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """All that a bundle says but the chunks' bytes.

    Attributes:
        prompt: What is to be pinned, as the exported prompt was.
        model: For people; with `fingerprint` and `layout` of the namespace. Only an equal one may take the bundle.
        covered_tokens: Tokens of the prompt that whole chunks cover.
        chunks: In the order of the binding's keys, which is that of the data too.
    """

    prompt: RequestedPin
    model: str
    fingerprint: Mapping[str, str]
    layout: KVLayout
    covered_tokens: int
    chunks: Sequence[BundleChunk]

    @cached_property
    def namespace_id(self) -> str:
        """The id of the only namespace that may take it."""
        return namespace_id(self.fingerprint)

    @cached_property
    def data_bytes(self) -> int:
        """Stored bytes of all chunks."""
        return sum(chunk.stored.stored_bytes for chunk in self.chunks)

    @property
    def file_bytes(self) -> int:
        """Length of the file that it was read from."""
        last = self.chunks[-1].stored
        return last.offset + last.stored_bytes

    @cached_property
    def keys(self) -> tuple[ChunkKey, ...]:
        """The keys by which the engines of its namespace recognize the prompt."""
        return tuple(chunk.stored.key for chunk in self.chunks)

    @cached_property
    def stored(self) -> Mapping[ChunkKey, StoredChunk]:
        """Where each chunk's stored bytes lie, by key."""
        return {chunk.stored.key: chunk.stored for chunk in self.chunks}


def check_length(bundle: Bundle, num_bytes: int) -> None:
    """Raise BundleDamagedError unless a bundle's file is as long as its header says."""
    if num_bytes != bundle.file_bytes:
        what = "it is cut short" if num_bytes < bundle.file_bytes else "something follows its end"
        raise BundleDamagedError(f"{what}: {num_bytes} bytes, its header says {bundle.file_bytes}")


def assemble(
    metadata: Mapping[str, str],
    *,
    prompt: Mapping[str, Any],
    fingerprint: Mapping[str, str],
    covered_tokens: int,
    chunks: Iterable[ChunkFacts],
    data_offset: int,
    pack_id: str,
) -> Bundle:
    """Return what a header says, once everything in it is within its bounds and its parts fit each other.

    Args:
        metadata: Of the header: every version has model, layout and namespace in the same fields of it.
        prompt: The fields of `RequestedPin`.
        fingerprint: Of the namespace.
        covered_tokens: See `Bundle`.
        chunks: In the order of the file.
        data_offset: Where the bytes of the first chunk begin.
        pack_id: What the chunks are to name as their pack.

    Raises:
        InvalidArgumentError: A field cannot be used; names it.
    """
    layout, namespace, read = _read_layout(metadata["kvtier.layout"]), metadata["kvtier.namespace"], []
    for tensor, codec, checksum, sha256 in chunks:
        read.append(BundleChunk(_read_chunk(tensor, data_offset, layout, pack_id, codec, checksum), sha256))
        data_offset += tensor.num_bytes
    bundle = Bundle(
        prompt=RequestedPin(**prompt),
        model=limits.TEXT.check("kvtier.model", metadata["kvtier.model"]),
        fingerprint=limits.check_fingerprint("kvtier.fingerprint", fingerprint),
        layout=layout,
        covered_tokens=covered_tokens,
        chunks=read,
    )
    num_tokens = limits.Whole(1, limits.MAX_TOKENS).check("number of tokens", len(bundle.prompt.tokens))
    limits.Whole(1, num_tokens).check("covered_tokens", covered_tokens)
    limits.check_keys("chunk keys", bundle.keys, layout)
    _check_num_keys(bundle)
    if bundle.namespace_id != namespace:
        raise InvalidArgumentError("kvtier.namespace", namespace, "is not that of its fingerprint")
    return bundle


def _check_num_keys(bundle: Bundle) -> None:
    """Refuse more chunks than the tokens have: quotas go by tokens."""
    suffixes = [key[-GROUP_SUFFIX_BYTES:] for key in bundle.keys]
    for group in bundle.layout.groups:
        found, most = suffixes.count(suffix_of(group.group_idx)), group.reachable_chunks(bundle.covered_tokens)
        if found > most:
            remedy = f"KV cache group {group.group_idx} has at most {most} of {bundle.covered_tokens} covered tokens"
            raise InvalidArgumentError("chunk keys", f"{found} of them", remedy)


def _read_layout(text: str) -> KVLayout:
    try:
        fields = dict(json.loads(_LAYOUT_JSON.check("kvtier.layout", text)))
        groups = [dict(group) for group in fields.pop("groups", ())]
    except (ValueError, TypeError, RecursionError) as exc:
        raise InvalidArgumentError("kvtier.layout", text, f"must be a layout's JSON ({exc})") from exc
    return limits.read_layout("kvtier.layout", fields, groups)


def _read_chunk(
    tensor: Tensor, offset: int, layout: KVLayout, pack_id: str, codec: object, checksum: int
) -> StoredChunk:
    """Return the chunk of a tensor whose bytes begin at `offset` of the file."""
    if tensor.dtype != "U8" or len(tensor.shape) != 1:
        raise InvalidArgumentError(f"{tensor.name}.shape", tensor.shape, "must be U8 of one dimension")
    key = read_hex("chunk's name", tensor.name)
    try:
        raw_bytes = layout.payload_bytes(group_idx_of(key))
        named = _CODEC.check("kvtier.codec", codec)
        chunk = StoredChunk(key, pack_id, offset, tensor.num_bytes, raw_bytes, named, checksum)
    except ValueError as exc:
        raise InvalidArgumentError(f"{tensor.name}.shape", tensor.shape, str(exc)) from exc
    if chunk.stored_bytes > 2 * raw_bytes:  # no codec stores more than the payload has, and it is read at once
        raise InvalidArgumentError(f"{tensor.name}.shape", tensor.shape, f"is too long for {raw_bytes} bytes of KV")
    return chunk


def read_hex(field: str, value: object, num_bytes: int | None = None) -> bytes:
    """Return bytes from lower-case hex; raises InvalidArgumentError for anything else, or another length."""
    try:
        data = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        data = b""
    if not data or data.hex() != value or num_bytes not in (None, len(data)):
        raise InvalidArgumentError(field, value, f"must be {num_bytes or 'some'} bytes in lower-case hex")
    return data
