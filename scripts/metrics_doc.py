"""docs/metrics.md, from the declarations in the code; `gen_docs.py` writes it."""

from collections.abc import Iterable

from kvtier.obs.counters import Counters
from kvtier.obs.declare import Kind, Metric, declared, metrics_of
from kvtier.obs.gauges import Gauges
from kvtier.obs.timings import Timings
from kvtier_connector.metrics.declared import LOOKUPS, METRICS, LookupEnd

RECORDS = (Counters, Gauges, Timings)

HEAD = """\
# Metrics

`kvtier-daemon` answers `GET /metrics` at `http.listen` (default `127.0.0.1:9464`; `off` for none, as in the unit for
systemd without its drop-in `http.conf`), in the format of Prometheus, OpenMetrics when asked for, gzipped when asked
for. The connector adds its own to the `/metrics` of vLLM.
[configs/prometheus/alerts.yml](../configs/prometheus/alerts.yml) has alert rules,
[configs/grafana/kvtier.json](../configs/grafana/kvtier.json) a dashboard of both.

```yaml
scrape_configs:
  - job_name: kvtier
    static_configs:
      - targets: ["127.0.0.1:9464"]
```

No label is unbounded: there is none for prompts, sessions, namespaces or keys. Counters begin at 0 with the daemon. A scrape
reads all numbers at one moment of the event loop and counts no chunks, so its cost does not depend on their number. When the
loop does not answer within 5 s, the scrape fails with 503 and `up` is 0. `kvtier status` shows the same numbers.

At the same address, `GET /healthz` answers 200 while the process serves HTTP, and `GET /readyz` while every prompt that
operators pinned is durable for the attached engines, else 503 and what it waits for. The gRPC
health service says the latter of `kvtier.pins`. The [API](http-api.md) has the last hour and week of some of these numbers,
for where no Prometheus is.

| question | expression |
|---|---|
| share of chunks that engines asked the daemon for and got | `sum(rate(kvtier_hit_chunks_total[5m])) / (sum(rate(kvtier_hit_chunks_total[5m])) + sum(rate(kvtier_missed_chunks_total[5m])))` |
| share of prompt tokens that kvtier restored | `sum(rate(vllm:prompt_tokens_cached_by_source_total{source=~"host\\|disk"}[5m])) / sum(rate(vllm:prompt_tokens_total[5m]))` |
| write amplification | `sum(kvtier_disk_written_bytes_total) / sum(kvtier_written_back_bytes_total)` |
| compression | `sum(kvtier_written_back_bytes_total) / sum(kvtier_disk_written_bytes_total{reason="write_back"})` |
| 99th percentile of an answer | `histogram_quantile(0.99, sum by (le) (rate(kvtier_acquire_seconds_bucket[5m])))` |
"""

VLLM = """\
## What vLLM itself shows

| metric | meaning |
|---|---|
| `vllm:prompt_tokens_cached_by_source_total{source}` | prompt tokens not computed, counted at admission. `device`: vLLM's prefix cache. `host` and `disk`: kvtier, by where each chunk was when the request asked. `external_unspecified`: on models with sliding windows, tokens before the window, which need no KV. vLLM fixes the label's values, so there is none of kvtier's own |
| `vllm:external_prefix_cache_queries_total`, `vllm:external_prefix_cache_hits_total` | tokens that kvtier was asked for, and that it had |
| `vllm:kv_offload_load_bytes_total`, `vllm:kv_offload_load_time_total` | what the workers copied out of host memory, and the seconds that took, summed over all workers of an engine: with TP=2 both ranks' bytes and both ranks' seconds |
| `vllm:kv_offload_store_bytes_total`, `vllm:kv_offload_store_time_total` | likewise into it |
| `vllm:kv_offload_lookup_async_delay_seconds` | from a request's first deferred lookup to the final one |
"""

SPANS = """\
## Spans of requests

With `otlp_endpoint` in `kv_connector_extra_config` the connector sends OpenTelemetry spans to a collector, as children of
the client's `traceparent`. vLLM passes that on only with `--otlp-traces-endpoint`; both may name one collector.
`OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` (`grpc`, or `http/protobuf` with the path `/v1/traces`) counts for both, and so do the
SDK's other variables. A request without a `traceparent`, or with one that is not sampled, has no spans. The packages come
with vLLM, or with `pip install opentelemetry-sdk opentelemetry-exporter-otlp`.

| span | from, to | attributes |
|---|---|---|
| `kvtier.lookup` | vLLM's first question; hits and misses are fixed | `kvtier.namespace_id`; `kvtier.outcome`, as the label of `kvtier_connector_lookups`; `kvtier.chunks`, asked for |
| `kvtier.promotion_wait` | the answer that named chunks on disk; hits and misses are fixed | the same |
| `kvtier.load` | the first load job of the request begins; its last one is over | `kvtier.namespace_id`; `kvtier.outcome`: `loaded` or `failed`; `kvtier.chunks`; `kvtier.bytes`, uncompressed, of one rank; `kvtier.source_tier`: `host`, `disk` or `host+disk`; `gen_ai.usage.cache_read.input_tokens`, restored by kvtier |
"""


def document() -> str:
    """Return the whole page."""
    meanings = {each: meaning for record in RECORDS for each, meaning in _meanings(record).items()}
    metrics = [metric for record in RECORDS for metric in metrics_of(record)]
    parts = [
        HEAD,
        *_section("Counters of the daemon", _of_kind(metrics, Kind.COUNTER), meanings),
        *_section("The daemon as it is now", _of_kind(metrics, Kind.GAUGE), meanings),
        *_section("How long things take in the daemon", _of_kind(metrics, Kind.HISTOGRAM), meanings),
        "`process_*` of prometheus_client show CPU, memory and descriptors of the daemon.\n",
        *_section(
            "What the connector adds to vLLM's /metrics",
            METRICS,
            {(LOOKUPS.name, end): end.meaning for end in LookupEnd},
        ),
        "They carry vLLM's labels `model_name` and `engine` too, and are counted once per engine, whatever its TP size.\n",
        VLLM,
        SPANS,
    ]
    return "\n".join(parts)


def _section(title: str, metrics: Iterable[Metric], meanings: dict[tuple[str, str], str]) -> list[str]:
    rows = [
        f"| `{metric.name}` | {metric.kind} | {_labels(metric)} | {_meaning(metric, meanings)} |" for metric in metrics
    ]
    return [f"## {title}\n", "| metric | type | labels | meaning |", "|---|---|---|---|", *rows, ""]


def _labels(metric: Metric) -> str:
    return "; ".join(
        f"`{label}`: {', '.join(f'`{value}`' for value in values)}" if values else f"`{label}`"
        for label, values in metric.labels.items()
    )


def _meaning(metric: Metric, meanings: dict[tuple[str, str], str]) -> str:
    each = [
        f"`{value}`: {meaning}"
        for value in next(iter(metric.labels.values()), ())
        if (meaning := meanings.get((metric.name, value))) and len(metric.labels) == 1
    ]
    return " ".join([metric.meaning, *each])


def _of_kind(metrics: Iterable[Metric], kind: Kind) -> list[Metric]:
    return [metric for metric in metrics if metric.kind is kind]


def _meanings(record: type) -> dict[tuple[str, str], str]:
    """Return what each series means beyond its metric, by metric name and first label value."""
    all_series = [found for _, found in declared(record) if found.values]
    return {(s.metric.name, s.values[0]): s.meaning for s in all_series if s.meaning != s.metric.meaning}
