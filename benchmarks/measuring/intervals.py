"""The median of ratios within pairs of measurements, with an interval that assumes nothing about noise."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and where the true one lies.

    Attributes:
        coverage: Probability that such an interval holds the true median. Below what was requested when there
            are too few values for it: six are the fewest that reach 95 %.
    """

    median: float
    low: float
    high: float
    coverage: float
    num_values: int

    def percent(self) -> str:
        """Return it as a change: `+0.4 % (-0.3..+1.1)`."""
        change, low, high = (100 * (value - 1) for value in (self.median, self.low, self.high))
        return f"{change:+.1f} % ({low:+.1f}..{high:+.1f})"


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the median with the exact interval of the sign test, whose ends are two of the values.

    Each value lies below the true median with probability 1/2, whatever the distribution, so how many do is binomial.
    A bootstrap of so few values would be too narrow, and Wilcoxon's interval assumes symmetric noise.
    """
    ordered = sorted(values)
    rank, coverage = 1, _coverage(len(ordered), 1)
    while (wider := _coverage(len(ordered), rank + 1)) >= confidence:
        rank, coverage = rank + 1, wider
    return Interval(
        median=statistics.median(ordered),
        low=ordered[rank - 1],
        high=ordered[-rank],
        coverage=coverage,
        num_values=len(ordered),
    )


def _coverage(num_values: int, rank: int) -> float:
    """Return the probability that the true median lies between the `rank`-th smallest and largest value."""
    outside = 2 * sum(comb(num_values, below) for below in range(rank))
    return 1 - outside / float(2**num_values)
