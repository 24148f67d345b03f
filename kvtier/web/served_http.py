"""The daemon's HTTP, put together: one function that starts it, and what it needs of the daemon."""

from dataclasses import dataclass
from pathlib import Path

from kvtier.access.caller_shares import CallerShares
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.obs.exposition import Problem, Read
from kvtier.web.api.daemon_calls import DaemonDoor
from kvtier.web.call_threads import CallThreads
from kvtier.web.callers import Callers
from kvtier.web.http_app import http_app
from kvtier.web.number_history import NumberHistory, sample
from kvtier.web.probes import Probes
from kvtier.web.transport.http_bounds import HttpBounds, share_of
from kvtier.web.transport.http_server import HttpServer
from kvtier.web.transport.tls_source import TlsSource


@dataclass(frozen=True, kw_only=True)
class ServedDaemon:
    """What HTTP needs of the daemon.

    Attributes:
        read: Takes a reading on the daemon's loop; called in a thread.
        why_not_ready: Likewise; see `kvtier.obs.exposition.Problem`.
        socket: Where the daemon's services listen, for the API.
        vllm_url: Of the vLLM that renders and computes what is pinned over HTTP.
        gatekeeper: Knows who may ask.
        tls: Certificates; None: HTTP without TLS.
    """

    read: Read
    why_not_ready: Problem
    socket: Path
    vllm_url: str
    gatekeeper: Gatekeeper
    tls: TlsSource | None = None


def serve_http(address: tuple[str, int], daemon: ServedDaemon, bounds: HttpBounds | None = None) -> HttpServer:
    """Start to serve, from a thread.

    Raises:
        OSError: The server cannot listen at the address.
    """
    bounds = bounds or HttpBounds()
    calls = CallThreads("http-call", bounds.max_calls, share_of(bounds.max_calls))
    transfers = CallThreads("http-bundle", bounds.max_transfers, share_of(bounds.max_transfers), what="bundles")
    bodies = CallerShares("bodies of requests come over HTTP", bounds.max_calls, share_of(bounds.max_calls))
    door = DaemonDoor(daemon.socket, daemon.vllm_url, calls, transfers, bodies)
    history, samples = NumberHistory(), CallThreads("http-sample", 1)
    probes = Probes(daemon.read, daemon.why_not_ready, CallThreads("http-probe", bounds.max_probes))
    return HttpServer(
        address,
        http_app(probes, door, history, Callers(address[0], daemon.gatekeeper, has_tls=daemon.tls is not None), bounds),
        bounds,
        tls=daemon.tls,
        background=lambda: sample(history, daemon.read, samples),
        before_close=door.close,
    )
