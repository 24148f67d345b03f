"""`GET /metrics` and `GET /readyz`: metrics and readiness over HTTP, from threads of their own (ADR 15)."""

import gzip
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PromMetric
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import Collector

from kvtier.concurrency.pauses import POLL_S
from kvtier.obs.declare import Kind, Metric, declared
from kvtier.obs.histogram import Histogram
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

PATH = "/metrics"
READY_PATH = "/readyz"

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


class MetricsServer(ThreadingHTTPServer):
    """Serves until `close`, each request in a thread, so that a silent client does not delay another.

    Args:
        address: Host and port; port 0: any that is free.
        read: Called at each scrape.
        problem: Called for each `GET /readyz`.

    Raises:
        OSError: The server cannot listen at the address.
    """

    def __init__(self, address: tuple[str, int], read: Read, problem: Problem = lambda: "") -> None:
        self.problem = problem
        self.registry = CollectorRegistry()
        self.registry.register(_Daemon(read))
        ProcessCollector(registry=self.registry)
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_S,), name="kvtier-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where to scrape."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    def close(self) -> None:
        """Stop listening. Blocks for at most a tenth of a second; does not wait for a scrape in progress."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a client disconnected; the base class would print a traceback."""
        log_event(logger, "scrape_failed", level=logging.DEBUG, client=client_address)


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = 10.0  # of a client that sends or reads nothing

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == READY_PATH:
            self._answer_ready()
            return
        if path != PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"nothing here; the metrics are at {PATH}\n".encode())
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            text = encode(self.server.registry)
        except TimeoutError:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the daemon's event loop does not answer\n")
            return
        except Exception:
            logger.exception("the metrics cannot be read")  # a defect: the traceback is of use
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"a defect of kvtier: the daemon's log has its traceback\n")
            return
        if gzip_accepted(self.headers.get("Accept-Encoding", "")):
            self._answer(HTTPStatus.OK, gzip.compress(text), content_type, "gzip")
        else:
            self._answer(HTTPStatus.OK, text, content_type)

    def _answer_ready(self) -> None:
        try:
            problem = self.server.problem()
        except TimeoutError:
            problem = "the daemon's event loop does not answer"
        status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
        self._answer(status, f"{problem or 'ready'}\n".encode())

    def _answer(
        self, status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8", encoding: str = ""
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is no event."""


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
