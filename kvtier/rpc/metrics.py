"""The metrics server beside the gRPC server; it never delays an answer to an engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvtier.config import MetricsConfig
from kvtier.config.model import OFF
from kvtier.config.units import parse_address
from kvtier.errors import ConfigError
from kvtier.obs.log import log_event
from kvtier.service import Cache
from kvtier.service.metrics_reading import read_metrics

if TYPE_CHECKING:
    from kvtier.obs.exposition import MetricsServer, Problem, Read

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOP_TIMEOUT_S = 5.0


@dataclass
class MetricsState:
    """Where metrics are served, or why they are not (with the remedy): for `kvtier status` and `kvtier doctor`."""

    url: str = ""
    problem: str = ""


@asynccontextmanager
async def serving_metrics(config: MetricsConfig, cache: Cache, state: MetricsState) -> AsyncIterator[None]:
    """Serve during the block, unless metrics are off.

    If the server cannot listen, `state` and one log line say why, and the daemon serves engines without metrics.
    """
    server = None
    if config.listen != OFF:
        try:
            read, why_not_ready = _on_loop(lambda: read_metrics(cache)), _on_loop(cache.readiness.problem)
            server = await asyncio.to_thread(_start, config.listen, read, why_not_ready)
        except ConfigError as error:
            state.problem = str(error)
            log_event(logger, "metrics_not_served", level=logging.ERROR, problem=state.problem)
        else:
            state.url = server.url
            log_event(logger, "metrics_served", url=state.url)
    try:
        yield
    finally:
        if server is not None:
            await asyncio.to_thread(server.close)


def _start(listen: str, read: "Read", why_not_ready: "Problem") -> "MetricsServer":
    # Imported here, in a thread and after engines are served, so that no start waits for it.
    from kvtier.obs.exposition import MetricsServer

    try:
        return MetricsServer(parse_address(listen), read, why_not_ready)
    except (OSError, UnicodeError) as exc:  # UnicodeError: a name that no resolver accepts
        why = getattr(exc, "strerror", None) or exc
        remedy = f'name another address, or "{OFF}", or free this one, and restart the daemon'
        problem = f"cannot listen there: {why}; {remedy}"
        raise ConfigError("metrics.listen", listen, "start", problem) from exc


def _on_loop(call: Callable[[], T]) -> Callable[[], T]:
    """Return a function that other threads call to have a short call made on this loop."""
    loop = asyncio.get_running_loop()

    def take(reading: "Future[T]") -> None:
        if reading.set_running_or_notify_cancel():
            reading.set_result(call())

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
