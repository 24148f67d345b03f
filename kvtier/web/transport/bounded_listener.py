"""A listener that counts connections from the moment they are accepted: uvicorn's do not count before TLS stands."""

import errno
import os
import socket
from typing import Any
from weakref import WeakSet


class BoundedListener(socket.socket):
    """Closes at once what it accepts beyond its bound."""

    def __init__(self, listener: socket.socket, max_connections: int) -> None:
        """Take over a socket that listens."""
        super().__init__(fileno=listener.detach())
        self._max_connections = max_connections
        self._accepted: WeakSet[socket.socket] = WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection and its address.

        Raises:
            ConnectionAbortedError: As many are open as may; that one is closed.
        """
        connection, address = super().accept()
        if sum(each.fileno() >= 0 for each in self._accepted) >= self._max_connections:
            connection.close()
            raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
        self._accepted.add(connection)
        return connection, address
