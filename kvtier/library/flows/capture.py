"""Sends warm requests for a prompt until every chunk is durable.

vLLM offers chunks to store when it computes or hits them, but under pressure it skips some. So the request is repeated,
a bounded number of times, while chunks are missing.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from kvtier.client.admin import AdminClient
from kvtier.concurrency.pauses import POLL_S
from kvtier.errors import KvtierError
from kvtier.library.progress_events import CaptureOutcome
from kvtier.library.values.conversion import prompt_of
from kvtier.library.values.prompt_summary import summarize
from kvtier.library.values.public_values import Prompt, PromptState

IDLE_S = 2.0
"""If nothing changes for this long after an answer, the missing chunks count as not offered."""

_MAX_IN_VAIN = 3
"""Requests in a row after which no more chunks are there than before."""

NextStatus = Callable[[], Prompt | None]
"""Returns the newest status that arrives within a tenth of a second, else None; raises what the daemon answers."""


@contextmanager
def watched(client: AdminClient, pin_id: str, timeout_s: float) -> Iterator[NextStatus]:
    """Read the status of a prompt as the daemon streams it, in a thread, for at most `timeout_s`."""
    watch = client.watch(pin_id, timeout_s=timeout_s)
    items: queue.SimpleQueue[Prompt | KvtierError] = queue.SimpleQueue()

    def read() -> None:
        try:
            for status in watch:
                items.put(prompt_of(status))
        except KvtierError as exc:
            items.put(exc)

    def newest() -> Prompt | None:
        try:
            item = items.get(timeout=POLL_S)
            while not items.empty():
                item = items.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, KvtierError):
            raise item
        return item

    thread = threading.Thread(target=read, name="kvtier-watch", daemon=True)
    thread.start()
    try:
        yield newest
    finally:
        watch.close()
        thread.join(2.0)


def capture(
    status: Prompt,
    next_status: NextStatus,
    send: Callable[[], None],
    *,
    timeout_s: float,
    on_status: Callable[[Prompt], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Prompt, CaptureOutcome]:
    """Wait until a prompt is durable, and send warm requests meanwhile; return the last status and the outcome.

    `send` sends one warm request and returns when vLLM has answered. `on_status` is called with each newer status.

    Raises:
        KvtierError: A warm request failed, or the daemon no longer answers.
    """
    ends_s = clock() + timeout_s
    num_requests, running, changed_s = 0, None, clock()
    num_found = -1  # chunks at the last request
    while True:
        numbers = summarize(status)
        if status.state is PromptState.DURABLE:
            return status, CaptureOutcome.DURABLE
        if status.state is PromptState.OVER_QUOTA:
            return status, CaptureOutcome.OVER_QUOTA
        if status.bindings and not numbers.num_chunks:
            return status, CaptureOutcome.INCOMPLETE
        if running is not None and running.done():
            running.result()
            running, changed_s = None, clock()
        # While the daemon holds all chunks, only the disk has work, and another request would not speed it up. But the
        # numbers may hide a missing chunk (see `Summary.missing`), so after a longer time it is sent all the same.
        idle_limit_s = IDLE_S * (1 if numbers.missing else 5)
        if num_requests == 0 or (running is None and clock() - changed_s > idle_limit_s):
            # A prompt that vLLM has cached may have more chunks than one request can store: each brings some.
            if num_found < numbers.num_held_chunks:
                num_requests, num_found = 0, numbers.num_held_chunks
            if num_requests < _MAX_IN_VAIN:
                num_requests, running = num_requests + 1, _in_background(send)
            elif numbers.missing:
                return status, CaptureOutcome.INCOMPLETE
        if clock() > ends_s:
            return status, CaptureOutcome.TIMED_OUT
        if (newer := next_status()) is not None:
            status, changed_s = newer, clock()
            on_status(status)


def _in_background(send: Callable[[], None]) -> "Future[None]":
    """Send in a daemon thread, which Ctrl-C does not wait for."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            send()
        except Exception as exc:
            # After Ctrl-C the connection is closed, and no caller asks.
            done.set_exception(exc)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="kvtier-warm", daemon=True).start()
    return done
