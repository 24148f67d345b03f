"""The daemon's HTTP, put together: one function that starts it, and what it needs of the daemon."""

from dataclasses import dataclass
from pathlib import Path

from kvtier.obs.exposition import Problem, Read
from kvtier.web.callers import Callers
from kvtier.web.http_app import http_app
from kvtier.web.http_bounds import HttpBounds
from kvtier.web.http_server import HttpServer


@dataclass(frozen=True, kw_only=True)
class DaemonDoor:
    """What HTTP needs of the daemon.

    Attributes:
        read: Takes a reading on the daemon's loop; called in a thread.
        why_not_ready: Likewise; see `kvtier.obs.exposition.Problem`.
        socket: Where the daemon's services listen, for the API.
        vllm_url: Of the vLLM that renders and computes what is pinned over HTTP.
    """

    read: Read
    why_not_ready: Problem
    socket: Path
    vllm_url: str


def serve_http(address: tuple[str, int], door: DaemonDoor, bounds: HttpBounds | None = None) -> HttpServer:
    """Start to serve, from a thread.

    Raises:
        OSError: The server cannot listen at the address.
    """
    bounds = bounds or HttpBounds()
    callers = Callers(address[0])
    return HttpServer(address, http_app(door.read, door.why_not_ready, callers, bounds), bounds)
