"""HTTP of a daemon that is not there, over real sockets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.web.http_bounds import HttpBounds
from kvtier.web.http_server import HttpServer
from kvtier.web.served_http import ServedDaemon, serve_http

NO_VLLM = "http://127.0.0.1:1"


@contextmanager
def served_door(
    *,
    read: Any = list,
    why_not_ready: Any = str,
    host: str = "127.0.0.1",
    port: int = 0,
    socket: Path = Path("/nonexistent/kvtier.sock"),
    vllm_url: str = NO_VLLM,
    bounds: HttpBounds | None = None,
) -> Iterator[HttpServer]:
    """Serve until the block ends."""
    daemon = ServedDaemon(read=read, why_not_ready=why_not_ready, socket=socket, vllm_url=vllm_url)
    server = serve_http((host, port), daemon, bounds)
    try:
        yield server
    finally:
        server.close()
