"""A synchronous client of CacheService, for the CLI and for scripts.

with AdminClient(default_socket_path()) as client:
    for prompt in client.list():
        print(prompt.name)
"""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.errors import DaemonUnreachableError, KvtierError

DEFAULT_TIMEOUT_S = 10.0
ERROR_KIND_KEY = "kvtier-error"
# A prompt of a million tokens is 5 MB on the wire, and a list carries every recipe.
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
)
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_DRAINING = "DrainingError"


class RemoteError(KvtierError):
    """The daemon refused a call; the message is the daemon's own.

    Attributes:
        code: gRPC's status, for example `NOT_FOUND`.
        kind: Name of the error's class in `kvtier.errors`; empty when the daemon gave none.
    """

    def __init__(self, code: str, kind: str, message: str) -> None:
        super().__init__(message)
        self.code, self.kind = code, kind


class AdminClient:
    """One connection to the daemon. Every call has a deadline; thread-safe.

    All methods raise DaemonUnreachableError when nobody answers, RemoteError when the daemon refuses.
    """

    def __init__(self, socket_path: Path | str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Prepare the connection; the first call makes it.

        Args:
            socket_path: The daemon's unix socket.
            timeout_s: Deadline of each unary call.
        """
        self._socket_path = Path(socket_path)
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(channel_target(socket_path), options=_OPTIONS)
        self._stub = cache_pb2_grpc.CacheServiceStub(self._channel)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection; calls that run end with an error."""
        self._channel.close()

    def pin(self, request: cache_pb2.PinRequest) -> cache_pb2.PromptStatus:
        """Pin a prompt; durable in the ledger when this returns."""
        reply: cache_pb2.PromptStatus = self._call(self._stub.Pin, request)
        return reply

    def list(self) -> list[cache_pb2.PromptStatus]:
        """Return every prompt the daemon knows."""
        response: cache_pb2.ListPromptsResponse = self._call(self._stub.ListPrompts, cache_pb2.ListPromptsRequest())
        return [*response.prompts]

    def get(self, name: str) -> cache_pb2.PromptStatus:
        """Return one prompt."""
        reply: cache_pb2.PromptStatus = self._call(self._stub.GetPrompt, cache_pb2.GetPromptRequest(name=name))
        return reply

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return a prompt's token ids."""
        reply: cache_pb2.PromptTokens = self._call(self._stub.GetTokens, cache_pb2.GetTokensRequest(name=name))
        return tuple(reply.tokens)

    def unpin(self, name: str) -> cache_pb2.PromptStatus:
        """End the promise; the chunks stay until evicted."""
        reply: cache_pb2.PromptStatus = self._call(self._stub.Unpin, cache_pb2.UnpinRequest(name=name))
        return reply

    def evict(
        self, name: str, *, force: bool = False, tier: cache_pb2.Tier = cache_pb2.TIER_ANY
    ) -> cache_pb2.EvictResponse:
        """Drop the prompt's chunks from the tier; `force` does so for a pinned one, which stays pinned."""
        request = cache_pb2.EvictRequest(name=name, force=force, tier=tier)
        reply: cache_pb2.EvictResponse = self._call(self._stub.Evict, request)
        return reply

    def evict_all(self, *, force: bool = False, tier: cache_pb2.Tier = cache_pb2.TIER_ANY) -> cache_pb2.EvictResponse:
        """Drop every chunk that no pinned prompt has from the tier; with `force` those of pinned prompts too."""
        request = cache_pb2.EvictRequest(all=True, force=force, tier=tier)
        reply: cache_pb2.EvictResponse = self._call(self._stub.Evict, request)
        return reply

    def status(self) -> cache_pb2.DaemonStatus:
        """Return what the daemon says about itself."""
        reply: cache_pb2.DaemonStatus = self._call(self._stub.GetStatus, cache_pb2.GetStatusRequest())
        return reply

    def fsck(self, request: cache_pb2.FsckRequest) -> cache_pb2.FsckReport:
        """Let the daemon check itself, and wait as long as that takes: a deep check reads every byte."""
        self.status()  # within the deadline: says whether anybody is there at all
        with self._translated():
            report: cache_pb2.FsckReport = self._stub.Fsck(request)
            return report

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
            status: cache_pb2.PromptStatus = self._stub.Import(messages())
            return status

    def watch(self, name: str, *, timeout_s: float) -> "PromptWatch":
        """Return the prompt's status now and at each change, as an iterator that ends by itself after `timeout_s`."""
        call = self._stub.WatchPrompt(cache_pb2.GetPromptRequest(name=name), timeout=timeout_s)
        return PromptWatch(call, self._translated)

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
        if code in _UNREACHABLE and kind != _DRAINING:
            late = code == grpc.StatusCode.DEADLINE_EXCEEDED
            problem = f"no answer within {self._timeout_s:g} s" if late else _diagnose(self._socket_path)
            return DaemonUnreachableError(str(self._socket_path), problem)
        return RemoteError(code.name, kind, exc.details() or f"the daemon answered {code.name} without a message")


class PromptWatch:
    """A WatchPrompt call: iterate in one thread, close from any."""

    def __init__(self, call: Any, translated: Callable[[], AbstractContextManager[None]]) -> None:
        """Take over a call that has begun."""
        self._call, self._translated = call, translated
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[cache_pb2.PromptStatus]:
        """Yield until closed or timed out."""
        with self._translated():
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
    for entry in exc.trailing_metadata() or ():
        if entry.key == ERROR_KIND_KEY:
            return str(entry.value)
    return ""


def _diagnose(path: Path) -> str:
    """Say why nobody can be reached there: gRPC's own text buries the reason."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.settimeout(1.0)
            probe.connect(str(path))
        except PermissionError:
            return f"permission denied: {_owner(path)}, you are uid {os.getuid()}; run as that user"
        except FileNotFoundError:
            return "there is no such socket"
        except OSError as exc:
            if exc.errno == errno.ECONNREFUSED and not path.is_socket():
                return "that is not a socket"
            if exc.errno == errno.ECONNREFUSED:
                return "nobody listens on that socket; the daemon has died or is starting"
            return exc.strerror or str(exc)
    return "it closed the connection; it may be starting or stopping"


def _owner(path: Path) -> str:
    for place in (path, *path.parents):
        try:
            return f"{place} belongs to uid {place.stat().st_uid}"
        except OSError:
            continue
    return f"{path} belongs to another user"
