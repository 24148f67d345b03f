"""A synchronous client of CacheService, for the CLI and for scripts.

with AdminClient(default_socket_path()) as client:
    for prompt in client.list():
        print(prompt.name)
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

import grpc

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.client.address import ERROR_NAME_KEY, usable_socket_path
from kvtier.client.socket_errors import explain
from kvtier.client.trusted_socket import TrustedSocket, is_stopped, listener_pid, open_trusted
from kvtier.errors import DaemonSilentError, DaemonUnreachableError, InvalidArgumentError, KvtierError

DEFAULT_TIMEOUT_S = 10.0
# A prompt of a million tokens is 5 MB on the wire, its recipe as much again.
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # A target is the number of a descriptor: what another client used under that number is another socket.
    ("grpc.use_local_subchannel_pool", 1),
)
_SHOWN_CHARS = 120


class RemoteError(KvtierError):
    """The daemon refused a call; the message is the daemon's own.

    Attributes:
        code: gRPC's status, for example `NOT_FOUND`.
        kind: Name of the error's class in `kvtier.errors`; empty when the daemon gave none.
    """

    def __init__(self, code: str, kind: str, message: str) -> None:
        super().__init__(message)
        self.code, self.kind = code, kind


class _Connection:
    """A channel to one socket that is trusted; owns both."""

    def __init__(self, socket_path: Path, daemon_uid: int | None) -> None:
        self.socket: TrustedSocket = open_trusted(socket_path, daemon_uid)
        self._channel = grpc.insecure_channel(self.socket.target, options=_OPTIONS)
        self.stub = cache_pb2_grpc.CacheServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()
        self.socket.close()


class AdminClient:
    """One connection to the daemon. Every call has a deadline; thread-safe.

    All methods raise DaemonUnreachableError when no daemon answers, UntrustedSocketError when another user could,
    RemoteError when the daemon refuses.
    """

    def __init__(
        self, socket_path: Path | str, *, daemon_uid: int | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Prepare the connection; the first call makes it. `daemon_uid`: see `open_trusted`.

        Raises:
            InvalidArgumentError: No unix socket can have this path.
        """
        try:
            self._socket_path = usable_socket_path(socket_path)
        except ValueError as exc:
            raise InvalidArgumentError("--socket", str(socket_path)[:_SHOWN_CHARS], str(exc)) from exc
        self._daemon_uid = daemon_uid
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # protects the next two
        self._connection: _Connection | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that run end with an error."""
        with self._lock:
            self._is_closed = True
            self._disconnect()

    @property
    def _stub(self) -> cache_pb2_grpc.CacheServiceStub:
        """The stub of a connection to the daemon that listens now; connects when the last one went to another."""
        with self._lock:
            if self._is_closed:
                raise ValueError("the client is closed")
            if self._connection is None or not self._connection.socket.is_current():
                self._disconnect()
                self._connection = self._connect()
            return self._connection.stub

    def _connect(self) -> _Connection:
        try:
            return _Connection(self._socket_path, self._daemon_uid)
        except OSError as exc:
            raise DaemonUnreachableError(str(self._socket_path), explain(self._socket_path, exc)) from exc

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def pin(self, request: cache_pb2.PinRequest) -> cache_pb2.PromptStatus:
        """Pin a prompt; durable in the ledger when this returns."""
        return self._call(self._stub.Pin, request)

    def list(self) -> list[cache_pb2.PromptStatus]:
        """Return every prompt the daemon knows, by name; without its recipe, which `get` has."""
        pages = self._pages(self._stub.ListPrompts, cache_pb2.ListPromptsRequest())
        return [status for page in pages for status in page.prompts]

    def namespaces(self) -> Sequence[cache_pb2.NamespaceStatus]:
        """Return every namespace, by id, with its fingerprint."""
        pages = self._pages(self._stub.ListNamespaces, cache_pb2.ListNamespacesRequest())
        return [namespace for page in pages for namespace in page.namespaces]

    def _pages(self, method: Callable[..., Any], request: Any) -> Iterator[Any]:
        while True:
            page = self._call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def get(self, name: str) -> cache_pb2.PromptStatus:
        """Return one prompt."""
        return self._call(self._stub.GetPrompt, cache_pb2.GetPromptRequest(name=name))

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return a prompt's token ids."""
        reply: cache_pb2.PromptTokens = self._call(self._stub.GetTokens, cache_pb2.GetTokensRequest(name=name))
        return tuple(reply.tokens)

    def unpin(self, name: str) -> cache_pb2.PromptStatus:
        """End the pin; its chunks stay until evicted."""
        return self._call(self._stub.Unpin, cache_pb2.UnpinRequest(name=name))

    def evict(
        self, name: str, *, force: bool = False, tier: cache_pb2.Tier = cache_pb2.TIER_ANY
    ) -> cache_pb2.EvictResponse:
        """Drop the prompt's chunks from the tier; `force` does so for a pinned one, which stays pinned."""
        request = cache_pb2.EvictRequest(name=name, force=force, tier=tier)
        return self._call(self._stub.Evict, request)

    def evict_all(self, *, force: bool = False, tier: cache_pb2.Tier = cache_pb2.TIER_ANY) -> cache_pb2.EvictResponse:
        """Drop every chunk that no pinned prompt has from the tier; with `force` those of pinned prompts too."""
        request = cache_pb2.EvictRequest(all=True, force=force, tier=tier)
        return self._call(self._stub.Evict, request)

    def status(self) -> cache_pb2.DaemonStatus:
        """Return the daemon's status; `namespaces` returns fingerprints."""
        return self._call(self._stub.GetStatus, cache_pb2.GetStatusRequest())

    def fsck(self, request: cache_pb2.FsckRequest) -> cache_pb2.FsckReport:
        """Let the daemon check itself, and wait as long as that takes: a deep check reads every byte."""
        self.status()  # within the deadline: shows whether a daemon answers at all
        with self._translated():
            return self._stub.Fsck(request)

    def export(self, request: cache_pb2.ExportRequest) -> Iterator[bytes]:
        """Yield a prompt's bundle, piece by piece; leaving the iterator ends the call."""
        self.status()
        with self._translated():
            call = self._stub.Export(request)
            try:
                for piece in call:
                    yield piece.data
            finally:
                call.cancel()

    def import_bundle(self, start: cache_pb2.ImportStart, pieces: Iterable[bytes]) -> cache_pb2.PromptStatus:
        """Take a bundle in, given in pieces of at most 1 MiB; pin and chunks are durable when this returns."""
        self.status()

        def messages() -> Iterator[cache_pb2.ImportMessage]:
            yield cache_pb2.ImportMessage(start=start)
            for data in pieces:
                yield cache_pb2.ImportMessage(piece=cache_pb2.BundlePiece(data=data))

        with self._translated():
            return self._stub.Import(messages())

    def watch(self, name: str, *, timeout_s: float) -> "PromptWatch":
        """Return the prompt's status now and at each change, as an iterator that ends by itself after `timeout_s`."""
        call = self._stub.WatchPrompt(cache_pb2.GetPromptRequest(name=name), timeout=timeout_s)
        return PromptWatch(call, self._translated())

    def _call(self, method: Callable[..., Any], request: object) -> Any:
        with self._translated():
            return method(request, timeout=self._timeout_s)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as exc:
            raise self._translate(exc) from exc

    def _translate(self, exc: grpc.RpcError) -> KvtierError:
        code, kind = exc.code(), _kind_of(exc)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED and not kind:
            pid = listener_pid(self._socket_path)
            return DaemonSilentError(str(self._socket_path), self._timeout_s, pid, is_stopped=is_stopped(pid))
        if code == grpc.StatusCode.UNAVAILABLE and not kind:
            return DaemonUnreachableError(str(self._socket_path), self._diagnose())
        return RemoteError(code.name, kind, exc.details() or f"the daemon answered {code.name} without a message")

    def _diagnose(self) -> str:
        """Return why a connection broke: gRPC's own text buries the reason."""
        try:
            open_trusted(self._socket_path, self._daemon_uid).close()
        except OSError as exc:
            return explain(self._socket_path, exc)
        return "it closed the connection; it may be starting or stopping"


class PromptWatch:
    """A WatchPrompt call: iterate in one thread, close from any."""

    def __init__(self, call: Any, translated: AbstractContextManager[None]) -> None:
        self._call, self._translated = call, translated
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[cache_pb2.PromptStatus]:
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


def _kind_of(exc: grpc.RpcError) -> str:
    return next((str(entry.value) for entry in exc.trailing_metadata() or () if entry.key == ERROR_NAME_KEY), "")
