"""LoRA adapters by content: vLLM's block hashes know an adapter's name and path only."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.concurrency.pauses import RETRY_S
from kvtier_connector.engine.lora.adapter_files import AdapterStat, adapter_digest, stat_adapter, write_back_adapter
from kvtier_connector.engine.lora.remembered_digests import RememberedDigests
from kvtier_connector.engine.weights.weights_fingerprint import local_files

logger = logging.getLogger(__name__)


class Adapter(NamedTuple):
    """An adapter as vLLM names it."""

    name: str
    path: str  # where it is loaded from
    load_id: int = 0  # vLLM's id, another one each time the adapter is loaded; 0 for the files as they are now

    @classmethod
    def of(cls, lora_request: Any) -> "Adapter":
        """Return the adapter of vLLM's LoRARequest."""
        return cls(lora_request.lora_name, lora_request.lora_path, lora_request.lora_int_id)


class _Reading(NamedTuple):
    """The content of an adapter's files, and their stat."""

    stat: AdapterStat
    digest: bytes


class AdapterDigests:
    """Content digests of adapters, in the background, once per load; files that have not changed are read once.

    The files of each load are read. Until they are, the digest of an earlier reading serves lookups, if their stat says
    that they have not changed since (ADR 25). Nothing is stored by it: should the reading differ, no chunk has a wrong
    name.

    `digest` and `is_worth_waiting` may be asked from the scheduler's thread: they read dicts and never wait.
    """

    def __init__(
        self, submit: Callable[[Callable[[], None]], None], remembered: RememberedDigests | None = None
    ) -> None:
        """`submit` runs tasks one after the other in a background thread."""
        self._submit = submit
        self._remembered = remembered or RememberedDigests()
        self._digests: dict[Adapter, bytes | None] = {}
        self._retry_at_s: dict[Adapter, float] = {}
        self._by_stat: dict[AdapterStat, bytes] = {}
        self._pinned: set[tuple[str, str]] = set()
        self._checking: set[Adapter] = set()
        self._loaded: dict[Adapter, AdapterStat] = {}  # just before vLLM loaded them, where that is known
        self._first_loaded: dict[tuple[str, str], AdapterStat] = {}  # the first load of each name and path
        self._unchanged: dict[Adapter, _Reading] = {}  # by their stat; serves until they are read
        self._rejected: set[Adapter] = set()  # the reading did not confirm that
        # Under these load ids, and under these names and paths, vLLM has had other weights before.
        self._replaced: set[int | tuple[str, str]] = set()

    def digest(self, adapter: Adapter) -> bytes | None:
        """Return the digest, or None while it is unknown; the first question starts its computation.

        Once known it stays: it is what vLLM has loaded. Files that cannot be read are tried again every ten seconds.
        """
        digest = self._digests.get(adapter)
        if digest is not None or adapter in self._rejected:
            return digest
        if time.monotonic() >= self._retry_at_s.get(adapter, 0.0):
            self._retry_at_s[adapter] = time.monotonic() + RETRY_S
            self._begin(adapter)
        unchanged = self._unchanged.get(adapter)
        return unchanged.digest if unchanged is not None else None

    def note_load(self, adapter: Adapter, *, in_place: bool = False) -> None:
        """VLLM is about to load the adapter: its files may change before its first request. Reads their stat.

        Args:
            adapter: The adapter.
            in_place: vLLM replaces the weights that it has under this id, or may do so.
        """
        if in_place:
            self.note_replaced(adapter)
        try:
            stat = stat_adapter(local_files(adapter.path))
            self._loaded.setdefault(adapter, stat)
            if self._first_loaded.setdefault((adapter.name, adapter.path), stat) != stat:  # removed, and loaded again
                self.note_replaced(adapter)
        except OSError as exc:
            logger.debug("LoRA adapter not found before its load: %s", exc)

    def note_replaced(self, adapter: Adapter) -> None:
        """From now on the adapter's id stands for other weights than before, and so may its name and path.

        Up to vLLM 0.32 requests say it too (`load_inplace`), from 0.33 on only the load does.
        """
        self._replaced |= {adapter.load_id, (adapter.name, adapter.path)}

    def is_replaced(self, adapter: Adapter) -> bool:
        """Return whether nothing tells its KV from that of the weights before: it is neither restored nor stored.

        VLLM's prefix cache goes by name and path, also when the adapter is loaded once more under another id.
        """
        return adapter.load_id in self._replaced or (adapter.name, adapter.path) in self._replaced

    def is_read(self, adapter: Adapter) -> bool:
        """Return whether the digest is that of a reading for this load, so that chunks may be stored by it."""
        return self._digests.get(adapter) is not None

    def is_worth_waiting(self, adapter: Adapter) -> bool:
        """Return whether the digest is known by now, or will be soon: a pin or an earlier run has had it read."""
        if adapter in self._digests:
            return self.is_read(adapter)
        is_coming = (adapter.name, adapter.path) in self._pinned or adapter in self._checking
        return is_coming or adapter in self._unchanged

    def digest_for_pin(self, adapter: Adapter) -> bytes | None:
        """Return the digest of the files as they are, read in this thread if need be; None when they cannot be read."""
        self._pinned.add((adapter.name, adapter.path))
        reading = self._read(adapter)
        return reading.digest if reading is not None else None

    def _begin(self, adapter: Adapter) -> None:
        """Learn the digest in the background.

        A check takes some stats; in a thread of its own it does not wait while other adapters are read. Of an adapter
        with pins the digest comes as these are bound: before, it is of no use to them.
        """
        is_first = adapter not in self._digests and (adapter.name, adapter.path) not in self._pinned
        if is_first and self._remembered.knows(adapter.path):
            self._checking.add(adapter)
            try:
                threading.Thread(target=self._check, args=(adapter,), name="kvtier-adapter", daemon=True).start()
            except RuntimeError:  # the system allows no more
                self._checking.discard(adapter)
            else:
                return
        self._submit(lambda: self._learn(adapter))

    def _check(self, adapter: Adapter) -> None:
        """Look whether the files are those of an earlier reading; then have them read."""
        try:
            stat = stat_adapter(local_files(adapter.path))
            digest = self._remembered.find(adapter.path, stat)
            if digest is not None and self._is_as_loaded(adapter, stat):
                self._unchanged[adapter] = _Reading(stat, digest)
        except OSError as exc:
            logger.debug("LoRA adapter not checked: %s", exc)
        finally:
            self._checking.discard(adapter)
            self._submit(lambda: self._learn(adapter))

    def _learn(self, adapter: Adapter) -> None:
        if self._digests.get(adapter) is not None or adapter in self._rejected:
            return
        reading, unchanged = self._read(adapter), self._unchanged.get(adapter)
        if reading is None:
            self._digests[adapter] = None
        elif not self._is_as_loaded(adapter, reading.stat) or (unchanged and reading.stat != unchanged.stat):
            self._reject(adapter, has_changed=True)
        elif unchanged and reading != unchanged:
            self._reject(adapter, has_changed=False)
        else:
            self._digests[adapter] = reading.digest

    def _is_as_loaded(self, adapter: Adapter, stat: AdapterStat) -> bool:
        return self._loaded.get(adapter, stat) == stat

    def _reject(self, adapter: Adapter, *, has_changed: bool) -> None:
        """The reading is not of what vLLM loaded, or not what the stat promised: this load is no longer cached."""
        self._rejected.add(adapter)
        self._digests[adapter] = None
        if has_changed:
            logger.warning(
                "kvtier: the files of LoRA adapter name=%s path=%s have changed since vLLM loaded it; its prompts are "
                "not cached until it is loaded from another path, or vLLM is restarted",
                adapter.name,
                adapter.path,
            )
            return
        self._remembered.drop(adapter.path)
        logger.error(
            "kvtier: LoRA adapter name=%s path=%s has other content than when it was read before, though size, inode "
            "and times of its files are the same; its prompts are not cached until it is loaded again. Answers of its "
            "requests since its first one may be wrong: POST /reset_prefix_cache to vLLM, and report this",
            adapter.name,
            adapter.path,
        )

    def _read(self, adapter: Adapter) -> _Reading | None:
        began_ns = time.time_ns()
        try:
            folder = local_files(adapter.path)
            stat = stat_adapter(folder)
            digest = self._by_stat.get(stat) or _read_unchanged(folder, stat)
        except OSError as exc:
            logger.log(
                logging.DEBUG if adapter in self._digests else logging.WARNING,
                "kvtier: cannot read LoRA adapter name=%s path=%s (%s); its prompts are not cached",
                adapter.name,
                adapter.path,
                exc.strerror or exc,
            )
            return None
        if stat.shows_changes_from(began_ns):
            self._by_stat[stat] = digest
            if stat.is_reliable:
                self._remembered.put(adapter.path, stat, digest)
        return _Reading(stat, digest)


def _read_unchanged(folder: Path, stat: AdapterStat) -> bytes:
    """Return the digest of the files that had this stat just before; if it is reliable, any later change shows in it.

    Raises:
        OSError: A file cannot be read, or has changed.
    """
    if stat.is_reliable:
        write_back_adapter(folder)
    digest = adapter_digest(folder)
    if stat_adapter(folder) != stat:
        raise OSError("the files change while they are read")
    return digest
