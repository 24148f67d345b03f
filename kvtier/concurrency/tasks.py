"""Named background tasks with one owner: errors are logged, and all are cancelled and awaited at the end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from kvtier.concurrency.pauses import RETRY_S
from kvtier.errors import DrainingError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def shielded(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorator: each call runs to its end. A caller that is cancelled waits for the end, and is cancelled then."""

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.create_task(function(*args, **kwargs), name=function.__qualname__)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await until_ended(task)
            raise

    return call


async def until_ended(task: asyncio.Task[Any]) -> None:
    """Wait until a task has ended, also if the caller is cancelled meanwhile; what the task raised is not logged."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def kept_running(name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run what is to run as long as its owner. What it did not foresee is logged, and it begins again after a pause.

    So a loop that meets one error for which no one has written a handler is not missing until the next restart.
    """
    while True:
        try:
            await run()
        except Exception:
            logger.exception("task %s failed, and begins again in %.0f s", name, RETRY_S)
        else:
            return
        await asyncio.sleep(RETRY_S)


class Tasks:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def running(self) -> bool:
        """A task has not ended yet."""
        return bool(self._tasks)

    def start(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; after `close` it is dropped."""
        if self._closed:
            coroutine.close()
            return
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def keep(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine function in the background; see `kept_running`."""
        self.start(name, kept_running(name, run))

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %s failed", task.get_name(), exc_info=error)

    async def run_shielded(self, name: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, even when the caller is cancelled meanwhile, and return its result.

        Raises:
            DrainingError: After `close`.
        """
        task = self._begin(name, coroutine)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_error)
            raise

    async def run(self, name: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. It is cancelled, and waited for, with its caller and by `close`.

        Raises:
            DrainingError: After `close`, or because of it.
        """
        task = self._begin(name, coroutine)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await until_ended(task)
            _log_error(task)
            raise
        if task.cancelled():
            raise DrainingError
        return task.result()

    def _begin(self, name: str, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task whose caller sees what it raises. DrainingError: after `close`."""
        if self._closed:
            coroutine.close()
            raise DrainingError
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def join(self) -> None:
        """Wait until every task started so far has ended."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("task %s failed after its caller had left: %s", task.get_name(), error)


class Changes(Tasks):
    """Tasks that change what the daemon keeps: pin, unpin, evict, expiry, binding, attaching. Loop thread only.

    They run one at a time, so that no decision is taken on a state that an awaited ledger write has meanwhile made
    old. One that has begun runs to its end even when the caller leaves: a ledger write cannot be called back, and
    memory has to follow it.

    Attributes:
        lock: The change lock: held by the one that runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = asyncio.Lock()

    async def exclusively(self, name: str, change: Callable[[], Awaitable[T]]) -> T:
        """Run a change as the only one, and to its end once it has begun. One whose caller leaves before is dropped.

        Raises:
            DrainingError: The daemon is stopping.
        """
        has_begun = False

        async def alone() -> T:
            nonlocal has_begun
            async with self.lock:
                has_begun = True
                return await change()

        task = self._begin(name, alone())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not has_begun:  # what it would change takes memory, which no one counts when the caller has left
                task.cancel()
            task.add_done_callback(_log_error)
            raise
