"""What `watch` and `watch_events` return."""

from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from kvtier.client.daemon_connection import MessageStream

T = TypeVar("T")


class Watch(Iterator[T]):
    """An iterator that waits for what comes next: iterate in one thread; close from any."""

    def __init__(self, stream: MessageStream[Any], read: Callable[[Any], T]) -> None:
        """Take a call, and what makes values of its messages."""
        self._stream, self._messages, self._read = stream, iter(stream), read

    def __next__(self) -> T:
        return self._read(next(self._messages))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the call; the iteration ends."""
        self._stream.close()
