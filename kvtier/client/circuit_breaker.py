"""A circuit breaker: one slow answer, not one per request, is what a hung daemon costs."""


class CircuitBreaker:
    """Opens when a first answer is late, closes when a probe is answered. One thread; time is an argument.

    Attributes:
        is_closed: Lookups may go to the daemon; else each is a miss at once, and the daemon is probed.
    """

    def __init__(self, lookup_timeout_s: float) -> None:
        self._lookup_timeout_s = lookup_timeout_s
        self.is_closed = True

    def deadline_s(self, now_s: float, num_timeouts: int = 1) -> float:
        """Return when the first answer to a question asked now is late, or that many times as late."""
        return now_s + num_timeouts * self._lookup_timeout_s

    def late(self, deadline_s: float, now_s: float) -> bool:
        """Return whether an unanswered question is late; if so, open.

        A question asked before the breaker opened is late with it: its turn would come no sooner.
        """
        if now_s < deadline_s and self.is_closed:
            return False
        self.is_closed = False
        return True

    def close(self) -> None:
        """The daemon answered a probe, or a new session is up."""
        self.is_closed = True
