"""Bundles for tests, made without a daemon."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import zstandard

from kvtier.bundles.bundle import Bundle, BundleChunk, check_length
from kvtier.bundles.bundle_format import DIGEST_BYTES, build_front, read_front
from kvtier.bundles.spool import Spool
from kvtier.core.stored import StoredChunk
from kvtier.core.tokens import TokenIds
from kvtier.disk.base import checksum_of
from kvtier.errors import BundleDamagedError
from kvtier.prompts.book import RequestedPin
from tests.fakes.chunks import key_of, layout_of, soft

LAYOUT = layout_of(useful_bytes=1000)
_OLD_BUNDLES = Path(__file__).parents[1] / "data" / "bundles"
FIRST_CHUNK = key_of(0).hex()


def a_bundle(*, codec: str = "zstd", recipe_json: str = "", priority: int = 0) -> tuple[Bundle, bytes]:
    """Return a bundle of three chunks, which lie behind each other at no particular place, and their bytes."""
    chunks, data = [], b""
    for number in range(3):
        payload = soft(1000, number)
        stored = zstandard.ZstdCompressor().compress(payload)
        chunk = StoredChunk(
            key=key_of(number),
            pack_id="",
            offset=len(data),
            stored_bytes=len(stored),
            raw_bytes=1000,
            codec=codec,
            checksum=checksum_of([memoryview(payload)]),
        )
        chunks.append(BundleChunk(chunk, hashlib.sha256(stored).digest()))
        data += stored
    bundle = Bundle(
        prompt=RequestedPin(name="p", tokens=TokenIds(range(48)), recipe_json=recipe_json, priority=priority),
        model="m",
        fingerprint={"weights": "1"},
        layout=LAYOUT,
        covered_tokens=48,
        chunks=chunks,
    )
    return bundle, data


def bundle_bytes(**changes: Any) -> bytes:
    """Return the file of a bundle of three chunks."""
    bundle, data = a_bundle(**changes)
    return build_front(bundle) + data


def read_bundle(data: bytes, folder: Path) -> Bundle:
    """Take a bundle apart as an import does, and verify every chunk."""
    with Spool(folder) as spool:
        spool.append(data)
        bundle = read_front(data, spool.pack_id)
        if isinstance(bundle, int):
            raise BundleDamagedError(f"it is cut short: {len(data)} bytes of {bundle}")
        check_length(bundle, len(data))
        spool.verify(bundle.chunks)
        return bundle


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a bundle's header and all that follows it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def sealed(header: dict[str, Any], data: bytes) -> bytes:
    """Return a bundle with this header, whose digest is right where there is a place for one."""
    text = json.dumps(header, separators=(",", ":")).encode()
    start = len(text).to_bytes(8, "little") + text
    try:
        at = int(header["kvtier.digest"]["data_offsets"][0])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        at = -1
    if not 0 <= at <= len(data) - DIGEST_BYTES:
        return start + data
    return start + data[:at] + hashlib.sha256(start + data[:at]).digest() + data[at + DIGEST_BYTES :]


def old_bundle(version: int) -> bytes:
    """Return a bundle that a kvtier of this older version of the format exported."""
    return (_OLD_BUNDLES / f"v{version}.bundle").read_bytes()


def opened_old(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return an old bundle's header, the JSON inside of it too, and all that follows it."""
    header, data = opened(data)
    for field in ("kvtier.prompt", "kvtier.fingerprint", "kvtier.layout", "kvtier.binding", "kvtier.chunks"):
        header["__metadata__"][field] = json.loads(header["__metadata__"][field])
    return header, data


def sealed_old(header: dict[str, Any], data: bytes) -> bytes:
    """Return a bundle of version 1 or 2 with this header, in whose metadata JSON may be given as what it means."""
    header = copy.deepcopy(header)
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict):
        for field, value in metadata.items():
            if field.startswith("kvtier.") and not isinstance(value, str):
                metadata[field] = json.dumps(value)
        if "kvtier.digest" in metadata:
            metadata["kvtier.digest"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    start = len(text).to_bytes(8, "little") + text
    return start.replace(b"0" * 64, hashlib.sha256(start).hexdigest().encode(), 1) + data
