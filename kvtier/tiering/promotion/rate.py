"""A measured rate of bytes per second, smoothed. Time is an argument."""

from kvtier.concurrency.turns import BATCH_BYTES
from kvtier.core.averages import smoothed


class Rate:
    """Bytes per second while at least one transfer runs, as a moving average over windows of `BATCH_BYTES`.

    Time counts once however many transfers share it, and idle time not at all. Small transfers gather until they fill
    a window: a sample of one chunk would be mostly the cost of a thread switch. 0 until an eighth of one was moved.
    """

    def __init__(self) -> None:
        self._average = 0.0
        self._num_running = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0

    @property
    def per_s(self) -> float:
        """The average; before the first full window what was seen of it; 0 while that is too little."""
        if self._average or self._num_bytes < BATCH_BYTES // 8:
            return self._average
        return self._num_bytes / max(self._busy_s, 1e-6)

    def began(self, now_s: float) -> None:
        """A transfer begins."""
        self._count_time(now_s)
        self._num_running += 1

    def moved(self, num_bytes: int, now_s: float) -> None:
        """A running transfer has moved this many bytes more."""
        self._count_time(now_s)
        self._num_bytes += num_bytes
        if self._num_bytes >= BATCH_BYTES:
            sample = self._num_bytes / max(self._busy_s, 1e-6)
            self._average = smoothed(self._average, sample) if self._average else sample
            self._num_bytes, self._busy_s = 0, 0.0

    def ended(self, now_s: float) -> None:
        """A transfer is over."""
        self._count_time(now_s)
        self._num_running -= 1

    def _count_time(self, now_s: float) -> None:
        if self._num_running:
            self._busy_s += max(0.0, now_s - self._since_s)
        self._since_s = now_s
