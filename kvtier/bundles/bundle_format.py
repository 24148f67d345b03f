"""The front of a bundle, without I/O: header and index, all that lies before the chunks' bytes. See docs/format.md.

A bundle is a safetensors file. Texts and numbers are metadata; what grows with the prompt is a tensor, so that making
and reading the header takes no call that holds Python's lock for long. First come the tensors of the index, then one
U8 tensor for each chunk: its stored bytes, named by its key in hex, in the engine's order. `kvtier.digest`, the last
of the index, is the SHA-256 of every byte before it, `kvtier.sha256` has those of the chunks: no byte is without one.
"""

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from kvtier.bundles.bundle import TEXTS, Bundle, assemble
from kvtier.bundles.old_bundles import read_old_bundle
from kvtier.bundles.safetensors_header import (
    LENGTH_PREFIX,
    Tensor,
    build_header,
    header_end,
    read_metadata,
    read_tensors,
)
from kvtier.core import limits
from kvtier.core.tokens import TokenIds
from kvtier.errors import BundleDamagedError, BundleTooNewError, InvalidArgumentError
from kvtier.ledger.rows import encode_layout, encode_tokens

FORMAT_VERSION = 3
"""1, and 2 with a priority, kept everything in the metadata: see `old_bundles`."""
VERSION = "kvtier.bundle"
DECODED = "kvtier.decoded"
DIGEST_BYTES = 32

_NUM_INDEX = 6
_FINGERPRINT = "kvtier.fingerprint."
_PROMPT = "kvtier.prompt."
_NUMBERS = ("priority", "covered_tokens")
_METADATA = {VERSION, "kvtier.model", "kvtier.namespace", "kvtier.layout", "kvtier.codecs"}
_METADATA |= {_PROMPT + name for name in (*TEXTS, *_NUMBERS)}
_VERSION_DIGITS = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,9}", re.ASCII)


def describe(bundle: Bundle) -> dict[str, str]:
    """Return the metadata that says what the bundle is of."""
    numbers = {"priority": bundle.prompt.priority or 0, "covered_tokens": bundle.covered_tokens}
    return {
        **{_PROMPT + name: getattr(bundle.prompt, name) for name in TEXTS},
        **{_PROMPT + name: str(number) for name, number in numbers.items()},
        "kvtier.model": bundle.model,
        "kvtier.namespace": bundle.namespace_id,
        "kvtier.layout": encode_layout(bundle.layout),
        **{_FINGERPRINT + name: value for name, value in bundle.fingerprint.items()},
    }


