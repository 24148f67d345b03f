"""LoRA adapters by content: vLLM's block hashes know an adapter's name and path only."""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier.concurrency.pauses import RETRY_S
from kvtier_connector.engine.weights_fingerprint import local_files

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt"})
_CONFIG_NAME = "adapter_config.json"

logger = logging.getLogger(__name__)


class Adapter(NamedTuple):
    """An adapter as vLLM names it."""

    name: str
    path: str  # where it is loaded from
    load_id: int = 0  # vLLM's id, another one each time the adapter is loaded; 0 for the files as they are now


class AdapterDigests:
    """Content digests of adapters, in the background, once per load; files that have not changed are read once.

    `digest` may be asked from the scheduler's thread: it reads dicts and never waits.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        self._digests: dict[Adapter, bytes | None] = {}
        self._retry_at_s: dict[Adapter, float] = {}
        self._by_files: dict[tuple[object, ...], bytes] = {}
        self._pinned: set[tuple[str, str]] = set()

    def digest(self, adapter: Adapter) -> bytes | None:
        """Return the digest, or None while it is unknown; the first question starts its computation.

        Once known it stays: it is what vLLM has loaded. Files that cannot be read are tried again every ten seconds.
        """
        digest = self._digests.get(adapter)
        if digest is None and time.monotonic() >= self._retry_at_s.get(adapter, 0.0):
            self._retry_at_s[adapter] = time.monotonic() + RETRY_S
            self._submit(lambda: self._learn(adapter))
        return digest

    def is_worth_waiting(self, adapter: Adapter) -> bool:
        """Return whether the digest is on its way and prompts are pinned with this adapter."""
        return adapter not in self._digests and (adapter.name, adapter.path) in self._pinned

    def digest_for_pin(self, adapter: Adapter) -> bytes | None:
        """Return the digest of the files as they are, read in this thread if need be; None when they cannot be read."""
        self._pinned.add((adapter.name, adapter.path))
        return self._read(adapter)

    def _read(self, adapter: Adapter) -> bytes | None:
        try:
            folder = local_files(adapter.path)
            files = adapter_files(folder)
            identity = (folder, *(_identity(path) for path in files))
            if identity not in self._by_files:
                self._by_files[identity] = adapter_digest(folder)
            return self._by_files[identity]
        except OSError as exc:
            logger.log(
                logging.DEBUG if adapter in self._digests else logging.WARNING,
                "kvtier: cannot read LoRA adapter name=%s path=%s (%s); its prompts are not cached",
                adapter.name,
                adapter.path,
                exc.strerror or exc,
            )
            return None

    def _learn(self, adapter: Adapter) -> None:
        if self._digests.get(adapter) is None:
            self._digests[adapter] = self._read(adapter)


def adapter_digest(folder: Path) -> bytes:
    """Return the SHA-256 over the adapter's configuration and weight files, names included.

    Raises:
        OSError: The folder or a file cannot be read, or holds no weights.
    """
    digest = hashlib.sha256()
    for path in adapter_files(folder):
        digest.update(path.name.encode() + b"\0" + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.digest()


def adapter_files(folder: Path) -> Sequence[Path]:
    """Return the adapter's configuration and weight files in name order.

    Raises:
        OSError: The folder cannot be read, or holds no weights.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES or path.name == _CONFIG_NAME)
    if not any(path.suffix in _WEIGHT_SUFFIXES for path in files):
        raise FileNotFoundError(2, "no adapter weights", str(folder))
    return files


def _identity(path: Path) -> tuple[object, ...]:
    stat = path.stat()
    return path.name, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size
