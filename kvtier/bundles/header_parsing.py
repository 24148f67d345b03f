"""From a bundle's header to typed, bounded values: whatever somebody wrote there, what is returned can be recorded.

Blocks, and takes a while for long headers: for worker threads.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from kvtier.bundles.bundle_format import (
    DATA_ALIGNMENT_BYTES,
    DIGEST,
    DIGEST_MARK,
    FORMAT_VERSION,
    LENGTH_PREFIX,
    MAX_HEADER_BYTES,
    META,
    VERSION,
    ZEROS,
    Bundle,
    BundleChunk,
    BundlePrompt,
)
from kvtier.bundles.header_json import read_json, read_list, read_object
from kvtier.core import limits
from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier.errors import BundleDamagedError, InvalidArgumentError

_TEXTS = ("name", "model", "lora_name", "lora_path", "cache_salt")
_PROMPT_FIELDS = {*_TEXTS, "tokens", "recipe_json"}
_METADATA = {
    VERSION,
    DIGEST,
    "kvtier.prompt",
    "kvtier.namespace",
    "kvtier.model",
    "kvtier.fingerprint",
    "kvtier.layout",
    "kvtier.binding",
    "kvtier.chunks",
}
_VERSION_DIGITS = re.compile(r"[0-9]{1,6}", re.ASCII)
_CODEC = limits.Text(64, may_be_empty=False)
_BYTES = limits.Whole(0, 2**48)
_OBJECTS_PER_CHUNK = 4
_NOT_A_BUNDLE = "its header is no bundle's; was it made by `kvtier export`?"


def header_bytes_of(prefix: bytes, file_bytes: int | None = None) -> int:
    """Return N from the first 8 bytes.

    Args:
        prefix: The first 8 bytes, or more.
        file_bytes: Length of the whole file, where it is known.

    Raises:
        BundleDamagedError: N cannot be.
    """
    if len(prefix) < LENGTH_PREFIX.size:
        raise BundleDamagedError(f"it has {len(prefix)} bytes, a bundle has at least {DATA_ALIGNMENT_BYTES}")
    (header_bytes,) = LENGTH_PREFIX.unpack_from(prefix)
    if header_bytes > 2**32:
        raise BundleDamagedError("it does not begin like a bundle; was it made by `kvtier export`?")
    if header_bytes > MAX_HEADER_BYTES:
        raise BundleDamagedError(f"its header has {header_bytes} bytes, at most {MAX_HEADER_BYTES} are supported")
    if file_bytes is not None and header_bytes > file_bytes - LENGTH_PREFIX.size:
        raise BundleDamagedError(f"it is cut short: {file_bytes} bytes, its header alone needs {header_bytes + 8}")
    return int(header_bytes)


def parse_header(start: bytes) -> Bundle:
    """Return what a bundle's header says, after checking its digest.

    Args:
        start: The first 8 + N bytes.

    Raises:
        BundleDamagedError: It is no bundle's, or changed, of a newer version, or a field of it cannot be used.
    """
    tensors, metadata = _read(start)
    _check_version(metadata)
    _check_digest(start, metadata.get(DIGEST))
    try:
        return _parse(tensors, metadata)
    except InvalidArgumentError as exc:
        raise BundleDamagedError(f"in its header, {exc}") from exc


def check_length(bundle: Bundle, data_offset: int, file_bytes: int) -> None:
    """Compare a bundle's length with what its header says.

    Raises:
        BundleDamagedError: It is shorter, or longer.
    """
    end = data_offset + bundle.data_bytes
    if end != file_bytes:
        what = "it is cut short" if file_bytes < end else "something follows its end"
        raise BundleDamagedError(f"{what}: {file_bytes} bytes, its header says {end}")


def _read(start: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    if start.count(b"{") + start.count(b"[") > _OBJECTS_PER_CHUNK * (limits.MAX_KEYS + 1):
        raise BundleDamagedError(_NOT_A_BUNDLE)  # millions of empty lists, say, which take a gigabyte of memory
    try:
        tensors = read_json("header", start[LENGTH_PREFIX.size :].decode())
        metadata = read_object(META, tensors.pop(META, None))
    except (InvalidArgumentError, UnicodeDecodeError) as exc:
        raise BundleDamagedError(_NOT_A_BUNDLE) from exc
    return tensors, metadata


def _check_version(metadata: Mapping[str, Any]) -> None:
    version = metadata.get(VERSION)
    if not isinstance(version, str) or not _VERSION_DIGITS.fullmatch(version) or not int(version):
        raise BundleDamagedError(_NOT_A_BUNDLE)
    if int(version) > FORMAT_VERSION:
        raise BundleDamagedError(f"its format version is {version}, this kvtier knows {FORMAT_VERSION}; upgrade kvtier")


def _check_digest(start: bytes, stated: object) -> None:
    digest = stated if isinstance(stated, str) and stated.isascii() else ""
    marked = DIGEST_MARK + digest.encode()
    blank = start.replace(marked, DIGEST_MARK + ZEROS.encode(), 1)
    if len(digest) != len(ZEROS) or marked not in start or hashlib.sha256(blank).hexdigest() != digest:
        raise BundleDamagedError("its header is not what was written (digest differs); copy it again")


def _parse(tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> Bundle:
    _check_fields(META, metadata, _METADATA)
    prompt = _parse_prompt(read_json("kvtier.prompt", metadata["kvtier.prompt"]))
    layout = read_json("kvtier.layout", metadata["kvtier.layout"])
    groups = [read_object("kvtier.layout.groups", each) for each in read_list("groups", layout.pop("groups", None))]
    binding = read_json("kvtier.binding", metadata["kvtier.binding"])
    _check_fields("kvtier.binding", binding, {"keys", "covered_tokens"})
    bundle = Bundle(
        prompt=prompt,
        model=limits.TEXT.check("kvtier.model", metadata["kvtier.model"]),
        fingerprint=limits.check_fingerprint(
            "kvtier.fingerprint", read_json("kvtier.fingerprint", metadata["kvtier.fingerprint"])
        ),
        layout=limits.read_layout("kvtier.layout", layout, groups),
        keys=_parse_keys("kvtier.binding.keys", binding["keys"]),
        covered_tokens=limits.Whole(0, len(prompt.tokens)).check(
            "kvtier.binding.covered_tokens", binding["covered_tokens"]
        ),
        chunks=_parse_chunks(tensors, read_json("kvtier.chunks", metadata["kvtier.chunks"])),
    )
    limits.check_keys("kvtier.binding.keys", bundle.keys, bundle.layout)
    if bundle.namespace_id != metadata["kvtier.namespace"]:
        raise InvalidArgumentError("kvtier.namespace", metadata["kvtier.namespace"], "is not that of its fingerprint")
    if {chunk.key for chunk in bundle.chunks} != set(bundle.keys):
        raise InvalidArgumentError("kvtier.chunks", f"{len(bundle.chunks)} of them", "are not those of the binding")
    for chunk in bundle.chunks:
        expected = bundle.layout.payload_bytes(group_idx_of(chunk.key))
        if chunk.raw_bytes != expected:
            field = f"kvtier.chunks.{chunk.key.hex()}.raw_bytes"
            raise InvalidArgumentError(field, chunk.raw_bytes, f"one of this layout has {expected}")
    return bundle


def _check_fields(field: str, fields: Mapping[str, Any], known: set[str]) -> None:
    if fields.keys() != known:
        raise InvalidArgumentError(field, sorted(fields), f"must have the fields {', '.join(sorted(known))}")


def _parse_prompt(fields: Mapping[str, Any]) -> BundlePrompt:
    _check_fields("kvtier.prompt", fields, _PROMPT_FIELDS | (fields.keys() & {"priority"}))
    tokens = read_list("kvtier.prompt.tokens", fields["tokens"])
    limits.Whole(1, limits.MAX_TOKENS).check("number of kvtier.prompt.tokens", len(tokens))
    return BundlePrompt(
        **{name: limits.TEXT.check(f"kvtier.prompt.{name}", fields[name]) for name in _TEXTS},
        recipe_json=limits.RECIPE.check("kvtier.prompt.recipe_json", fields["recipe_json"]),
        tokens=tuple(limits.TOKEN.check("kvtier.prompt.tokens", token) for token in tokens),
        priority=limits.PRIORITY.check("kvtier.prompt.priority", fields.get("priority", 0)),
    )


def _parse_keys(field: str, values: object) -> tuple[ChunkKey, ...]:
    keys = read_list(field, values)
    limits.check_count(field, len(keys), limits.MAX_KEYS)
    return tuple(_parse_hex(field, key) for key in keys)


def _parse_chunks(tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[BundleChunk, ...]:
    limits.check_count("kvtier.chunks", len(tensors), limits.MAX_KEYS)
    _check_fields("kvtier.chunks", facts, set(tensors))
    spans = {name: _parse_span(name, read_object(name, tensor)) for name, tensor in tensors.items()}
    chunks: list[BundleChunk] = []
    offset = 0
    for name in sorted(spans, key=spans.__getitem__):
        start, end = spans[name]
        if start != offset:
            raise InvalidArgumentError(f"{name}.data_offsets", [start, end], f"must begin at {offset}")
        offset = end
        chunks.append(_parse_chunk(name, end - start, read_object(f"kvtier.chunks.{name}", facts[name])))
    return tuple(chunks)


def _parse_span(name: str, tensor: Mapping[str, Any]) -> tuple[int, int]:
    _check_fields(name, tensor, {"dtype", "shape", "data_offsets"})
    offsets = read_list(f"{name}.data_offsets", tensor["data_offsets"])
    if len(offsets) != 2:
        raise InvalidArgumentError(f"{name}.data_offsets", offsets, "must be two numbers")
    start = _BYTES.check(f"{name}.data_offsets", offsets[0])
    end = limits.Whole(start, _BYTES.most).check(f"{name}.data_offsets", offsets[1])
    if tensor["dtype"] != "U8" or tensor["shape"] != [end - start]:
        raise InvalidArgumentError(f"{name}.shape", tensor["shape"], f"must be U8 of {end - start} bytes")
    return start, end


def _parse_chunk(name: str, stored_bytes: int, facts: Mapping[str, Any]) -> BundleChunk:
    field = f"kvtier.chunks.{name}"
    _check_fields(field, facts, {"codec", "raw_bytes", "xxh3_64", "sha256"})
    return BundleChunk(
        key=_parse_hex(field, name),
        stored_bytes=stored_bytes,
        raw_bytes=_BYTES.check(f"{field}.raw_bytes", facts["raw_bytes"]),
        codec=_CODEC.check(f"{field}.codec", facts["codec"]),
        checksum=int.from_bytes(_parse_hex(f"{field}.xxh3_64", facts["xxh3_64"], num_bytes=8), "big"),
        sha256=_parse_hex(f"{field}.sha256", facts["sha256"], num_bytes=32).hex(),
    )


def _parse_hex(field: str, value: object, num_bytes: int | None = None) -> bytes:
    try:
        data = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        data = b""
    if not data or data.hex() != value or num_bytes not in (None, len(data)):
        raise InvalidArgumentError(field, value, f"must be {num_bytes or 'some'} bytes in hex")
    return data
