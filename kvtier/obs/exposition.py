"""`GET /metrics`: the daemon's metrics over HTTP, from threads of their own.

A scrape takes a reading on the event loop (0.1 ms, independent of the number of chunks) and does the rest in a thread:
HTTP, text, gzip, and slow clients. An asyncio handler would write the text on the loop in one piece; a thread releases
the interpreter when the loop needs it. ADR 15 says why the server is not that of prometheus_client.

When the loop does not answer in time, the scrape fails with 503 and `up` is 0. Engines see the same daemon: it does not
answer.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as PromMetric
from prometheus_client.registry import Collector

from kvtier.obs.declare import Family, Kind
from kvtier.obs.histogram import Histogram
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

PATH = "/metrics"
_CLIENT_TIMEOUT_S = 10.0
_STOP_POLL_S = 0.05

_FAMILIES = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}

Read = Callable[[], Sequence[Family]]
"""Returns a reading; called in a thread. Raises TimeoutError when the event loop does not answer."""


class MetricsServer:
    """Serves until `close`.

    Args:
        address: Host and port; port 0: any that is free.
        read: Called at each scrape.

    Raises:
        OSError: The server cannot listen at the address.
    """

    def __init__(self, address: tuple[str, int], read: Read) -> None:
        self._server = _HttpServer(address, _app(read))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_STOP_POLL_S,), name="kvtier-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where to scrape."""
        host, port = self._server.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else host
        return f"http://{f'[{name}]' if ':' in name else name}:{port}{PATH}"

    def close(self) -> None:
        """Stop listening. Blocks for at most 50 ms; does not wait for a scrape in progress."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _HttpServer(ThreadingMixIn, WSGIServer):
    """A thread per request, so that a silent client does not delay another."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], app: Any) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        super().__init__(address, _Handler)
        self.set_app(app)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a client disconnected, or sent nothing for too long."""
        log_event(logger, "scrape_failed", level=logging.DEBUG, client=client_address)


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is no event."""


class _Daemon(Collector):
    """One reading, as prometheus_client's metrics."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def describe(self) -> Iterable[PromMetric]:
        """Return nothing: the names would need a reading before the first scrape."""
        return ()

    def collect(self) -> Iterator[PromMetric]:
        """Take a reading."""
        return map(_exposed, self._read())


def _app(read: Read) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    registry = CollectorRegistry()
    registry.register(_Daemon(read))
    ProcessCollector(registry=registry)
    metrics = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            return _refuse(start_response, "404 Not Found", f"nothing here; the metrics are at {PATH}")
        try:
            answer: Iterable[bytes] = metrics(environ, start_response)
        except TimeoutError:
            return _refuse(start_response, "503 Service Unavailable", "the daemon's event loop does not answer")
        return answer

    return app


def _refuse(start_response: Any, status: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


def _exposed(family: Family) -> Any:
    metric = family.metric
    exposed: Any = _FAMILIES[metric.kind](metric.name, metric.meaning, labels=list(metric.labels))
    for values, value in family.samples:
        if isinstance(value, Histogram):
            buckets = [("+Inf" if bound == float("inf") else str(bound), num) for bound, num in value.cumulative()]
            exposed.add_metric(values, buckets=buckets, sum_value=value.total)
        else:
            exposed.add_metric(values, value)
    return exposed
