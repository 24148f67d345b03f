"""Has vLLM compute a prompt, as often as it takes until every chunk is durable.

vLLM offers chunks for storing as it computes or hits them, but not each of them every time (under pressure some are
skipped), so a warm request is repeated, a bounded number of times, while chunks are missing.
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
SETTLE_S = 2.0
_TICK_S = 0.1
_HELD_FACTOR = 5


class Outcome(Enum):
    """How capturing ended."""

    DURABLE = auto()
    OVER_QUOTA = auto()
    INCOMPLETE = auto()
    TIMED_OUT = auto()


@dataclass(frozen=True, kw_only=True)
class CapturePolicy:
    """How long and how often.

    Attributes:
        timeout_s: For everything.
        max_rounds: Warm requests at most; 0 only waits.
        settle_s: Without any change for so long after a warm request, what is missing is taken as not coming.
    """

    timeout_s: float
    max_rounds: int = MAX_ROUNDS
    settle_s: float = SETTLE_S


class WarmRequest:
    """One warm request in a thread of its own, which Ctrl-C does not wait for."""

    def __init__(self, send: Callable[[], None]) -> None:
        """Send at once."""
        self._send = send
        self._error: Exception | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="kvtier-warm", daemon=True).start()

    def finished(self) -> bool:
        """Return whether vLLM has answered.

        Raises:
            KvtierError: vLLM refused or went away.
        """
        if self._done.is_set() and self._error:
            raise self._error
        return self._done.is_set()

    def _run(self) -> None:
        try:
            self._send()
        except Exception as exc:
            # Whatever it is, `finished` raises it; after Ctrl-C, with the connection closed, nobody asks.
            self._error = exc
        finally:
            self._done.set()


class Capture:
    """Waits until a prompt is durable, sending warm requests meanwhile."""

    def __init__(self, policy: CapturePolicy, send: Callable[[], None], clock: Callable[[], float] = time.monotonic):
        """Prepare.

        Args:
            policy: How long and how often.
            send: Sends one warm request and returns when it is answered.
            clock: Monotonic seconds.
        """
        self._policy, self._send, self._clock = policy, send, clock
        self._rounds = 0
        self._warm: WarmRequest | None = None
        self._quiet_since_s = clock()

    def run(
        self, status: PromptStatus, feed: StatusFeed, on_status: Callable[[PromptStatus], None]
    ) -> tuple[PromptStatus, Outcome]:
        """Return the last status and how it ended.

        Raises:
            KvtierError: A warm request failed, or the daemon went away.
        """
        deadline_s = self._clock() + self._policy.timeout_s
        while (outcome := self._step(status)) is None:
            if self._clock() > deadline_s:
                return status, Outcome.TIMED_OUT
            if (newer := feed.next(_TICK_S)) is not None:
                status = newer
                self._quiet_since_s = self._clock()
                on_status(status)
        return status, outcome

    def _step(self, status: PromptStatus) -> Outcome | None:
        if status.state == PromptStatus.DURABLE:
            return Outcome.DURABLE
        if status.state == PromptStatus.OVER_QUOTA:
            return Outcome.OVER_QUOTA
        numbers = summarize(status)
        if status.bindings and not numbers.num_chunks:
            return Outcome.INCOMPLETE
        if self._warm is not None and not self._worth_another(numbers):
            return None
        if self._rounds >= self._policy.max_rounds:
            return Outcome.INCOMPLETE if numbers.missing else None
        self._rounds += 1
        self._warm = WarmRequest(self._timed_send)
        return None

    def _worth_another(self, numbers: Summary) -> bool:
        """Whether the last request is answered, nothing moves, and chunks are missing.

        While all of them are held the disk is at work, and another request would not speed it up. But the numbers may
        hide a missing chunk (see `Summary.missing`), so that is believed for a while only.
        """
        assert self._warm is not None
        quiet_s = self._clock() - self._quiet_since_s
        patience_s = self._policy.settle_s * (1 if numbers.missing else _HELD_FACTOR)
        return self._warm.finished() and quiet_s > patience_s

    def _timed_send(self) -> None:
        self._send()
        self._quiet_since_s = self._clock()
