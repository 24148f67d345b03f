"""Spans of traced requests: what they say of lookup, wait and load, and that they reach a collector."""

import gzip
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtier._pb import engine_pb2 as pb
from kvtier.errors import ConfigError
from kvtier_connector.metrics import request_spans
from kvtier_connector.metrics.request_spans import CACHED_TOKENS, PROTOCOL_VARIABLE, RequestSpans, exporting_to
from tests.fakes.otlp_collector import Collector, over_grpc
from tests.unit.connector.harness import BLOCK_TOKENS, LOOKUP_TIMEOUT_S, FakeRequest, Scheduler, hashes_of

HOST, PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.PROMOTING
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
KEYS = [block_hash + b"\0\0\0\0" for block_hash in hashes_of("p", 3)]


class Traced:
    """An engine that holds a pin of three chunks, and whose spans stay here."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.exporter = InMemorySpanExporter()
        spans = RequestSpans(SimpleSpanProcessor(self.exporter))
        self.scheduler = Scheduler(patch, spans=spans)
        self.scheduler.attach()
        self.scheduler.pin(KEYS)
        self.scheduler.step()

    def request(self, name: str = "p") -> Any:
        return self.scheduler.new_request(name, 3)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    monkeypatch.setattr(FakeRequest, "trace_headers", HEADERS, raising=False)
    return Traced(monkeypatch)


def said(span: ReadableSpan) -> dict[str, Any]:
    """Return what a span says, besides the namespace."""
    return {name: value for name, value in (span.attributes or {}).items() if name != "kvtier.namespace_id"}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_lookup_and_a_load_are_children_of_the_clients_span(traced: Traced) -> None:
    scheduler, clock = traced.scheduler, traced.scheduler.clock
    request = traced.request()
    assert scheduler.ask(request) is None
    acquire = scheduler.sent_one("acquire")
    clock.now_s += 0.125
    scheduler.answer(acquire, [HOST] * 3)
    assert scheduler.ask(request) == 3 * BLOCK_TOKENS
    meta = scheduler.step(new=[(request, scheduler.allocate(request, 0, 3 * BLOCK_TOKENS))])
    clock.now_s += 0.25
    scheduler.workers_report(list(meta.load_jobs))
    lookup, load = traced.spans()["kvtier.lookup"], traced.spans()["kvtier.load"]
    assert {(span.attributes or {})["kvtier.namespace_id"] for span in (lookup, load)} == {"n1"}
    for span in (lookup, load):
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert said(lookup) == {"kvtier.outcome": "whole", "kvtier.chunks": 3}
    useful_bytes = scheduler.manager._useful_bytes[0]
    assert said(load) == {
        "kvtier.outcome": "loaded",
        "kvtier.chunks": 3,
        "kvtier.bytes": 3 * useful_bytes,
        "kvtier.source_tier": "host",
        CACHED_TOKENS: 3 * BLOCK_TOKENS,
    }
    assert seconds(lookup) == pytest.approx(0.125)
    assert seconds(load) == pytest.approx(0.25)
    assert lookup.end_time == load.start_time


def test_spans_follow_a_clock_that_is_set(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lay beside the client's, by what the clock was wrong when vLLM started, or the machine was suspended."""
    scheduler, hours = traced.scheduler, 3600 * 10**9

    def began_ns(req_id: str) -> int:
        traced.exporter.clear()
        scheduler.ask(scheduler.new_request("other", 3, req_id))
        start_time = traced.spans()["kvtier.lookup"].start_time
        assert start_time is not None
        return start_time

    before = began_ns("r1")
    time_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: time_ns() + 5 * hours)
    assert began_ns("r2") - before == pytest.approx(5 * hours, abs=hours)


def test_a_wait_for_promotions_has_a_span(traced: Traced) -> None:
    scheduler, clock = traced.scheduler, traced.scheduler.clock
    request = traced.request()
    scheduler.ask(request)
    acquire = scheduler.sent_one("acquire")
    scheduler.answer(acquire, [PROMOTING] * 3, pending_bytes=100, ready_in_s=0.01)
    assert scheduler.ask(request) is None
    clock.now_s += 0.0625
    scheduler.answer(acquire, [HOST] * 3)
    assert scheduler.ask(request) == 3 * BLOCK_TOKENS
    wait = traced.spans()["kvtier.promotion_wait"]
    assert seconds(wait) == pytest.approx(0.0625)
    assert (wait.attributes or {})["kvtier.outcome"] == "whole"


def test_a_lookup_that_begins_again_after_a_fault_has_another_span(traced: Traced) -> None:
    scheduler, clock = traced.scheduler, traced.scheduler.clock
    request = traced.request()
    assert scheduler.ask(request) is None
    clock.now_s += 2 * LOOKUP_TIMEOUT_S
    assert scheduler.ask(request) == 0
    clock.now_s += 1.0
    scheduler.sent()
    scheduler.say(pb.DaemonMessage(pong=pb.Pong()))
    assert scheduler.ask(request) is None
    clock.now_s += 0.125
    scheduler.answer(scheduler.sent_one("acquire"), [HOST] * 3)
    assert scheduler.ask(request) == 3 * BLOCK_TOKENS
    late, whole = traced.exporter.get_finished_spans()
    assert said(late) == {"kvtier.outcome": "late", "kvtier.chunks": 0}
    assert said(whole) == {"kvtier.outcome": "whole", "kvtier.chunks": 3}
    assert seconds(whole) == pytest.approx(0.125)


def test_a_request_that_is_not_asked_for_says_why(traced: Traced) -> None:
    request = traced.request(name="other")
    assert traced.scheduler.ask(request) == 0
    assert traced.scheduler.ask(request) == 0
    (span,) = traced.exporter.get_finished_spans()
    assert said(span) == {"kvtier.outcome": "unknown", "kvtier.chunks": 0}


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "x"}, {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}])
def test_what_no_client_traces_has_no_spans(headers: dict[str, str] | None) -> None:
    spans = RequestSpans(SimpleSpanProcessor(InMemorySpanExporter()))
    assert spans.of(headers, "n") is None


@contextmanager
def over_http(collector: Collector) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            collector.Export(otlp.ExportTraceServiceRequest.FromString(body), None)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("protocol", "serving"), [("grpc", over_grpc), ("http/protobuf", over_http)])
def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch, protocol: str, serving: Any) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, protocol)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    collector = Collector()
    with serving(collector) as endpoint:
        spans = exporting_to(endpoint)
        trace = spans.of(HEADERS, "n")
        assert trace is not None
        trace.asked(1.0)
        trace.decided("whole", 3, None, 2.0)
        spans.close()
        assert collector.spans("kvtier-connector").keys() == {"kvtier.lookup"}


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL_VARIABLE, "carrier-pigeon")
    with pytest.raises(ConfigError, match="use grpc or http/protobuf"):
        exporting_to("http://127.0.0.1:1")
    monkeypatch.setattr(request_spans, "_is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-sdk"):
        exporting_to("http://127.0.0.1:1")
