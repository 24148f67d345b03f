"""One thread for one pack: it reads the next bytes, or writes the last ones, while the caller decodes or encodes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """Runs calls in order. A context manager: the thread ends with the block, and calls that wait then are left out.

    A thread per block rather than a shared pool: it costs 0.1 ms beside megabytes, has an owner, and is gone
    afterwards. Where the system gives no thread the caller's runs the calls: slower, not wrong. Use it in one thread.
    """

    def __init__(self, name: str, *, is_worth_it: bool = True) -> None:
        """Prepare; the thread begins with the first call, or never: then the caller's thread runs the calls."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name) if is_worth_it else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Run a call after those before it; its error is in the result."""
        if self._executor is not None:
            try:
                return self._executor.submit(call, *args, **kwargs)
            except RuntimeError:
                self._executor.shutdown(cancel_futures=True)  # it holds the call already
                self._executor = None
        future: Future[T] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as exc:
            future.set_exception(exc)
        return future
