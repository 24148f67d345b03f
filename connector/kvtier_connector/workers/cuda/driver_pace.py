"""Between two calls of the driver that no load waits for, vLLM has the driver for itself.

While the driver locks or unlocks pages, calls of other threads wait, and who gets it next is not a matter of who came
first: calls one after the other would keep vLLM's launches, events and copies out for as long as there are rows to lock
(ADR 18).
"""

import contextlib
import threading
import time
from collections.abc import Iterator

_REST = 3.0
"""A pause, in durations of the call before it. Then a quarter of the driver's time is taken at most."""


class DriverPace:
    """Measures calls, and pauses after them. For one thread."""

    def __init__(self) -> None:
        self._rests_until_s = 0.0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Enclose a call of the driver."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            ended_s = time.monotonic()
            self._rests_until_s = ended_s + _REST * (ended_s - began_s)

    def rest(self, cut_short: threading.Event) -> bool:
        """Wait until the next call may begin; or return False, as soon as the event is set: there is more urgent work.

        The rest of the pause is still to come then.
        """
        return not cut_short.wait(max(0.0, self._rests_until_s - time.monotonic()))
