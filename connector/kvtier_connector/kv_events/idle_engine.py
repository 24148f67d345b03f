"""Wakes a vLLM that has no requests: it asks its connector nothing until the next message comes in.

Source: `EngineCoreProc` of vLLM 0.32 (`v1/engine/core.py`): its queue of messages takes a WAKEUP that carries nothing.
vLLM puts it there itself when it is to shut down. A connector is not given that queue, so it is looked up among the
callers that construct one. Where it is not found, events leave with the next request's steps.
"""

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_MODULE = "vllm.v1.engine.core"


def find_wake() -> Callable[[], None] | None:
    """Return what wakes the engine that is being constructed, from any thread; None where it cannot be found."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE:
            queue: Any = getattr(frame.f_locals.get("self"), "input_queue", None)
            if queue is not None:
                from vllm.v1.engine import EngineCoreRequestType

                return lambda: queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        frame = frame.f_back  # type: ignore[assignment]
    logger.warning("kvtier: this vLLM cannot be woken: routers learn of pins with its next request")
    return None


class Alarm:
    """Wakes the engine now and then, in a thread of its own."""

    def __init__(self, wake: Callable[[], None], period_s: float) -> None:
        self._wake, self._period_s = wake, period_s
        self._ends = threading.Event()
        threading.Thread(target=self._run, name="kvtier-alarm", daemon=True).start()

    def close(self) -> None:
        """Stop; does not wait."""
        self._ends.set()

    def _run(self) -> None:
        while not self._ends.wait(self._period_s):
            self._wake()