def build_front(bundle: Bundle) -> bytes:
    """Return all bytes before the first chunk's. Their number does not depend on the chunks' digests and offsets."""
    chunks, recipe = bundle.chunks, bundle.prompt.recipe_json.encode()
    codecs = sorted({chunk.stored.codec for chunk in chunks})
    numbers = {codec: number for number, codec in enumerate(codecs)}
    metadata = {VERSION: str(FORMAT_VERSION), **describe(bundle), "kvtier.codecs": ",".join(codecs)}
    tensors = _index(len(chunks), len(bundle.prompt.tokens), len(recipe))
    tensors += [Tensor(chunk.stored.key.hex(), "U8", (chunk.stored.stored_bytes,)) for chunk in chunks]
    parts = [
        build_header(metadata, tensors),
        struct.pack(f"<{len(chunks)}Q", *(chunk.stored.checksum for chunk in chunks)),
        encode_tokens(bundle.prompt.tokens),
        bytes(numbers[chunk.stored.codec] for chunk in chunks),
        b"".join(chunk.sha256 for chunk in chunks),
        recipe,
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join((*parts, digest.digest()))


def _index(num_chunks: int, num_tokens: int, recipe_bytes: int) -> list[Tensor]:
    """Return the tensors before those of the chunks: the widest numbers first, so that all are aligned."""
    return [
        Tensor("kvtier.xxh3_64", "U64", (num_chunks,)),
        Tensor("kvtier.tokens", "U32", (num_tokens,)),
        Tensor("kvtier.codec", "U8", (num_chunks,)),
        Tensor("kvtier.sha256", "U8", (num_chunks, DIGEST_BYTES)),
        Tensor("kvtier.recipe", "U8", (recipe_bytes,)),
        Tensor("kvtier.digest", "U8", (DIGEST_BYTES,)),
    ]


def read_front(start: bytes, pack_id: str) -> Bundle | int:
    """Return what a bundle's front says, or how many bytes of the file that takes, where `start` has fewer.

    Blocks, for a long front for seconds, in which other threads run.

    Args:
        start: The first bytes of the file, as many as there are or as were asked for.
        pack_id: What the chunks are to name as their pack.

    Raises:
        BundleTooNewError: It is of a newer version.
        BundleDamagedError: It is no bundle, or changed, or a field of it cannot be used.
    """
    if len(start) < LENGTH_PREFIX.size:
        return LENGTH_PREFIX.size
    end = header_end(start)
    if len(start) < end:
        return end
    view = memoryview(start)
    metadata, text, at = read_metadata(view[LENGTH_PREFIX.size : end])
    version = _version_of(metadata)
    try:
        tensors = read_tensors(text, at, limits.MAX_KEYS + _NUM_INDEX)
        if version < FORMAT_VERSION:
            return read_old_bundle(start[:end], metadata, tensors, pack_id)
        _check_index(tensors)
        front_bytes = end + sum(tensor.num_bytes for tensor in tensors[:_NUM_INDEX])
        if len(start) < front_bytes:
            return front_bytes
        data_end = front_bytes - DIGEST_BYTES
        if hashlib.sha256(view[:data_end]).digest() != view[data_end:front_bytes]:
            raise BundleDamagedError("its header is not what was written (digest differs); copy it again")
        return _read(view[end:front_bytes], front_bytes, metadata, tensors, pack_id)
    except InvalidArgumentError as exc:
        raise BundleDamagedError(f"in its header, {exc}") from exc


def _version_of(metadata: Mapping[str, str]) -> int:
    if DECODED in metadata:
        raise BundleDamagedError("it was exported with --decoded, which is for reading only; export without it")
    version = metadata.get(VERSION, "")
    if not _VERSION_DIGITS.fullmatch(version):
        raise BundleDamagedError("its header is no bundle's; was it made by `kvtier export`?")
    if int(version) > FORMAT_VERSION:
        raise BundleTooNewError(f"its format version is {version}, this kvtier knows {FORMAT_VERSION}; upgrade kvtier")
    return int(version)


def _check_index(tensors: Sequence[Tensor]) -> None:
    """Refuse an index that is not that of this many chunks, before its bytes are waited for."""
    lengths = {tensor.name: tensor.shape[0] for tensor in tensors[:_NUM_INDEX]}
    num_tokens, recipe_bytes = lengths.get("kvtier.tokens", 0), lengths.get("kvtier.recipe", 0)
    limits.Whole(1, limits.MAX_TOKENS).check("length of kvtier.tokens", num_tokens)
    limits.Whole(0, limits.RECIPE.max_bytes).check("length of kvtier.recipe", recipe_bytes)
    for found, expected in zip_longest(
        tensors[:_NUM_INDEX], _index(len(tensors) - _NUM_INDEX, num_tokens, recipe_bytes)
    ):
        if found != expected:
            raise InvalidArgumentError("index", found, f"must be {expected.dtype} of shape {expected.shape}")


def _read(
    index: memoryview, data_offset: int, metadata: Mapping[str, str], tensors: Sequence[Tensor], pack_id: str
) -> Bundle:
    fingerprint = {
        name.removeprefix(_FINGERPRINT): value for name, value in metadata.items() if name.startswith(_FINGERPRINT)
    }
    if metadata.keys() - {_FINGERPRINT + name for name in fingerprint} != _METADATA:
        raise InvalidArgumentError("__metadata__", sorted(metadata), f"must have {', '.join(sorted(_METADATA))}")
    parts: list[memoryview] = []
    for tensor in tensors[:_NUM_INDEX]:
        parts.append(index[: tensor.num_bytes])
        index = index[tensor.num_bytes :]
    checksums, tokens, codec_numbers, sha256s, recipe, _ = parts
    codecs = dict(enumerate(metadata["kvtier.codecs"].split(",")))
    chunks = zip(
        tensors[_NUM_INDEX:],
        (codecs.get(number) for number in codec_numbers),
        (checksum for (checksum,) in struct.iter_unpack("<Q", checksums)),
        (bytes(sha256s[start : start + DIGEST_BYTES]) for start in range(0, len(sha256s), DIGEST_BYTES)),
        strict=True,
    )
    prompt: dict[str, Any] = {name: metadata[_PROMPT + name] for name in TEXTS}
    prompt |= {"tokens": TokenIds.from_bytes(bytes(tokens)), "priority": _number(metadata, "priority")}
    # Bytes that are no UTF-8 become characters that UTF-8 cannot say, which `RequestedPin` refuses by name.
    prompt["recipe_json"] = str(recipe, "utf-8", "surrogateescape")
    return assemble(
        metadata,
        prompt=prompt,
        fingerprint=fingerprint,
        covered_tokens=_number(metadata, "covered_tokens"),
        chunks=chunks,
        data_offset=data_offset,
        pack_id=pack_id,
    )


def _number(metadata: Mapping[str, str], name: str) -> int:
    text = metadata[_PROMPT + name]
    if not _NUMBER.fullmatch(text):
        raise InvalidArgumentError(_PROMPT + name, text, "must be a whole number")
    return int(text)
