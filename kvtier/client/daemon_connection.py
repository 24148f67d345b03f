"""A connection to the daemon: made by the first call, and again after a restart; refusals come as kvtier's errors."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import grpc

from kvtier._pb import cache_pb2_grpc
from kvtier.access.caller import acting_for_metadata
from kvtier.client.address import ERROR_NAME_KEY, usable_socket_path
from kvtier.client.over_tcp.server_access import ServerAccess
from kvtier.client.remote_errors import remote_error
from kvtier.client.trusted_socket import TrustedSocket, is_stopped, listener_pid, open_trusted, unreachable
from kvtier.errors import (
    START_DAEMON,
    ConnectionLostError,
    DaemonSilentError,
    DaemonUnreachableError,
    InvalidArgumentError,
    KvtierError,
    ServerUnreachableError,
)

M = TypeVar("M")


class DaemonConnection:
    """What the calls of `AdminClient` stand on; thread-safe."""

    def __init__(
        self,
        socket_path: Path | str,
        *,
        daemon_uid: int | None = None,
        timeout_s: float = 10.0,
        remedy: str = START_DAEMON,
        server: ServerAccess | None = None,
    ) -> None:
        """Prepare the connection; the first call makes it. `daemon_uid`: see `open_trusted`.

        `remedy`: what to do if no daemon runs, for the error. `server`: a daemon over TCP, instead of the socket.

        Raises:
            InvalidArgumentError: No unix socket can have this path.
        """
        try:
            self._socket_path = usable_socket_path(socket_path)
        except ValueError as exc:
            raise InvalidArgumentError("--socket", str(socket_path), str(exc)) from exc
        self._daemon_uid, self._timeout_s, self._remedy, self._server = daemon_uid, timeout_s, remedy, server
        self._lock = threading.Lock()  # protects all below
        self._connection = ExitStack()  # owns the socket, and a channel to it
        self._socket: TrustedSocket | None = None
        self._connected_stub: Any = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that run end with an error."""
        with self._lock:
            self._is_closed = True
            self._connection.close()

    @property
    def _stub(self) -> cache_pb2_grpc.CacheServiceStub:
        """The stub of a connection to the daemon that listens now; connects when the last one went to another."""
        with self._lock:
            if self._is_closed:
                raise ValueError("the client is closed")
            if self._server is not None and self._connected_stub is None:
                channel = self._connection.enter_context(self._server.channel())
                self._connected_stub = cache_pb2_grpc.CacheServiceStub(channel)
            elif self._server is None and (self._socket is None or not self._socket.is_current()):
                self._connection.close()
                try:
                    self._socket = self._connection.enter_context(open_trusted(self._socket_path, self._daemon_uid))
                except OSError as exc:
                    raise unreachable(self._socket_path, exc, self._remedy) from exc
                channel = self._connection.enter_context(self._socket.channel())
                self._connected_stub = cache_pb2_grpc.CacheServiceStub(channel)
            stub: cache_pb2_grpc.CacheServiceStub = self._connected_stub
            return stub

    def _call(self, method: Callable[..., Any], request: object) -> Any:
        with self._translated():
            return method(request, timeout=self._timeout_s, metadata=self._metadata)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...] | None:
        """What each call sends beside its message: over TCP a token; over the socket, for whom it is made.

        See `kvtier.access.caller.acting_for`.
        """
        return acting_for_metadata() if self._server is None else self._server.metadata()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as exc:
            raise self._translate(exc) from exc

    def _translate(self, exc: grpc.RpcError) -> KvtierError:
        code, metadata = exc.code(), exc.trailing_metadata() or ()
        kind = next((str(entry.value) for entry in metadata if entry.key == ERROR_NAME_KEY), "")
        if self._server is not None and not kind:
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                return self._silent(self._timeout_s)
            if code == grpc.StatusCode.UNAVAILABLE:
                return self._server.unreachable(exc.details() or "")
        elif code == grpc.StatusCode.DEADLINE_EXCEEDED and not kind:
            return self._silent(self._timeout_s)
        elif code == grpc.StatusCode.UNAVAILABLE and not kind:  # gRPC's own text buries the reason
            try:
                open_trusted(self._socket_path, self._daemon_uid).close()
            except OSError as error:
                return unreachable(self._socket_path, error, self._remedy)
            return ConnectionLostError(str(self._socket_path), self._remedy)
        return remote_error(code.name, kind, exc.details() or f"the daemon answered {code.name} without a message")

    def _silent(self, waited_s: float) -> DaemonUnreachableError:
        """Return the error of a daemon that has not answered for so long."""
        if self._server is not None:
            problem = f"no answer within {waited_s:g} s"
            return ServerUnreachableError(self._server.server, problem, "check the network, and the daemon's log")
        pid = listener_pid(self._socket_path)
        return DaemonSilentError(str(self._socket_path), waited_s, pid, is_stopped=is_stopped(pid))


class MessageStream(Generic[M]):
    """A call that the daemon answers with one message after the other: iterate in one thread, close from any."""

    def __init__(self, call: Any, translated: AbstractContextManager[None]) -> None:
        self._call, self._translated = call, translated
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[M]:
        """Yield until closed or timed out."""
        with self._translated:
            try:
                yield from self._call
            except grpc.RpcError as exc:
                if not self._closed.is_set() and exc.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
            finally:
                self.close()

    def close(self) -> None:
        """End the call; the iterating thread ends with it."""
        self._closed.set()
        self._call.cancel()
