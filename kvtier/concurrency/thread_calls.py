"""Blocking calls in daemon threads, for an event loop: none that the end of the process waits for.

A thread for each call is cheap beside a call, and leaves no idle threads. Rejected: a ThreadPoolExecutor, whose threads
the interpreter's exit joins, and a call that waits for vLLM or for a server that is gone may take minutes.
"""

import asyncio
import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def begin_in_thread(name: str, call: Callable[[], T], on_end: Callable[[], None] = lambda: None) -> "asyncio.Future[T]":
    """Begin a call in a thread of this name, and return what it will give. Loop thread only.

    A caller that is cancelled leaves the call running. `on_end` is called on the loop when it has ended, before its
    result is there; unless the loop has ended first.

    Raises:
        OSError: The system allows no more threads; `on_end` was called.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def end(set_result: Callable[[Any], None], value: Any) -> None:
        on_end()
        if not result.done():  # else cancelled
            set_result(value)

    def run() -> None:
        try:
            how: tuple[Callable[[Any], None], Any] = result.set_result, call()
        except StopIteration as exc:  # no future takes it
            how = result.set_exception, RuntimeError(f"the call ended by {exc!r}")
        except BaseException as exc:  # every other end is the caller's
            how = result.set_exception, exc
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, *how)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as exc:
        on_end()
        raise OSError(errno.EAGAIN, "the system allows no more threads") from exc
    return result
