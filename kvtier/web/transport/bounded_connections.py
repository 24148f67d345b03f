"""Connections that end by themselves: a client that is too slow in any direction loses its connection, and no more."""

import asyncio
from typing import Any

import h11

from kvtier.concurrency.single_answers import SingleAnswerProtocol
from kvtier.web.callers import CERTIFICATE
from kvtier.web.transport.http_bounds import HttpBounds
from kvtier.web.transport.tls_source import common_name

_TOO_MANY = b"the daemon has as many connections as it may\n"
_REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_TOO_MANY), _TOO_MANY)
)


class BoundedConnection(SingleAnswerProtocol):
    """A connection of uvicorn that knows since when it waits for its client. Loop thread only."""

    bounds = HttpBounds()
    """Of all connections of a server; see `bounded_by`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol. One connection too many is answered 503 and closed."""
        now_s = self.loop.time()
        self._headers_since_s: float | None = now_s
        self._body_since_s = self._taken_s = self._answered_s = now_s
        self._untaken_bytes = 0
        name = common_name(transport.get_extra_info("peercert"))
        self.app_state = {**self.app_state, CERTIFICATE: name}
        super().connection_made(transport)
        if len(self.connections) > self.bounds.max_connections:
            self.connections.discard(self)
            transport.write(_REFUSED)
            transport.close()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.transport.is_closing():
            return
        self._body_since_s = self.loop.time()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._headers_since_s = None
        elif self._headers_since_s is None and self.conn.trailing_data[0]:
            self._headers_since_s = self._body_since_s  # a request has begun

    def on_response_complete(self) -> None:
        """See H11Protocol."""
        self._headers_since_s = None
        self._answered_s = self.loop.time()
        super().on_response_complete()

    def end_if_slow(self, now_s: float) -> None:
        """End the connection if its client has been waited for too long."""
        if self._sends_too_slowly(now_s) or self._takes_too_slowly(now_s):
            self.transport.abort()

    def _sends_too_slowly(self, now_s: float) -> bool:
        bounds = self.bounds
        if self._headers_since_s is not None:
            return now_s - self._headers_since_s > bounds.header_timeout_s
        if self.conn.their_state is not h11.SEND_BODY:
            return False
        if self.cycle.response_complete:  # refused before its end: the rest is read, for a moment
            return now_s - self._answered_s > bounds.header_timeout_s
        if self.flow.read_paused:  # the daemon's turn: it has bytes that it has not read yet
            self._body_since_s = now_s
        return now_s - self._body_since_s > bounds.body_timeout_s

    def _takes_too_slowly(self, now_s: float) -> bool:
        waiting_bytes = self.transport.get_write_buffer_size()
        if not waiting_bytes or waiting_bytes < self._untaken_bytes:
            self._taken_s = now_s
        self._untaken_bytes = waiting_bytes
        return now_s - self._taken_s > self.bounds.read_timeout_s


def bounded_by(bounds: HttpBounds) -> type[BoundedConnection]:
    """Return the class of a server's connections: uvicorn makes them without further arguments."""
    return type("BoundedConnection", (BoundedConnection,), {"bounds": bounds})


async def end_slow_connections(connections: set[Any], bounds: HttpBounds) -> None:
    """Look at all connections again and again, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(bounds.sweep_s)
        for connection in list(connections):
            connection.end_if_slow(loop.time())
