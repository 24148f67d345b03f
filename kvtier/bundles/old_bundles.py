"""Bundles of versions 1 and 2, which are read and no longer written.

Their outer form is that of any bundle. Tokens, keys and what is known of chunks is JSON in the metadata, and the digest
too: the SHA-256 of the header in which 64 zeros stand for it. Version 1 has no priority.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from json import scanner
from typing import Any

from kvtier.bundles.bundle import TEXTS, Bundle, ChunkFacts, assemble, read_hex
from kvtier.bundles.safetensors_header import Tensor
from kvtier.core import limits
from kvtier.core.tokens import TokenIds
from kvtier.errors import BundleDamagedError, InvalidArgumentError

MAX_HEADER_BYTES = 32 * 1024**2
_MAX_OBJECTS = 4 * (limits.MAX_KEYS + 1)
_DIGEST_MARK = b'"kvtier.digest":"'
_PROMPT = {*TEXTS, "tokens", "recipe_json"}
_METADATA = {
    *("kvtier.bundle", "kvtier.digest", "kvtier.prompt", "kvtier.namespace", "kvtier.model"),
    *("kvtier.fingerprint", "kvtier.layout", "kvtier.binding", "kvtier.chunks"),
}
_CHUNK = {"codec", "raw_bytes", "xxh3_64", "sha256"}


def read_old_bundle(header: bytes, metadata: Mapping[str, str], tensors: Sequence[Tensor], pack_id: str) -> Bundle:
    """Return what a header of version 1 or 2 says: the first 8 + N bytes of the file, in which each tensor is a chunk.

    Raises:
        BundleDamagedError: It is not what was written.
        InvalidArgumentError: A field of it cannot be used.
    """
    if len(header) > MAX_HEADER_BYTES + 8 or header.count(b"{") + header.count(b"[") > _MAX_OBJECTS:
        raise BundleDamagedError("its header is no bundle's; was it made by `kvtier export`?")
    _check_digest(header, metadata.get("kvtier.digest", ""))
    _check_fields("__metadata__", metadata, _METADATA)
    prompt = _read_json(metadata, "kvtier.prompt")
    _check_fields("kvtier.prompt", prompt, _PROMPT | (prompt.keys() & {"priority"}))
    binding = _read_json(metadata, "kvtier.binding")
    _check_fields("kvtier.binding", binding, {"keys", "covered_tokens"})
    names, facts = [tensor.name for tensor in tensors], _read_json(metadata, "kvtier.chunks")
    _check_fields("kvtier.chunks", facts, set(names))
    if binding["keys"] != names:
        raise InvalidArgumentError("kvtier.binding.keys", binding["keys"], "must be the names of the tensors, in order")
    bundle = assemble(
        metadata,
        prompt=prompt | {"tokens": _read_tokens(prompt["tokens"])},
        fingerprint=_read_json(metadata, "kvtier.fingerprint"),
        covered_tokens=binding["covered_tokens"],
        chunks=[_read_chunk(tensor, facts[tensor.name]) for tensor in tensors],
        data_offset=len(header),
        pack_id=pack_id,
    )
    for name, chunk in zip(names, bundle.chunks, strict=True):
        if facts[name]["raw_bytes"] != chunk.stored.raw_bytes:
            remedy = f"one of this layout has {chunk.stored.raw_bytes}"
            raise InvalidArgumentError(f"kvtier.chunks.{name}.raw_bytes", facts[name]["raw_bytes"], remedy)
    return bundle


def _check_digest(header: bytes, stated: str) -> None:
    marked = _DIGEST_MARK + stated.encode("ascii", "replace")
    blank = header.replace(marked, _DIGEST_MARK + b"0" * 64, 1)
    if len(stated) != 64 or marked not in header or hashlib.sha256(blank).hexdigest() != stated:
        raise BundleDamagedError("its header is not what was written (digest differs); copy it again")


def _read_tokens(tokens: object) -> TokenIds:
    if not isinstance(tokens, list):
        raise InvalidArgumentError("kvtier.prompt.tokens", tokens, "must be a list of token ids")
    return TokenIds([limits.TOKEN.check("kvtier.prompt.tokens", token) for token in tokens])


def _read_chunk(tensor: Tensor, fact: Mapping[str, object]) -> ChunkFacts:
    field = f"kvtier.chunks.{tensor.name}"
    _check_fields(field, fact, _CHUNK)
    checksum = int.from_bytes(read_hex(f"{field}.xxh3_64", fact["xxh3_64"], 8), "big")
    return tensor, fact["codec"], checksum, read_hex(f"{field}.sha256", fact["sha256"], 32)


def _check_fields(field: str, fields: object, known: set[str]) -> None:
    if not isinstance(fields, Mapping) or fields.keys() != known:
        found = sorted(fields) if isinstance(fields, Mapping) else fields
        raise InvalidArgumentError(field, found, f"must have the fields {', '.join(sorted(known))[:400]}")


class _InterruptibleDecoder(json.JSONDecoder):
    """Python's decoder without its C scanner, which holds the interpreter's lock from the first byte to the last."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_named_once, parse_constant=_refuse_constant)
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # not in its stub


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("a name comes twice")
    return named


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_decoder = _InterruptibleDecoder()


def _read_json(metadata: Mapping[str, str], field: str) -> dict[str, Any]:
    try:
        value = _decoder.decode(metadata[field])
    except (ValueError, RecursionError) as exc:
        raise InvalidArgumentError(field, metadata[field], f"must be JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, value, "must be a JSON object")
    return value
