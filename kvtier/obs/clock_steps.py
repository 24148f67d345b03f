"""Steps ahead of the host's clock that may be taken back: what ends by the clock ends for good."""

import logging
import time
from collections.abc import Callable

from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

WAIT_S = 600.0
"""Until a step ahead counts: a clock that was set wrong by mistake, or by NTP, is mostly set right within that."""
_LEAST_S = 60.0


def steady_s() -> float:
    """Return seconds that no one sets: they go on while the machine is suspended too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClockSteps:
    """Compares the host's clock, at each look, with one that no one sets.

    Attributes:
        confirmed_s: Of steps ahead that were waited for and count now, all together.
    """

    def __init__(
        self, host_clock: Callable[[], float] = lambda: time.time(), now_s: Callable[[], float] = steady_s
    ) -> None:
        self._host_clock, self._now_s = host_clock, now_s
        self._ahead_s = host_clock() - now_s()  # of the steady clock, as it counts
        self._seen_s, self._seen_step_s = 0.0, 0.0  # when a step was seen that does not count yet; 0: there is none
        self.confirmed_s = 0.0

    def now_unix_s(self) -> float:
        """Return the host's time without a step ahead that does not count yet; steps back count at once."""
        host_s, now_s = self._host_clock(), self._now_s()
        step_s = host_s - now_s - self._ahead_s
        if step_s > _LEAST_S:
            if step_s > self._seen_step_s + _LEAST_S:  # the first one, or another one on top of it
                self._seen_s = now_s
                log_event(logger, "clock_stepped", level=logging.WARNING, ahead_s=round(step_s), wait_s=round(WAIT_S))
            self._seen_step_s = step_s
            if now_s - self._seen_s < WAIT_S:
                return host_s - step_s
            self.confirmed_s += step_s
        self._ahead_s, self._seen_step_s = self._ahead_s + step_s, 0.0
        return host_s
