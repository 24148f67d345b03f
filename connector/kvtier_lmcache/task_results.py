"""Results of tasks until LMCache takes them; a task that spans spaces ends when its last part has."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")
Part = TypeVar("Part")


class TaskResults(Generic[Result]):
    """Finished tasks of one kind. Thread-safe.

    Args:
        notify: Called after each task that has ended, without any lock.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._lock = threading.Lock()  # protects _results
        self._results: dict[int, Result] = {}

    def put(self, task_id: int, result: Result) -> None:
        """The task has ended."""
        with self._lock:
            self._results[task_id] = result
        self._notify()

    def take(self, task_id: int) -> Result | None:
        """Return a result once; None before the task's end, and after this."""
        with self._lock:
            return self._results.pop(task_id, None)

    def take_all(self) -> dict[int, Result]:
        """Return each result once."""
        with self._lock:
            results, self._results = self._results, {}
        return results


class Parts(Generic[Part]):
    """Waits for this many parts of a task, from any threads, and hands them over together."""

    def __init__(self, num_parts: int, on_end: Callable[[list[Part]], None]) -> None:
        self._lock = threading.Lock()  # protects the next two
        self._num_open, self._parts = num_parts, list[Part]()
        self._on_end = on_end
        if not num_parts:
            on_end([])

    def add(self, part: Part) -> None:
        """A part has ended."""
        with self._lock:
            self._parts.append(part)
            self._num_open -= 1
            is_last = not self._num_open
        if is_last:
            self._on_end(self._parts)
