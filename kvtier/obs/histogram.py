"""A histogram that is cheap enough for the hot path of the event loop."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Self


class Histogram:
    """Counts observations by buckets. One thread observes at a time; `copy` may be called in another.

    That of prometheus_client costs five times as much (`python -m benchmarks.metrics_cost`).

    Args:
        bounds: Upper bounds of the buckets, ascending; one more bucket holds larger values.

    Attributes:
        total: Sum of the observed values.
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
        """Yield the upper bound of each bucket, infinity last, and how many values are at most that."""
        num_below = 0
        for bound, num in zip((*self._bounds, float("inf")), self._counts, strict=True):
            num_below += num
            yield bound, num_below

    def copy(self) -> Self:
        """Return a copy that later observations do not change."""
        copied = type(self)(self._bounds)
        copied._counts[:] = self._counts
        copied.total = self.total
        return copied
