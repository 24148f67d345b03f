"""The header of a safetensors file: 8 bytes with its length N, N bytes of JSON, then all tensors back to back.

A header is read only in the form in which `build_header` writes it: no spaces but at its end, `__metadata__` first,
tensors in the order of their bytes. So no general JSON parser runs: a hostile header makes nothing but strings and
bounded numbers, and no call holds Python's lock for longer than one string takes.

Source: safetensors 0.8.0, README "Format" and tensor.rs: N is little endian, at most 100,000,000; offsets count from
the end of the header and leave no hole; a name comes once; metadata is a map from text to text.
"""

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in its stub
from typing import NamedTuple

from kvtier.core import limits
from kvtier.errors import BundleDamagedError, InvalidArgumentError

LENGTH_PREFIX = struct.Struct("<Q")
MAX_HEADER_BYTES = 64 * 1024**2
"""A tensor of a chunk takes at most 221 bytes of it: every prompt that may be pinned (`MAX_KEYS`) fits."""
MAX_METADATA = 128
ITEM_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "U32": 4, "F32": 4, "U64": 8}

_TENSOR = re.compile(
    r',"([^"\\]{1,256})":\{"dtype":"([A-Z0-9_]{1,16})","shape":\[([0-9]{1,15}(?:,[0-9]{1,15}){0,7})\],'
    r'"data_offsets":\[([0-9]{1,15}),([0-9]{1,15})\]\}'
)
_START = '{"__metadata__":{'
_NOT_A_BUNDLE = "its header is no bundle's; was it made by `kvtier export`?"


class Tensor(NamedTuple):
    """One tensor of a header; where its bytes begin follows from those before it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Length of its bytes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def build_header(metadata: Mapping[str, str], tensors: Iterable[Tensor]) -> bytes:
    """Return the first 8 + N bytes of a file with these tensors in this order; 8 + N is a multiple of 8."""
    parts = [_START[:-1], json.dumps(metadata, separators=(",", ":"))]
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        shape = ",".join(map(str, tensor.shape))
        parts.append(
            f',{json.dumps(tensor.name)}:{{"dtype":"{tensor.dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}'
        )
        start = end
    text = "".join((*parts, "}")).encode()
    text += b" " * (-len(text) % 8)
    return LENGTH_PREFIX.pack(len(text)) + text


def header_end(start: bytes) -> int:
    """Return 8 + N from the first 8 bytes of a file; raises BundleDamagedError for an N that no bundle has."""
    (num_bytes,) = LENGTH_PREFIX.unpack_from(start)
    if not len(_START) < num_bytes <= 2**32:
        raise BundleDamagedError("it does not begin like a bundle; was it made by `kvtier export`?")
    if num_bytes > MAX_HEADER_BYTES:
        raise BundleDamagedError(f"its header has {num_bytes} bytes, at most {MAX_HEADER_BYTES} are supported")
    return LENGTH_PREFIX.size + int(num_bytes)


def read_metadata(header: memoryview) -> tuple[dict[str, str], str, int]:
    """Return the metadata of a header, its N bytes as text, and where in the text the tensors follow.

    Raises BundleDamagedError if the header does not begin as `build_header` writes it.
    """
    metadata: dict[str, str] = {}
    try:
        text = str(header, "ascii")
        at = len(_START)
        if not text.startswith(_START):
            raise BundleDamagedError(_NOT_A_BUNDLE)
        while True:
            name, at = _read_string(text, at, ends_with=":")
            value, at = _read_string(text, at, ends_with=",}")
            if name in metadata or len(metadata) == MAX_METADATA:
                raise BundleDamagedError(_NOT_A_BUNDLE)
            metadata[name] = value
            if text[at - 1] == "}":
                return metadata, text, at
    except ValueError as exc:
        raise BundleDamagedError(_NOT_A_BUNDLE) from exc


def _read_string(text: str, at: int, ends_with: str) -> tuple[str, int]:
    """Return the JSON string at `at`, and where what follows one of `ends_with` begins."""
    if text[at : at + 1] != '"':
        raise ValueError("no string")
    value, at = scanstring(text, at + 1, True)
    if not text[at : at + 1] or text[at] not in ends_with:
        raise ValueError(f"none of {ends_with} follows a string")
    return value, at + 1


def read_tensors(text: str, at: int, max_tensors: int) -> list[Tensor]:
    """Return the tensors that follow the metadata of a header; see `read_metadata`.

    Raises:
        InvalidArgumentError: One is not as `build_header` writes it, comes twice, or does not begin where the one
            before it ends; or there are too many.
    """
    tensors: dict[str, Tensor] = {}
    offset = 0
    while match := _TENSOR.match(text, at):
        name, dtype, shape, start, end = match.groups()
        limits.check_count("tensors", len(tensors) + 1, max_tensors)
        if name in tensors:
            raise InvalidArgumentError("tensors", name, "each name may come once")
        if dtype not in ITEM_BYTES:
            raise InvalidArgumentError(f"{name}.dtype", dtype, f"use one of {', '.join(ITEM_BYTES)}")
        tensor = tensors[name] = Tensor(name, dtype, tuple(map(int, shape.split(","))))
        if (int(start), int(end)) != (offset, offset + tensor.num_bytes):
            must = f"must be {offset}, {offset + tensor.num_bytes}: behind the tensor before, as long as its shape says"
            raise InvalidArgumentError(f"{name}.data_offsets", [int(start), int(end)], must)
        at, offset = match.end(), int(end)
    if text[at:].rstrip(" ") != "}":
        form = ',"NAME":{"dtype":"U8","shape":[N],"data_offsets":[FROM,TO]}'
        raise InvalidArgumentError(f"tensor {len(tensors) + 1}", text[at : at + 120], f"must be written as {form}")
    return list(tensors.values())
