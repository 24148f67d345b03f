"""HTTP beside the gRPC server; it never delays an answer to an engine."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvtier.access.gatekeeper import Gatekeeper
from kvtier.config import DaemonConfig
from kvtier.config.model import OFF
from kvtier.config.units import is_loopback, parse_address
from kvtier.errors import ConfigError
from kvtier.obs.log import log_event
from kvtier.rpc.doors.tcp_server import read_tls_files
from kvtier.service import Cache
from kvtier.service.metrics_reading import read_metrics

if TYPE_CHECKING:
    from kvtier.obs.exposition import Problem, Read
    from kvtier.web.transport.http_server import HttpServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOP_TIMEOUT_S = 5.0
_SWITCH_S = 0.0005
"""How long a thread of HTTP keeps the interpreter while the loop waits for it; Python's default is ten times as long,
and an answer to an engine waits several times. Beside ten clients of the API the 99th percentile of an acquire was 61
to 106 ms instead of 91 to 184, in three comparisons on two busy cores (`benchmarks.event_loop.http_clients`)."""


@dataclass
class HttpState:
    """Where HTTP is served, or why it is not (with the remedy): for `kvtier status` and `kvtier doctor`."""

    url: str = ""
    problem: str = ""


@asynccontextmanager
async def serving_http(
    config: DaemonConfig, gatekeeper: Gatekeeper, cache: Cache, state: HttpState
) -> AsyncIterator[None]:
    """Serve during the block, unless HTTP is off.

    If the server cannot listen, `state` and one log line say why, and the daemon serves engines without HTTP.

    Args:
        config: Where, and the socket of the daemon's services, which answer already.
        gatekeeper: Knows who may ask.
        cache: What metrics and readiness are read from.
        state: Filled in.
    """
    server = None
    if config.http.listen != OFF:
        try:
            read, why_not_ready = _on_loop(lambda: read_metrics(cache)), _on_loop(cache.readiness.problem)
            server = await asyncio.to_thread(_start, config, gatekeeper, read, why_not_ready)
        except ConfigError as error:
            state.problem = str(error)
            log_event(logger, "http_not_served", level=logging.ERROR, problem=state.problem)
        else:
            state.url = server.url
            log_event(logger, "http_served", url=state.url)
    before_s = sys.getswitchinterval()
    if server is not None:
        sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
        if server is not None:
            await asyncio.to_thread(server.close)


def _start(config: DaemonConfig, gatekeeper: Gatekeeper, read: "Read", why_not_ready: "Problem") -> "HttpServer":
    # Imported here, in a thread and after engines are served, so that no start waits for it.
    from kvtier.web.served_http import ServedDaemon, serve_http
    from kvtier.web.transport.tls_source import TlsSource

    access, listen = config.access, config.http.listen
    try:
        # Beyond loopback only: Prometheus and probes of this host go on without it.
        tls = None if is_loopback(listen) else read_tls_files(access)
        daemon = ServedDaemon(
            read=read,
            why_not_ready=why_not_ready,
            socket=config.server.socket,
            vllm_url=config.http.vllm_url,
            gatekeeper=gatekeeper,
            tls=None if tls is None else TlsSource(tls),
        )
        return serve_http(parse_address(listen), daemon)
    except (OSError, UnicodeError) as exc:  # UnicodeError: a name that no resolver accepts
        why = getattr(exc, "strerror", None) or exc
        remedy = f'name another address, or "{OFF}", or free this one, and restart the daemon'
        problem = f"cannot listen there: {why}; {remedy}"
        raise ConfigError("http.listen", listen, "start", problem) from exc


def _on_loop(call: Callable[[], T]) -> Callable[[], T]:
    """Return a function that other threads call to have a short call made on this loop."""
    loop = asyncio.get_running_loop()

    def take(reading: "Future[T]") -> None:
        if reading.set_running_or_notify_cancel():
            try:
                reading.set_result(call())
            except Exception as exc:  # a defect: the thread that asked reports it
                reading.set_exception(exc)

    def read() -> T:
        reading: Future[T] = Future()
        try:
            loop.call_soon_threadsafe(take, reading)
            return reading.result(_LOOP_TIMEOUT_S)
        except RuntimeError as exc:  # the loop is closed: the daemon ended during this scrape
            raise TimeoutError from exc
        finally:
            reading.cancel()

    return read
