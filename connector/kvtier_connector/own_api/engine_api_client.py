"""vLLM's own API server, as the warm start asks it: its health, and completions of one token. Standard library only."""

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from kvtier.errors import KvtierError
from kvtier.printable import cut


class ApiRefusedError(KvtierError):
    """The server answered with an error."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status  # of HTTP


class ApiGoneError(KvtierError):
    """No answer, or none that is HTTP."""


class EngineApiClient:
    """One server. One thread sends requests; `close`, from any thread, ends the one it waits for.

    Connects directly, whatever proxies the environment names: the server is this vLLM's own.
    """

    def __init__(self, url: str, api_key: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "settings are checked"
        self._connects = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open: http.client.HTTPConnection | None = None
        self._is_closed = False

    def is_healthy(self) -> bool:
        """Return whether the server is there and ready."""
        try:
            self._ask("GET", "/health", None, 5.0)
        except (ApiRefusedError, ApiGoneError):
            return False
        return True

    def complete(self, body: Mapping[str, Any], timeout_s: float) -> None:
        """Request a completion and drop its text; raises ApiRefusedError or ApiGoneError."""
        self._ask("POST", "/v1/completions", json.dumps(body), timeout_s)

    def close(self) -> None:
        """End the open request; later ones fail."""
        self._is_closed = True
        connection = self._open
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, body: str | None, timeout_s: float) -> None:
        connection = self._connects(self._host, self._port, timeout=timeout_s)
        self._open = connection
        try:
            if self._is_closed:
                raise ApiGoneError("closed")
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            said = response.read()
        except (OSError, http.client.HTTPException) as exc:
            raise ApiGoneError(str(exc) or type(exc).__name__) from exc
        finally:
            self._open = None
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise ApiRefusedError(response.status, cut(said.decode(errors="replace")))
