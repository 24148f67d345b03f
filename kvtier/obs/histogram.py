"""A histogram that is cheap enough for the loop's hot path."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Self


class Histogram:
    """Counts observations by buckets. One thread observes at a time; `copy` may be called in another.

    Not prometheus_client's: that takes a lock and walks the buckets in Python, several times the cost of this
    (`python -m benchmarks.metrics_cost` measures both).

    Args:
        bounds: Upper ends of the buckets, ascending; one more holds what is above the last.

    Attributes:
        total: Sum of what was observed.
    """

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield each bucket's upper end, infinity last, and how many values were at most that."""
        num_below = 0
        for bound, num in zip((*self._bounds, float("inf")), self._counts, strict=True):
            num_below += num
            yield bound, num_below

    def copy(self) -> Self:
        """Return one with the same content that changes no more."""
        copied = type(self)(self._bounds)
        copied._counts[:] = self._counts
        copied.total = self.total
        return copied
