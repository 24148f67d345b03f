"""uvicorn in a thread with an event loop of its own, so that no client delays an engine (ADR 37)."""

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import uvicorn

from kvtier.concurrency.header_lines import read_headers_in_linear_time
from kvtier.concurrency.tasks import kept_running
from kvtier.web.transport.bounded_connections import bounded_by, end_slow_connections
from kvtier.web.transport.bounded_listener import BoundedListener
from kvtier.web.transport.http_bounds import HttpBounds
from kvtier.web.transport.tls_source import TlsSource

App = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application."""
Background = Callable[[], Coroutine[Any, Any, None]]
"""What runs on the server's loop beside requests, until it is cancelled."""

_GRACE_S = 0.2


class HttpServer:
    """Serves until `close`."""

    def __init__(
        self,
        address: tuple[str, int],
        app: App,
        bounds: HttpBounds,
        *,
        tls: TlsSource | None = None,
        background: Background,
        before_close: Callable[[], None],
    ) -> None:
        """Listen, and serve from a thread.

        Args:
            address: Host and port; port 0: any that is free.
            app: Answers.
            bounds: Of connections.
            tls: Certificates; None: without TLS.
            background: See `Background`.
            before_close: Ends what calls wait for.

        Raises:
            OSError: The server cannot listen at the address.
        """
        families = [found[0] for found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM)]
        # Of a name with both, such as localhost, what a scrape of 127.0.0.1 reaches.
        family = socket.AF_INET if socket.AF_INET in families else families[0]
        self._listener = socket.create_server(address, family=family, backlog=512)
        self._loop = asyncio.new_event_loop()
        if tls is not None:
            self._bound_handshakes(bounds)
        read_headers_in_linear_time()
        config = uvicorn.Config(
            app,
            # httptools, which uvicorn takes where it is installed, reads headers without end.
            http=bounded_by(bounds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=bounds.max_header_bytes,
            timeout_keep_alive=bounds.idle_timeout_s,  # type: ignore[arg-type]  # loop.call_later takes it
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = None if tls is None else tls.context
        # A warning for each request that is no HTTP: any client could write the log full. `http_app` logs defects.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._tls = tls
        self._bounds, self._background, self._before_close = bounds, background, before_close
        self._server = uvicorn.Server(config)
        self.url = self._url()
        """Where it serves: `http://host:port`."""
        self._thread = threading.Thread(target=self._run, name="kvtier-http", daemon=True)
        self._thread.start()

    def _bound_handshakes(self, bounds: HttpBounds) -> None:
        # A connection is uvicorn's, which counts and ends them, once TLS stands. asyncio gives a handshake a minute.
        self._listener = BoundedListener(self._listener, bounds.max_connections)
        create = partial(self._loop.create_server, ssl_handshake_timeout=bounds.header_timeout_s)
        self._loop.create_server = create  # type: ignore[method-assign]

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._server.server_state.connections)

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{'http' if self._tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

    def close(self) -> None:
        """Stop listening, give running answers a moment, and end the thread. Does not wait for calls of clients."""
        self._before_close()
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._loop.call_later(_GRACE_S, self._abort)

    def _abort(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        slow = partial(end_slow_connections, self._server.server_state.connections, self._bounds)
        loops: dict[str, Background] = {"http-slow": slow, "http-background": self._background}
        if self._tls is not None:
            loops["http-tls"] = self._tls.keep_fresh
        tasks = [asyncio.create_task(kept_running(name, run), name=name) for name, run in loops.items()]
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            self._abort()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
