"""What the methods of `Client` stand on: the connection to the daemon, and the one to vLLM when a method needs it."""

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from kvtier.client.address import default_daemon_uid, default_socket_path, usable_socket_path
from kvtier.client.admin import AdminClient
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
    ) -> None:
        """Prepare connections; nothing is sent yet.

        Args:
            socket: The daemon's unix socket. None: `$KVTIER_SOCKET`, else where a daemon of this user listens.
            daemon_uid: Uid that the daemon may run as, besides ours and root. None: `$KVTIER_DAEMON_UID`.
            timeout_s: For each call that does not wait for an engine or a file.
            url: Base URL of vLLM, for `pin` and `warm`. None: `$KVTIER_VLLM_URL`, else http://127.0.0.1:8000.
            api_key: vLLM's. None: `$VLLM_API_KEY`, else `$OPENAI_API_KEY`.

        Raises:
            InvalidArgumentError: No unix socket can have this path.
        """
        path = default_socket_path() if socket is None else socket
        try:
            usable_socket_path(path)
        except ValueError as exc:
            raise InvalidArgumentError(self._NAMES["socket"], str(path), str(exc)) from exc
        uid = default_daemon_uid() if daemon_uid is None else daemon_uid
        remedy = f"start `kvtier-daemon`, or pass {self._NAMES['socket']}"
        self._daemon = AdminClient(path, daemon_uid=uid, timeout_s=timeout_s, remedy=remedy)
        self._url = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
        from_environment = (os.environ[name] for name in KEY_VARIABLES if os.environ.get(name))
        self._api_key = next(from_environment, None) if api_key is None else api_key
        self._lock = threading.Lock()  # protects the two below
        self._opened = ExitStack()
        self._vllm_client: VllmClient | None = None

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
        """Make a call that changes nothing, and once more when the daemon restarted under it."""
        try:
            return call()
        except ConnectionLostError:
            return call()
