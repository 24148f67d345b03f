"""Bundles for tests, made without a daemon."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import zstandard

from kvtier.bundles.bundle_format import LENGTH_PREFIX, Bundle, BundleChunk, BundlePrompt, build_header
from kvtier.bundles.header_parsing import check_length, header_bytes_of
from kvtier.bundles.spool import Spool
from kvtier.disk.base import checksum_of
from tests.fakes.chunks import key_of, layout_of, soft

LAYOUT = layout_of(useful_bytes=1000)
JSON_FIELDS = ("kvtier.prompt", "kvtier.fingerprint", "kvtier.layout", "kvtier.binding", "kvtier.chunks")


def bundle_bytes(*, codec: str = "zstd", recipe_json: str = "", priority: int = 0) -> bytes:
    """Return a bundle of three chunks."""
    chunks, data = [], b""
    for number in range(3):
        payload = soft(1000, number)
        stored = zstandard.ZstdCompressor().compress(payload)
        data += stored
        chunks.append(
            BundleChunk(
                key=key_of(number),
                stored_bytes=len(stored),
                raw_bytes=1000,
                codec=codec,
                checksum=checksum_of([memoryview(payload)]),
                sha256=hashlib.sha256(stored).hexdigest(),
            )
        )
    prompt = BundlePrompt(
        name="p",
        tokens=tuple(range(48)),
        model="",
        lora_name="",
        lora_path="",
        cache_salt="",
        recipe_json=recipe_json,
        priority=priority,
    )
    bundle = Bundle(
        prompt=prompt,
        model="m",
        fingerprint={"weights": "1"},
        layout=LAYOUT,
        keys=tuple(chunk.key for chunk in chunks),
        covered_tokens=48,
        chunks=tuple(chunks),
    )
    return build_header(bundle) + data


def read_bundle(data: bytes, folder: Path) -> Bundle:
    """Take a bundle apart as an import does, and verify every chunk."""
    with Spool(folder) as spool:
        spool.append(data)
        data_offset = LENGTH_PREFIX.size + header_bytes_of(spool.read(LENGTH_PREFIX.size, 0), spool.num_bytes)
        bundle = spool.header(data_offset)
        check_length(bundle, data_offset, spool.num_bytes)
        spool.verify(list(bundle.offsets(data_offset)))
        return bundle


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a bundle's header, the JSON inside of it too, and its data."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    for field in JSON_FIELDS:
        header["__metadata__"][field] = json.loads(header["__metadata__"][field])
    return header, data[end:]


def sealed(header: dict[str, Any], data: bytes) -> bytes:
    """Return a bundle with this header, whose digest is right."""
    header = copy.deepcopy(header)
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        for field in JSON_FIELDS:
            if not isinstance(metadata.get(field, ""), str):
                metadata[field] = json.dumps(metadata[field])
        if isinstance(metadata.get("kvtier.digest"), str):
            metadata["kvtier.digest"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    start = len(text).to_bytes(8, "little") + text
    zeros = b'"kvtier.digest":"' + b"0" * 64
    digest = hashlib.sha256(start).hexdigest()
    return start.replace(zeros, b'"kvtier.digest":"' + digest.encode(), 1) + data
