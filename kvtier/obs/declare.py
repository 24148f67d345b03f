"""How a metric is declared: once, with its name, its meaning and every value that its labels may take.

Metrics are fields of dataclasses (`Counters`, `Gauges`, `Timings`). A field is one time series; a field of `Timings` is
one histogram. Its metadata holds its meaning and its Prometheus name. docs/metrics.md, the exposition and the tests of
dashboard and alerts read that metadata.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from kvtier.obs.histogram import Histogram

PREFIX = "kvtier_"


class Kind(StrEnum):
    """Type of a metric, in the terms of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """A family of time series.

    Attributes:
        name: With prefix and base unit, as scraped: a counter's ends with `_total`.
        kind: Its type.
        meaning: Its help text.
        labels: For each label all values that occur; none if they cannot be listed, as for a version.
        bounds: Upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    meaning: str
    labels: Mapping[str, tuple[str, ...]]
    bounds: tuple[float, ...] = ()

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names under which samples are scraped."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "count", "sum"))
        return (self.name,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """One time series (or histogram) of a metric: its label values in the order of the labels, and its meaning."""

    metric: Metric
    values: tuple[str, ...]
    meaning: str


def counter(name: str, meaning: str, **labels: tuple[str, ...]) -> Metric:
    """Declare a counter; `name` is without prefix and `_total`."""
    return Metric(name=f"{PREFIX}{name}_total", kind=Kind.COUNTER, meaning=meaning, labels=labels)


def gauge(name: str, meaning: str, **labels: tuple[str, ...]) -> Metric:
    """Declare a gauge; `name` is without prefix."""
    return Metric(name=f"{PREFIX}{name}", kind=Kind.GAUGE, meaning=meaning, labels=labels)


def histogram(name: str, meaning: str, bounds: tuple[float, ...]) -> Metric:
    """Declare a histogram; `name` is without prefix."""
    return Metric(name=f"{PREFIX}{name}", kind=Kind.HISTOGRAM, meaning=meaning, labels={}, bounds=bounds)


def series(metric: Metric, *values: str, meaning: str = "") -> int:
    """Return the default of a field that is one series of a metric: a value for each label, and what it adds to say."""
    return field(default=0, metadata=_metadata(metric, values, meaning))


def counted(name: str, meaning: str) -> int:
    """Return the default of a dataclass field that is a counter without labels."""
    return series(counter(name, meaning))


def gauged(name: str, meaning: str) -> int:
    """Return the default of a dataclass field that is a gauge without labels."""
    return series(gauge(name, meaning))


def timed(name: str, meaning: str, bounds: tuple[float, ...]) -> Histogram:
    """Return the default of a dataclass field that is a histogram of seconds."""
    return field(default_factory=lambda: Histogram(bounds), metadata=_metadata(histogram(name, meaning, bounds)))


def _metadata(metric: Metric, values: tuple[str, ...] = (), meaning: str = "") -> Mapping[str, Series]:
    assert len(values) == len(metric.labels), f"{metric.name} has labels {list(metric.labels)}"
    return {"series": Series(metric=metric, values=values, meaning=meaning or metric.meaning)}


def declared(kind: type) -> Iterator[tuple[str, Series]]:
    """Yield field name and series of everything that a dataclass declares, in order."""
    return ((each.name, each.metadata["series"]) for each in fields(kind) if each.metadata)


def metrics_of(kind: type) -> list[Metric]:
    """Return the metrics that a dataclass declares, in order."""
    return list(dict.fromkeys(found.metric for _, found in declared(kind)))
