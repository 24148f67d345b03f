"""The connector's metrics in vLLM's terms: definitions for the API server, and what is sent to it after each step.

Source: `OffloadingConnectorStats` of vLLM 0.32, whose payload names its types, so that it survives the way there.
"""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from kvtier.obs.declare import Kind, Metric
from kvtier_connector.metrics.declared import METRICS


class ConnectorStats:
    """What was counted since vLLM last asked, which it does after each step. Scheduler thread only."""

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()

    def count(self, metric: Metric, *values: str, num: int = 1) -> None:
        """Add to a counter with these label values."""
        if num:
            self._stats.increase_counter(_vllm_name(metric), num, values)

    def observe(self, metric: Metric, seconds: float) -> None:
        """Add to a histogram."""
        self._stats.observe_histogram(_vllm_name(metric), seconds)

    def set(self, metric: Metric, value: float) -> None:
        """Set a gauge."""
        self._stats.set_gauge(_vllm_name(metric), value)

    def take(self) -> OffloadingConnectorStats | None:
        """Return it and start from zero; None when nothing was counted."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, OffloadingConnectorStats()
        return taken


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return our metrics as vLLM wants them declared."""
    return {_vllm_name(metric): _definition(metric) for metric in METRICS}


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    labels = tuple(metric.labels)
    match metric.kind:
        case Kind.COUNTER:
            return OffloadingCounterMetadata(metric.meaning, labels)
        case Kind.GAUGE:
            return OffloadingGaugeMetadata(metric.meaning, labels)
        case Kind.HISTOGRAM:
            return OffloadingHistogramMetadata(metric.meaning, labels, metric.bounds)


def _vllm_name(metric: Metric) -> str:
    """Return the name that vLLM declares; prometheus_client adds a counter's `_total`."""
    return metric.name.removesuffix("_total")
