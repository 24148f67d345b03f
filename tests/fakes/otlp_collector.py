"""An OTLP collector, which keeps the spans that it gets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.fakes.scripted_engine import DEADLINE_S


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Its gRPC half; over HTTP a test calls `Export`."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._requests: list[otlp.ExportTraceServiceRequest] = []

    def Export(self, request: otlp.ExportTraceServiceRequest, context: Any) -> otlp.ExportTraceServiceResponse:
        """Take spans."""
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()
        return otlp.ExportTraceServiceResponse()

    def spans(self, service: str) -> dict[str, Span]:
        """Wait for spans of a service, and return them by name."""
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self._of(service)), DEADLINE_S)
            return self._of(service)

    def _of(self, service: str) -> dict[str, Span]:
        return {
            span.name: span
            for request in self._requests
            for found in request.resource_spans
            if any(
                each.key == "service.name" and each.value.string_value == service for each in found.resource.attributes
            )
            for scope in found.scope_spans
            for span in scope.spans
        }


@contextmanager
def over_grpc(collector: Collector) -> Iterator[str]:
    """Serve it on loopback; yields its endpoint."""
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()
