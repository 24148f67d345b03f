"""Metrics as Prometheus reads them: text of a reading of the daemon (ADR 15)."""

import gzip
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PromMetric
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import Collector

from kvtier.obs.declare import Kind, Metric, declared
from kvtier.obs.histogram import Histogram

_FAMILIES = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}

Reading = Sequence[Any]
"""`Counters`, `Gauges` and `Timings` at one moment; nothing changes them later."""
Read = Callable[[], Reading]
"""Called in a thread at each scrape. Raises TimeoutError when the event loop does not answer."""

Problem = Callable[[], str]
"""Says why the daemon's pins are not ready; empty: they are. Called and raises as `Read`."""


class Scrape(NamedTuple):
    """The body of an answer, and the headers that say what it is."""

    body: bytes
    headers: Mapping[str, str]


class Exposition:
    """The daemon's metrics and those of its process, in the formats that a client accepts."""

    def __init__(self, read: Read) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Daemon(read))
        ProcessCollector(registry=self._registry)

    def scrape(self, accept: str, accept_encoding: str) -> Scrape:
        """Read all metrics, and write them. Any thread.

        Args:
            accept: What the client accepts, as its headers have it.
            accept_encoding: Likewise: gzip, or not.

        Raises:
            TimeoutError: The event loop does not answer.
        """
        encode, content_type = choose_encoder(accept)
        text = encode(self._registry)
        if gzip_accepted(accept_encoding):
            return Scrape(gzip.compress(text), {"Content-Type": content_type, "Content-Encoding": "gzip"})
        return Scrape(text, {"Content-Type": content_type})


class _Daemon(Collector):
    """A reading, as prometheus_client's metrics."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[PromMetric]:
        families: dict[Metric, Any] = {}
        for record in self._read():
            for name, found in declared(type(record)):
                metric, value = found.metric, getattr(record, name)
                if metric not in families:
                    families[metric] = _FAMILIES[metric.kind](metric.name, metric.meaning, labels=metric.labels)
                if isinstance(value, Histogram):
                    buckets = [(str(bound).replace("inf", "+Inf"), num) for bound, num in value.cumulative()]
                    families[metric].add_metric(found.values, buckets=buckets, sum_value=value.total)
                else:
                    families[metric].add_metric(found.values, value)
        yield from families.values()
