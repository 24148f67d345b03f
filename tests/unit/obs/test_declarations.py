"""Every metric is declared by the rules that Prometheus' users expect, and every counter is a metric."""

import re
from dataclasses import fields

import pytest

from kvtier.obs.counters import Counters
from kvtier.obs.declare import PREFIX, Kind, Metric, declared, gauge, metrics_of, series
from kvtier.obs.gauges import Gauges
from kvtier.obs.timings import Timings
from kvtier_connector.metrics.declared import METRICS

RECORDS = (Counters, Gauges, Timings)
ALL = [metric for record in RECORDS for metric in metrics_of(record)] + list(METRICS)
NOT_BASE_UNITS = re.compile(r"_(ms|millis|milliseconds|minutes|hours|kb|kib|mb|mib|gb|gib|percent|total_count)(_|$)")


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert re.fullmatch(r"kvtier_[a-z][a-z0-9_]*", metric.name)
    assert not NOT_BASE_UNITS.search(metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith("_seconds")
        assert list(metric.bounds) == sorted(set(metric.bounds))
    assert len(metric.labels) <= 2
    assert metric.meaning[0].isupper() or metric.meaning[0].isdigit()
    assert metric.meaning.endswith("."), "a help text is a sentence"


def test_no_name_is_declared_twice() -> None:
    names = [name for metric in ALL for name in metric.sample_names]
    assert len(names) == len(set(names))


def test_label_values_are_those_declared_and_no_series_comes_twice() -> None:
    for record in RECORDS:
        seen = set()
        for _, found in declared(record):
            assert (found.metric.name, found.values) not in seen
            seen.add((found.metric.name, found.values))
            for value, allowed in zip(found.values, found.metric.labels.values(), strict=True):
                assert value in allowed or not allowed, found.metric.name


def test_every_label_value_occurs() -> None:
    used = {(f.metric.name, label, value) for r in RECORDS for _, f in declared(r) for label, value in _labels_of(f)}
    for record in RECORDS:
        for metric in metrics_of(record):
            for label, values in metric.labels.items():
                assert all((metric.name, label, value) in used for value in values), metric.name


def _labels_of(found: object) -> list[tuple[str, str]]:
    return list(zip(found.metric.labels, found.values, strict=True))  # type: ignore[attr-defined]


def test_everything_that_is_counted_is_a_metric() -> None:
    """But for the milliseconds that `kvtier status` shows: a histogram has them in seconds."""
    for record, without in ((Counters, {"pack_write_ms"}), (Gauges, set()), (Timings, set())):
        assert {each.name for each in fields(record)} - {name for name, _ in declared(record)} == without


def test_a_counter_has_the_name_of_its_series_also_where_kvtier_status_shows_it() -> None:
    """The console once asked for counters by the names that /metrics has, and the API had others."""
    for name, found in declared(Counters):
        stem = found.metric.name.removeprefix(PREFIX).removesuffix("_total")
        assert name == "_".join([stem, *found.values])


def test_later_observations_do_not_change_a_copy() -> None:
    timings = Timings()
    timings.acquire.observe(0.3)
    copied = timings.copy()
    timings.acquire.observe(0.3)
    assert (copied.acquire.count, timings.acquire.count) == (1, 2)


def test_a_series_must_name_all_labels_of_its_metric() -> None:
    with pytest.raises(AssertionError, match="kvtier_x has labels"):
        series(gauge("x", "Something.", tier=("host",)))
