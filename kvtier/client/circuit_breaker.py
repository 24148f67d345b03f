"""A circuit breaker: one slow answer, not one per request, is what a hung daemon costs."""

import enum


class BreakerState(enum.Enum):
    """CLOSED: ask. OPEN: answer MISS at once, and probe."""

    CLOSED = enum.auto()
    OPEN = enum.auto()


class CircuitBreaker:
    """Opens when a first answer is late, closes when a probe is answered. One thread; time is an argument.

    Attributes:
        state: Whether lookups go to the daemon.
        num_opened: How often it opened since start.
    """

    def __init__(self, lookup_timeout_s: float) -> None:
        self._lookup_timeout_s = lookup_timeout_s
        self.state = BreakerState.CLOSED
        self.num_opened = 0

    @property
    def is_closed(self) -> bool:
        """Whether lookups may go to the daemon."""
        return self.state is BreakerState.CLOSED

    def deadline_s(self, now_s: float, num_timeouts: int = 1) -> float:
        """Return when the first answer to a question asked now is late, or that many times as late."""
        return now_s + num_timeouts * self._lookup_timeout_s

    def late(self, deadline_s: float, now_s: float) -> bool:
        """Return whether an unanswered question is late; if so, open.

        A question asked before the breaker opened is late with it: its turn would come no sooner.
        """
        if now_s < deadline_s and self.is_closed:
            return False
        if self.is_closed:
            self.state = BreakerState.OPEN
            self.num_opened += 1
        return True

    def close(self) -> None:
        """The daemon answered a probe, or a new session is up."""
        self.state = BreakerState.CLOSED
