"""A bounded pipeline of two stages: one thread writes what the caller has made, while the caller makes more."""

import threading
from collections.abc import Callable
from queue import Queue
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class WriteBehind(Generic[Item]):
    """Writes items in order. A context manager: its thread, if there ever was one, ends with the block.

    The first error ends all writing; it is raised by the next `put` or `drain`. A block that raises leaves what still
    waits unwritten. Use it in one thread.
    """

    def __init__(self, write: Callable[[Item], None], *, depth: int) -> None:
        """Prepare; a thread begins with the first `put`.

        Args:
            write: Called in the writing thread, one call at a time.
            depth: How many items may wait beside the one that is written.
        """
        self._write = write
        self._queue: Queue[Item | None] = Queue(depth)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._abandoned = False

    def __enter__(self) -> "WriteBehind[Item]":
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        if self._thread is None:
            return
        self._abandoned = exc is not None
        self._queue.put(None)
        self._thread.join()

    def put(self, item: Item) -> None:
        """Have an item written; waits while `depth` others wait."""
        self._raise_error()
        if self._thread is None and not self._start():
            self._write(item)
            return
        self._queue.put(item)

    def drain(self) -> None:
        """Return when everything is written."""
        if self._thread is not None:
            self._queue.join()
        self._raise_error()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="kvtier-write-behind")
        try:
            thread.start()
        except RuntimeError:  # the system gives no thread: slower, not wrong
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        """Writing thread."""
        while (item := self._queue.get()) is not None:
            try:
                if self._error is None and not self._abandoned:
                    self._write(item)
            except BaseException as exc:  # raised where the items are made
                self._error = exc
            finally:
                del item  # its memory may be used again
                self._queue.task_done()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
