"""One thread for what is too slow for the scheduler: hashing pins and adapters."""

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundThread:
    """Runs tasks one after the other in a daemon thread, started with the first task."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = threading.Lock()

    def submit(self, task: Callable[[], None]) -> None:
        """Enqueue a task from any thread; never waits for it."""
        if self._started.acquire(blocking=False):
            self._thread.start()
        self._tasks.put(task)

    def close(self) -> None:
        """Stop after the task that runs; does not wait."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # a broken pin must not end the binding of others
                logger.exception("kvtier: background task failed")
