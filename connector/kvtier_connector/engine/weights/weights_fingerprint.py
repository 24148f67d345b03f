"""The fingerprint of weight files: cheap to compute, and different after any real change of the weights."""

import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from kvtier.core.limits import MAX_SAFETENSORS_HEADER_BYTES
from kvtier_connector.engine.cache_file import read_cache, write_cache
from kvtier_connector.settings import WeightsFingerprint

MIN_AGE_NS = 2 * 10**9
"""How long ago a file's last change must be when it is read: the clocks of file systems tick up to a second."""
_SAMPLE_BYTES = 4096
_SAFETENSORS, _OTHERS = (".safetensors",), (".bin", ".pt", ".pth", ".gguf")
_PYTORCH_FORMATS = frozenset({"pt", "npcache"})


def local_files(name: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the folder (or file) of a model or LoRA adapter, without going online.

    Raises:
        OSError: It is neither a path nor in the Hugging Face cache.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as exc:  # huggingface_hub has a dozen of its own; all mean "not here"
        raise FileNotFoundError(2, "neither a folder nor in the Hugging Face cache", name) from exc


def weight_files(model: Path, load_format: str = "auto") -> list[Path]:
    """Return a model's weight files in name order, of the format that vLLM prefers if there are several."""
    if model.is_file():
        return [model]
    for suffixes in (_OTHERS, _SAFETENSORS) if load_format in _PYTORCH_FORMATS else (_SAFETENSORS, _OTHERS):
        if files := sorted(path for path in model.iterdir() if path.suffix in suffixes):
            return files
    return []


def fingerprint_files(files: Sequence[Path], mode: WeightsFingerprint, cache_path: Path) -> list[dict[str, object]]:
    """Return name, size and content digest of each file.

    Digests of unchanged files are kept in one JSON file, best effort: one that cannot be read is computed again. That
    of a file that changed just before it was read, or meanwhile, is not kept: a later change might not show in its
    times.

    Raises:
        OSError: A file cannot be read.
    """
    known = read_cache(cache_path)
    digests, entries = dict(known), list[dict[str, object]]()
    for path in files:
        began_ns, stat = time.time_ns(), path.stat()
        identity = _identity(path, stat, mode)
        digest = digests.get(identity)
        if digest is None:
            digest = file_digest(path, mode)
            if stat.st_ctime_ns + MIN_AGE_NS <= began_ns and _identity(path, path.stat(), mode) == identity:
                digests[identity] = digest
        entries.append({"name": path.name, "size": stat.st_size, "digest": digest})
    if digests != known:
        write_cache(cache_path, digests)
    return entries


def _identity(path: Path, stat: os.stat_result, mode: WeightsFingerprint) -> str:
    return f"{mode.value}:{path.absolute()}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}:{stat.st_size}"


def file_digest(path: Path, mode: WeightsFingerprint) -> str:
    """Return a SHA-256 over all bytes, or over the header and samples of every tensor.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        if mode is WeightsFingerprint.FULL:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        for offset, length in _sampled_ranges(file, path, digest):
            file.seek(offset)
            digest.update(file.read(length))
    return digest.hexdigest()


def _sampled_ranges(file: BinaryIO, path: Path, digest: "hashlib._Hash") -> Iterator[tuple[int, int]]:
    """Yield the byte ranges to sample; a safetensors header goes into the digest whole."""
    size = path.stat().st_size
    tensors = _safetensors_ranges(file, size, digest) if path.suffix == ".safetensors" else None
    if tensors is None:
        yield from _spread(0, size, 256)
        return
    for begin, end in tensors:
        yield from _spread(begin, end, 3)


def _safetensors_ranges(file: BinaryIO, size: int, digest: "hashlib._Hash") -> list[tuple[int, int]] | None:
    """Return the tensors' byte ranges in the file, or None when it is not a safetensors file."""
    prefix = file.read(8)
    if len(prefix) < 8:
        return None
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > min(size, MAX_SAFETENSORS_HEADER_BYTES):
        return None
    header = file.read(header_bytes)
    try:
        entries = json.loads(header)
        offsets = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    digest.update(header)
    base = 8 + header_bytes
    return sorted((base + begin, base + end) for begin, end in offsets)


def _spread(begin: int, end: int, num_samples: int) -> Iterator[tuple[int, int]]:
    """Yield evenly spread samples of [begin, end), first and last bytes included."""
    if end - begin <= num_samples * _SAMPLE_BYTES:
        yield begin, end - begin
        return
    stride = (end - begin - _SAMPLE_BYTES) / (num_samples - 1)
    for sample in range(num_samples):
        yield begin + int(sample * stride), _SAMPLE_BYTES
