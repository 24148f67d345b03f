"""A histogram counts as Prometheus defines it."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.obs.histogram import Histogram

BOUNDS = (0.1, 1.0, 10.0)


def test_a_value_at_a_bound_is_in_its_bucket() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.1, 0.5, 1.0, 11.0):
        histogram.observe(value)
    assert list(histogram.cumulative()) == [(0.1, 1), (1.0, 3), (10.0, 3), (float("inf"), 4)]
    assert histogram.count == 4
    assert histogram.total == 12.6


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_buckets_are_cumulative_counts(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    for bound, num in histogram.copy().cumulative():
        assert num == sum(value <= bound for value in values)
