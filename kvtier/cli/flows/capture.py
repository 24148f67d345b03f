"""Sends warm requests for a prompt until every chunk is durable.

vLLM offers chunks to store when it computes or hits them, but under pressure it skips some. So the request is repeated,
a bounded number of times, while chunks are missing.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.cli.flows.status_feed import StatusFeed
from kvtier.cli.output.prompt_summary import Summary, summarize

MAX_ROUNDS = 3
IDLE_S = 2.0
_TICK_S = 0.1
_HELD_FACTOR = 5


class CaptureOutcome(Enum):
    """How capturing ended."""

    DURABLE = auto()
    OVER_QUOTA = auto()
    INCOMPLETE = auto()
    TIMED_OUT = auto()


@dataclass(frozen=True, kw_only=True)
class CapturePolicy:
    """Limits of one capture.

    Attributes:
        timeout_s: For the whole capture.
        max_rounds: Largest number of warm requests; 0: only wait.
        idle_s: If nothing changes for this long after a warm request, the missing chunks count as not offered.
    """

    timeout_s: float
    max_rounds: int = MAX_ROUNDS
    idle_s: float = IDLE_S


class WarmRequest:
    """One warm request in a daemon thread, which Ctrl-C does not wait for."""

    def __init__(self, send: Callable[[], None]) -> None:
        """Send at once."""
        self._send = send
        self._error: Exception | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="kvtier-warm", daemon=True).start()

    def finished(self) -> bool:
        """Return whether vLLM has answered.

        Raises:
            KvtierError: vLLM refused or no longer answers.
        """
        if self._done.is_set() and self._error:
            raise self._error
        return self._done.is_set()

    def _run(self) -> None:
        try:
            self._send()
        except Exception as exc:
            # `finished` raises any error; after Ctrl-C the connection is closed and no caller asks.
            self._error = exc
        finally:
            self._done.set()


class Capture:
    """Waits until a prompt is durable and sends warm requests meanwhile."""

    def __init__(self, policy: CapturePolicy, send: Callable[[], None], clock: Callable[[], float] = time.monotonic):
        """Prepare.

        Args:
            policy: Its limits.
            send: Sends one warm request and returns when vLLM has answered.
            clock: Monotonic seconds.
        """
        self._policy, self._send, self._clock = policy, send, clock
        self._rounds = 0
        self._warm: WarmRequest | None = None
        self._quiet_since_s = clock()

    def run(
        self, status: PromptStatus, feed: StatusFeed, on_status: Callable[[PromptStatus], None]
    ) -> tuple[PromptStatus, CaptureOutcome]:
        """Return the last status and the outcome.

        Raises:
            KvtierError: A warm request failed, or the daemon no longer answers.
        """
        deadline_s = self._clock() + self._policy.timeout_s
        while (outcome := self._step(status)) is None:
            if self._clock() > deadline_s:
                return status, CaptureOutcome.TIMED_OUT
            if (newer := feed.next(_TICK_S)) is not None:
                status = newer
                self._quiet_since_s = self._clock()
                on_status(status)
        return status, outcome

    def _step(self, status: PromptStatus) -> CaptureOutcome | None:
        if status.state == PromptStatus.DURABLE:
            return CaptureOutcome.DURABLE
        if status.state == PromptStatus.OVER_QUOTA:
            return CaptureOutcome.OVER_QUOTA
        numbers = summarize(status)
        if status.bindings and not numbers.num_chunks:
            return CaptureOutcome.INCOMPLETE
        if self._warm is not None and not self._worth_another(numbers):
            return None
        if self._rounds >= self._policy.max_rounds:
            return CaptureOutcome.INCOMPLETE if numbers.missing else None
        self._rounds += 1
        self._warm = WarmRequest(self._timed_send)
        return None

    def _worth_another(self, numbers: Summary) -> bool:
        """Return whether the last request is answered, nothing changes, and chunks are missing.

        While the daemon holds all of them, only the disk has work, and another request would not speed it up. But the
        numbers may hide a missing chunk (see `Summary.missing`), so after `_HELD_FACTOR` times the idle time this asks
        again.
        """
        assert self._warm is not None
        quiet_s = self._clock() - self._quiet_since_s
        idle_limit_s = self._policy.idle_s * (1 if numbers.missing else _HELD_FACTOR)
        return self._warm.finished() and quiet_s > idle_limit_s

    def _timed_send(self) -> None:
        self._send()
        self._quiet_since_s = self._clock()
