"""What the methods of `Client` stand on: the connection to the daemon, and the one to vLLM when a method needs it."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from kvtier.client.address import default_daemon_uid, default_socket_path, usable_socket_path
from kvtier.client.admin import AdminClient
from kvtier.client.over_tcp.server_access import SERVER_VARIABLE, ServerAccess, make_server_access
from kvtier.errors import ConnectionLostError, InvalidArgumentError
from kvtier.library.rendering.field_names import PYTHON_NAMES, FieldNames
from kvtier.library.rendering.vllm_client import VllmClient

URL_VARIABLE, KEY_VARIABLES = "KVTIER_VLLM_URL", ("VLLM_API_KEY", "OPENAI_API_KEY")
DEFAULT_URL = "http://127.0.0.1:8000"

T = TypeVar("T")


class Connection:
    """Connections to a daemon and to a vLLM, made by the first call that needs them."""

    _NAMES: ClassVar[FieldNames] = PYTHON_NAMES
    """What errors call an argument; the command line has a class of its own, with options."""

    _IN_TURNS: ClassVar[bool] = False
    """Let other threads run while long answers of vLLM are read; see `kvtier.json_text`."""

    def __init__(
        self,
        socket: Path | str | None = None,
        *,
        daemon_uid: int | None = None,
        timeout_s: float = 10.0,
        url: str | None = None,
        api_key: str | None = None,
        server: str | None = None,
        token: str | None = None,
        token_file: Path | str | None = None,
        ca_file: Path | str | None = None,
        client_cert_file: Path | str | None = None,
        client_key_file: Path | str | None = None,
    ) -> None:
        """Prepare connections; nothing is sent yet.

        Args:
            socket: The daemon's unix socket. None: `$KVTIER_SOCKET`, else where a daemon of this user listens.
            daemon_uid: Uid that the daemon may run as, besides ours and root. None: `$KVTIER_DAEMON_UID`.
            timeout_s: For each call that does not wait for an engine or a file.
            url: Base URL of vLLM, for `pin` and `warm`. None: `$KVTIER_VLLM_URL`, else http://127.0.0.1:8000.
            api_key: vLLM's. None: `$VLLM_API_KEY`, else `$OPENAI_API_KEY`.
            server: `HOST:PORT` of a daemon over TCP (its `server.listen`), instead of the socket. None:
                `$KVTIER_SERVER` if no socket is given. TLS is used, except to a loopback address without
                `ca_file` and `client_cert_file`.
            token: Of `kvtier token create`, for `server`. None: from `token_file`, `$KVTIER_TOKEN`, or the file
                `$KVTIER_TOKEN_FILE`.
            token_file: See above.
            ca_file: PEM file of the authorities that sign for the daemon. None: `$KVTIER_CA_FILE`, else those that gRPC
                knows.
            client_cert_file: PEM file of this client's certificate. None: `$KVTIER_CLIENT_CERT_FILE`, else there is
                none.
            client_key_file: PEM file of its key. None: `$KVTIER_CLIENT_KEY_FILE`.

        Raises:
            InvalidArgumentError: No unix socket can have this path; or one of the last six cannot be used.
        """
        credentials = {
            "token": token,
            "token_file": token_file,
            "ca_file": ca_file,
            "client_cert_file": client_cert_file,
            "client_key_file": client_key_file,
        }
        access = self._server_access(socket, server, credentials)
        path = default_socket_path() if socket is None else socket
        try:
            usable_socket_path(path)
        except ValueError as exc:
            raise InvalidArgumentError(self._NAMES["socket"], str(path), str(exc)) from exc
        uid = default_daemon_uid() if daemon_uid is None else daemon_uid
        remedy = f"start `kvtier-daemon`, or pass {self._NAMES['socket']}"
        self._daemon = AdminClient(path, daemon_uid=uid, timeout_s=timeout_s, remedy=remedy, server=access)
        self._url = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        from_environment = (os.environ[name] for name in KEY_VARIABLES if os.environ.get(name))
        self._api_key = next(from_environment, None) if api_key is None else api_key
        self._lock = threading.Lock()  # protects the two below
        self._opened = ExitStack()
        self._vllm_client: VllmClient | None = None

    def _server_access(
        self, socket: Path | str | None, server: str | None, credentials: Mapping[str, Any]
    ) -> ServerAccess | None:
        """Return the way to a daemon over TCP; None: its socket is used."""
        if socket is not None and server is not None:
            remedy = f"a daemon is reached at its socket or over TCP; give {self._NAMES['socket']} or this"
            raise InvalidArgumentError(self._NAMES["server"], server, remedy)
        server = server or (os.environ.get(SERVER_VARIABLE) if socket is None else None)
        if not server:
            if field := next((name for name, value in credentials.items() if value is not None), None):
                remedy = f"is for a daemon over TCP; give {self._NAMES['server']}, too"
                raise InvalidArgumentError(self._NAMES[field], "<withheld>", remedy)
            return None
        return make_server_access(server, **credentials, names=self._NAMES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; calls that run end with an error."""
        self._daemon.close()
        with self._lock:
            self._opened.close()

    @property
    def _vllm(self) -> VllmClient:
        with self._lock:
            if self._vllm_client is None:
                self._vllm_client = self._opened.enter_context(
                    VllmClient(self._url, self._api_key, self._NAMES, in_turns=self._IN_TURNS)
                )
            return self._vllm_client

    def _read(self, call: Callable[[], T]) -> T:
        """Make a call that changes nothing, and once more when the connection was lost: the daemon restarted."""
        try:
            return call()
        except ConnectionLostError:
            return call()
