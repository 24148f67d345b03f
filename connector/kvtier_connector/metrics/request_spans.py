"""OpenTelemetry spans of requests: lookup, wait for promotions and load, as children of the client's trace.

vLLM passes the client's `traceparent` on (`Request.trace_headers`) when it traces itself, with
`--otlp-traces-endpoint`; a request without one gets no spans. The scheduler only builds spans: a thread of the SDK
sends them, and drops what a collector does not take in time.
"""

import importlib.util
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError
from kvtier.printable import shown_url

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""vLLM reads it too."""
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
"""Source: semantic conventions for generative AI, attributes of a span."""
_CLOSE_TIMEOUT_S = 1.0


class RequestSpans:
    """Makes the spans of all requests of one engine. Scheduler thread only.

    Args:
        processor: Gets every span that has ended.
    """

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Not the global provider, which vLLM sets for itself.
        attributes = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "kvtier-connector"}
        self._provider = TracerProvider(resource=Resource.create(attributes))
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("kvtier_connector")
        self._propagator = TraceContextTextMapPropagator()

    def of(self, headers: Mapping[str, str] | None, namespace_id: str) -> "RequestTrace | None":
        """Return the trace of a request with these headers; None without a client's trace, or if it is not sampled."""
        if not headers:
            return None
        from opentelemetry.trace import get_current_span

        context = self._propagator.extract(headers)
        parent = get_current_span(context).get_span_context()
        return RequestTrace(self, context, namespace_id) if parent.is_valid and parent.trace_flags.sampled else None

    def record(self, name: str, began_ns: int, ended_ns: int, context: Any, attributes: dict[str, Any]) -> None:
        """Record a span that has ended; Unix time."""
        span = self.tracer.start_span(name, context, attributes=attributes, start_time=began_ns)
        span.end(ended_ns)

    def close(self) -> None:
        """Send what is left, for a second at most: a collector that does not answer delays no end of vLLM."""
        closing = threading.Thread(target=self._provider.shutdown, name="kvtier-otel-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


class RequestTrace:
    """The spans of one request; a preempted request is looked up and loaded again."""

    def __init__(self, spans: RequestSpans, context: Any, namespace_id: str) -> None:
        self._spans, self._context, self._namespace_id = spans, context, namespace_id
        # Of each request, not of the engine: the clock may be set, or stand still while the machine is suspended.
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()
        self._asked_s: float | None = None
        self._is_decided = False  # vLLM asks again in each step until it has blocks
        self._loading_s: float | None = None
        self._cached_tokens = 0
        self._num_host = self._num_disk = self._num_bytes = 0

    def asked(self, now_s: float) -> None:
        """vLLM asks what can be loaded; the first question of a round counts."""
        if self._asked_s is None and not self._is_decided:
            self._asked_s = now_s

    def asked_again(self, now_s: float) -> None:
        """A round begins again after a fault; if hits and misses were fixed, another span begins."""
        if self._is_decided:
            self._asked_s, self._is_decided = now_s, False

    def decided(self, outcome: str, num_chunks: int, promoting_since_s: float | None, now_s: float) -> None:
        """Hits and misses of the round are fixed.

        Args:
            outcome: As the label of `kvtier_connector_lookups`.
            num_chunks: Asked for; 0: nothing was.
            promoting_since_s: When the first answer named chunks that were still on disk; None: it named none.
            now_s: Monotonic seconds.
        """
        if self._asked_s is None:
            return
        attributes = {"kvtier.outcome": outcome, "kvtier.chunks": num_chunks}
        self._record("kvtier.lookup", self._asked_s, now_s, attributes)
        if promoting_since_s is not None:
            self._record("kvtier.promotion_wait", promoting_since_s, now_s, attributes)
        self._asked_s, self._is_decided = None, True

    def allocated(self, num_tokens: int) -> None:
        """vLLM has allocated blocks for this many tokens that are loaded."""
        self._cached_tokens, self._is_decided = num_tokens, False

    def loading(self, num_host: int, num_disk: int, num_bytes: int, now_s: float) -> None:
        """A load job begins: chunks that were in host memory, and on disk, when they were asked for."""
        self._loading_s = now_s if self._loading_s is None else self._loading_s
        self._num_host += num_host
        self._num_disk += num_disk
        self._num_bytes += num_bytes

    def loaded(self, *, failed: bool, now_s: float) -> None:
        """The last load job is over."""
        if self._loading_s is None:
            return
        tiers = [tier for tier, num in (("host", self._num_host), ("disk", self._num_disk)) if num]
        attributes = {
            "kvtier.outcome": "failed" if failed else "loaded",
            "kvtier.chunks": self._num_host + self._num_disk,
            "kvtier.bytes": self._num_bytes,
            "kvtier.source_tier": "+".join(tiers),
            CACHED_TOKENS: 0 if failed else self._cached_tokens,
        }
        self._record("kvtier.load", self._loading_s, now_s, attributes)
        self._loading_s = None
        self._num_host = self._num_disk = self._num_bytes = 0

    def _record(self, name: str, began_s: float, ended_s: float, attributes: dict[str, Any]) -> None:
        attributes = {"kvtier.namespace_id": self._namespace_id, **attributes}
        self._spans.record(name, self._unix_ns(began_s), self._unix_ns(ended_s), self._context, attributes)

    def _unix_ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._unix_offset_ns


def exporting_to(endpoint: str) -> RequestSpans:
    """Return spans that go to an OTLP collector, by the protocol that the environment names; gRPC by default.

    Raises:
        ConfigError: OpenTelemetry's SDK is not installed, or the protocol is none that is spoken here.
    """
    if not all(map(_is_installed, ("opentelemetry.sdk", "opentelemetry.exporter.otlp"))):
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp"
        remedy = f"OpenTelemetry is not installed in vLLM's environment; `pip install {packages}` there"
        raise ConfigError("otlp_endpoint", shown_url(endpoint), "kv_connector_extra_config", remedy)
    if (protocol := os.environ.get(PROTOCOL_VARIABLE, "grpc")) not in ("grpc", "http/protobuf"):
        raise ConfigError(PROTOCOL_VARIABLE, protocol, "environment", "use grpc or http/protobuf")
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    exporter: SpanExporter
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        exporter = HttpExporter(endpoint=endpoint)
    else:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter = GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
    return RequestSpans(BatchSpanProcessor(exporter))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False
