"""A measured rate of bytes per second, smoothed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_SMOOTHING = 0.3


class Rate:
    """Exponentially weighted bytes per second over concurrent transfers; 0 until the first one has ended."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self._num_running = 0

    @contextmanager
    def measure(self, num_bytes: int) -> Iterator[None]:
        """Count a transfer that takes as long as the block; transfers that overlap share the time."""
        self._num_running += 1
        started_s = time.monotonic()
        try:
            yield
        finally:
            elapsed_s = max(time.monotonic() - started_s, 1e-6)
            sample = num_bytes * self._num_running / elapsed_s
            self._num_running -= 1
            self.per_s = sample if not self.per_s else (1 - _SMOOTHING) * self.per_s + _SMOOTHING * sample
