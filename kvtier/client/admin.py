"""A synchronous client of CacheService, in the protocol's messages; `kvtier.Client` is the one for users."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import grpc

from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.client.address import ERROR_NAME_KEY, usable_socket_path
from kvtier.client.remote_errors import remote_error
from kvtier.client.trusted_socket import TrustedSocket, is_stopped, listener_pid, open_trusted, unreachable
from kvtier.errors import START_DAEMON, ConnectionLostError, DaemonSilentError, InvalidArgumentError, KvtierError


class AdminClient:
    """One connection to the daemon. Every call has a deadline; thread-safe.

    All methods raise DaemonUnreachableError when no daemon answers, UntrustedSocketError when another user could,
    RemoteError when the daemon refuses.
    """

    def __init__(
        self,
        socket_path: Path | str,
        *,
        daemon_uid: int | None = None,
        timeout_s: float = 10.0,
        remedy: str = START_DAEMON,
    ) -> None:
        """Prepare the connection; the first call makes it. `daemon_uid`: see `open_trusted`.

        `remedy`: what to do if no daemon runs, for the error.

        Raises:
            InvalidArgumentError: No unix socket can have this path.
        """
        try:
            self._socket_path = usable_socket_path(socket_path)
        except ValueError as exc:
            raise InvalidArgumentError("--socket", str(socket_path), str(exc)) from exc
        self._daemon_uid, self._timeout_s, self._remedy = daemon_uid, timeout_s, remedy
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
            if self._socket is None or not self._socket.is_current():
                self._connection.close()
                try:
                    self._socket = self._connection.enter_context(open_trusted(self._socket_path, self._daemon_uid))
                except OSError as exc:
                    raise unreachable(self._socket_path, exc, self._remedy) from exc
                channel = self._connection.enter_context(self._socket.channel())
                self._connected_stub = cache_pb2_grpc.CacheServiceStub(channel)
            stub: cache_pb2_grpc.CacheServiceStub = self._connected_stub
            return stub

    def pin(self, request: pb.PinRequest) -> pb.PromptStatus:
        """Pin a prompt; durable in the ledger when this returns."""
        reply: pb.PromptStatus = self._call(self._stub.Pin, request)
        return reply

    def list(self, *, unfinished: bool = False) -> list[pb.PromptStatus]:
        """Return every prompt the daemon knows, by name; without its recipe, which `get` has.

        With `unfinished`: only pinned prompts that are not durable, as known some seconds ago.
        """
        pages = self._pages(self._stub.ListPrompts, pb.ListPromptsRequest(unfinished=unfinished))
        return [status for page in pages for status in page.prompts]

    def namespaces(self) -> Sequence[pb.NamespaceStatus]:
        """Return every namespace, by id, with its fingerprint."""
        pages = self._pages(self._stub.ListNamespaces, pb.ListNamespacesRequest())
        return [namespace for page in pages for namespace in page.namespaces]

    def _pages(self, method: Callable[..., Any], request: Any) -> Iterator[Any]:
        while True:
            page = self._call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def get(self, name: str = "", *, pin_id: str = "") -> pb.PromptStatus:
        """Return one prompt, by its name or its id."""
        reply: pb.PromptStatus = self._call(self._stub.GetPrompt, pb.GetPromptRequest(name=name, pin_id=pin_id))
        return reply

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return a prompt's token ids."""
        return tuple(self._call(self._stub.GetTokens, pb.GetTokensRequest(name=name)).tokens)

    def update(self, request: pb.UpdatePromptRequest) -> pb.PromptStatus:
        """Change how a prompt is pinned; durable in the ledger when this returns."""
        reply: pb.PromptStatus = self._call(self._stub.UpdatePrompt, request)
        return reply

    def apply(self, messages: Iterable[pb.ApplyMessage]) -> dict[str, str]:
        """Pin many prompts and end pins, all or none; returns the pin id of what each pin was made, by its name."""
        self.status()  # within the deadline: shows whether a daemon answers at all
        with self._translated():
            reply: pb.ApplyResponse = self._stub.ApplyPrompts(iter(messages))
            return {each.name: each.pin_id for each in reply.pins}

    def rename(self, request: pb.RenamePromptRequest) -> pb.PromptStatus:
        """Give a prompt another name; durable in the ledger when this returns."""
        reply: pb.PromptStatus = self._call(self._stub.RenamePrompt, request)
        return reply

    def unpin(self, name: str) -> pb.PromptStatus:
        """End the pin; its chunks stay until evicted."""
        reply: pb.PromptStatus = self._call(self._stub.Unpin, pb.UnpinRequest(name=name))
        return reply

    def evict(self, name: str, *, force: bool = False, tier: pb.Tier = pb.TIER_ANY) -> pb.EvictResponse:
        """Drop the prompt's chunks from the tier; `force` does so for a pinned one, which stays pinned."""
        reply: pb.EvictResponse = self._call(self._stub.Evict, pb.EvictRequest(name=name, force=force, tier=tier))
        return reply

    def evict_all(self, *, force: bool = False, tier: pb.Tier = pb.TIER_ANY) -> pb.EvictResponse:
        """Drop every chunk that no pinned prompt has from the tier; with `force` those of pinned prompts too."""
        reply: pb.EvictResponse = self._call(self._stub.Evict, pb.EvictRequest(all=True, force=force, tier=tier))
        return reply

    def status(self) -> pb.DaemonStatus:
        """Return the daemon's status; `namespaces` returns fingerprints."""
        reply: pb.DaemonStatus = self._call(self._stub.GetStatus, pb.GetStatusRequest())
        return reply

    def advise(self, max_bytes: int = 0) -> pb.Advice:
        """Return what is worth a pin under a budget; 0: that of automatic pins."""
        reply: pb.Advice = self._call(self._stub.GetAdvice, pb.GetAdviceRequest(max_bytes=max_bytes))
        return reply

    def explain(self, request: pb.ExplainRequest) -> pb.Explanation:
        """Return why a request was restored what it was, or what one with some tokens would get now."""
        reply: pb.Explanation = self._call(self._stub.Explain, request)
        return reply

    def recent_requests(self, request: pb.ListRecentRequestsRequest) -> Sequence[pb.RecentRequest]:
        """Return requests that ended lately, the last one first."""
        reply: pb.ListRecentRequestsResponse = self._call(self._stub.ListRecentRequests, request)
        return reply.requests

    def fsck(self, request: pb.FsckRequest) -> pb.FsckReport:
        """Let the daemon check itself, and wait as long as that takes: a deep check reads every byte."""
        self.status()  # within the deadline: shows whether a daemon answers at all
        with self._translated():
            reply: pb.FsckReport = self._stub.Fsck(request)
            return reply

    def export(self, request: pb.ExportRequest) -> Iterator[bytes]:
        """Yield a prompt's bundle, piece by piece; leaving the iterator ends the call."""
        self.status()
        with self._translated():
            call = self._stub.Export(request)
            try:
                for piece in call:
                    yield piece.data
            finally:
                call.cancel()

    def import_bundle(self, start: pb.ImportStart, pieces: Iterable[bytes]) -> pb.PromptStatus:
        """Take a bundle in, given in pieces of at most 1 MiB; pin and chunks are durable when this returns."""
        self.status()

        def messages() -> Iterator[pb.ImportMessage]:
            yield pb.ImportMessage(start=start)
            for data in pieces:
                yield pb.ImportMessage(piece=pb.BundlePiece(data=data))

        with self._translated():
            reply: pb.PromptStatus = self._stub.Import(messages())
            return reply

    def watch(self, pin_id: str, *, timeout_s: float | None) -> "PromptWatch":
        """Return a prompt's status now and at each change, as an iterator that ends by itself after `timeout_s`.

        None: it does not end by itself.
        """
        call = self._stub.WatchPrompt(pb.GetPromptRequest(pin_id=pin_id), timeout=timeout_s)
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
        code, metadata = exc.code(), exc.trailing_metadata() or ()
        kind = next((str(entry.value) for entry in metadata if entry.key == ERROR_NAME_KEY), "")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED and not kind:
            pid = listener_pid(self._socket_path)
            return DaemonSilentError(str(self._socket_path), self._timeout_s, pid, is_stopped=is_stopped(pid))
        if code == grpc.StatusCode.UNAVAILABLE and not kind:  # gRPC's own text buries the reason
            try:
                open_trusted(self._socket_path, self._daemon_uid).close()
            except OSError as error:
                return unreachable(self._socket_path, error, self._remedy)
            return ConnectionLostError(str(self._socket_path), self._remedy)
        return remote_error(code.name, kind, exc.details() or f"the daemon answered {code.name} without a message")


class PromptWatch:
    """A WatchPrompt call: iterate in one thread, close from any."""

    def __init__(self, call: Any, translated: AbstractContextManager[None]) -> None:
        self._call, self._translated = call, translated
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[pb.PromptStatus]:
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
