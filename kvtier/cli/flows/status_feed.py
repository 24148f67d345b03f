"""The status of a prompt as the daemon streams it; a thread reads it, so that the CLI can do other work."""

import queue
import threading
from types import TracebackType
from typing import Self

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.client.admin import AdminClient
from kvtier.errors import KvtierError

_JOIN_TIMEOUT_S = 2.0


class StatusFeed:
    """Owns one WatchPrompt call and its thread; a context manager."""

    def __init__(self, client: AdminClient, name: str, timeout_s: float) -> None:
        """Watch `name` for at most `timeout_s`."""
        self._watch = client.watch(name, timeout_s=timeout_s)
        self._items: queue.SimpleQueue[PromptStatus | KvtierError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="kvtier-watch", daemon=True)

    def __enter__(self) -> Self:
        """Start to read."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the call and its thread."""
        self._watch.close()
        self._thread.join(_JOIN_TIMEOUT_S)

    def next(self, wait_s: float) -> PromptStatus | None:
        """Return the newest status that arrives within `wait_s`, None if none does.

        Raises:
            KvtierError: The daemon no longer answers, or refused.
        """
        try:
            item = self._items.get(timeout=wait_s)
            while not self._items.empty():
                item = self._items.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, KvtierError):
            raise item
        return item

    def _read(self) -> None:
        try:
            for status in self._watch:
                self._items.put(status)
        except KvtierError as exc:
            self._items.put(exc)
