"""Threads for calls that block."""

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Pool(ThreadPoolExecutor):
    """Threads for one kind of call: it never queues behind one of another kind.

    Where the system allows no more threads, those that there are run the calls; without any, a call is refused.

    Args:
        refusal: Makes the error of such a call.

    Attributes:
        name: Of the kind.
    """

    def __init__(self, name: str, num_threads: int, *, refusal: Callable[[OSError], Exception]) -> None:
        super().__init__(num_threads, thread_name_prefix=f"kvtier-{name}")
        self.name, self._refusal = name, refusal
        self._is_abandoned = False
        self._calls: set[Future[Any]] = set()  # taken from in the threads: each step is atomic

    @property
    def is_busy(self) -> bool:
        """A call is running."""
        return any(call.running() for call in list(self._calls))

    def abandon(self) -> None:
        """From now on no cancelled caller waits for its call: the process ends without them."""
        self._is_abandoned = True

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call whose caller does not wait for it, or not always; see `Executor.submit`.

        Raises:
            Exception: That of `refusal`; nothing is called.
        """
        call = super().submit(fn, *args, **kwargs)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call. A caller that is cancelled waits for a call that has begun, unless the pool is abandoned.

        A thread cannot be cancelled: it would go on with an arena that its namespace has closed meanwhile. Raises as
        `submit`, too.
        """
        running = self.submit(call)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            while not running.done() and not self._is_abandoned:
                with suppress(Exception, asyncio.CancelledError):  # cancelled again it waits too
                    await asyncio.wrap_future(running)
            raise

    def _adjust_thread_count(self) -> None:
        """Replaces a private method of Python, which queues a call before it fails: it would run at some later time.

        The caller, `submit`, holds the executor's lock, so without threads this call alone is queued.
        """
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                self._work_queue.get_nowait()
                problem = OSError(errno.EAGAIN, "the system allows no more threads")
                raise self._refusal(problem) from problem
