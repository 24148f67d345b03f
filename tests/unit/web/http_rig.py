"""HTTP of a daemon that is not there, over real sockets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.access.audit_log import AuditLog
from kvtier.access.caller import Role
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.access.grants import GrantBook, WantedGrant
from kvtier.web.served_http import ServedDaemon, serve_http
from kvtier.web.transport.http_bounds import HttpBounds
from kvtier.web.transport.http_server import HttpServer
from kvtier.web.transport.tls_source import TlsSource

NO_VLLM = "http://127.0.0.1:1"


def gatekeeper_in(folder: Path, *, needs_credentials: bool = True) -> Gatekeeper:
    """Return who knows the grants of a folder."""
    return Gatekeeper(GrantBook(folder), AuditLog(None), needs_credentials=needs_credentials)


def headers_of_viewer(gatekeeper: Gatekeeper, name: str) -> dict[str, str]:
    """Make a grant for a viewer; return the headers of its requests."""
    _, token = gatekeeper.grants.create(WantedGrant(name=name, role=Role.VIEWER), 0.0)
    return {"Authorization": f"Bearer {token}"}


@contextmanager
def served_door(
    *,
    read: Any = list,
    why_not_ready: Any = str,
    host: str = "127.0.0.1",
    port: int = 0,
    socket: Path = Path("/nonexistent/kvtier.sock"),
    vllm_url: str = NO_VLLM,
    gatekeeper: Gatekeeper | None = None,
    tls: TlsSource | None = None,
    bounds: HttpBounds | None = None,
) -> Iterator[HttpServer]:
    """Serve until the block ends; without a gatekeeper everyone may ask."""
    daemon = ServedDaemon(
        read=read,
        why_not_ready=why_not_ready,
        socket=socket,
        vllm_url=vllm_url,
        gatekeeper=gatekeeper or gatekeeper_in(Path("/nonexistent"), needs_credentials=False),
        tls=tls,
    )
    server = serve_http((host, port), daemon, bounds)
    try:
        yield server
    finally:
        server.close()
