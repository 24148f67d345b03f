"""A synchronous client of CacheService, in the protocol's messages; `kvtier.Client` is the one for users."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import grpc

from kvtier._pb import cache_pb2 as pb
from kvtier.client.daemon_connection import MessageStream
from kvtier.client.observer_client import ObserverClient

APPLY_TIMEOUT_S = 300.0
"""For the transaction of an apply: one of 65,536 pins takes a minute, and may wait for other changes."""


class AdminClient(ObserverClient):
    """One connection to the daemon. Every call has a deadline; thread-safe.

    All methods raise DaemonUnreachableError when no daemon answers, UntrustedSocketError when another user could,
    RemoteError when the daemon refuses.
    """

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
        """Pin many prompts and end pins, all or none; returns the pin id of what each pin was made, by its name.

        Ends when the daemon neither takes the next message nor answers for `APPLY_TIMEOUT_S`.
        """
        self.status()  # within the deadline: shows whether a daemon answers at all
        sent = _TimedMessages(messages)
        with self._translated():
            call = self._stub.ApplyPrompts.future(sent, metadata=self._metadata)
            try:
                reply: pb.ApplyResponse = sent.answer_of(call, APPLY_TIMEOUT_S)
            except grpc.FutureTimeoutError as exc:
                raise self._silent(APPLY_TIMEOUT_S) from exc
            finally:
                call.cancel()
            return {each.name: each.pin_id for each in reply.pins}

    def rename(self, request: pb.RenamePromptRequest) -> pb.PromptStatus:
        """Give a prompt another name; durable in the ledger when this returns."""
        reply: pb.PromptStatus = self._call(self._stub.RenamePrompt, request)
        return reply

    def unpin(self, name: str, *, forget: bool = False) -> pb.PromptStatus:
        """End the pin, with `forget` also forget its prompt; its chunks stay until evicted."""
        reply: pb.PromptStatus = self._call(self._stub.Unpin, pb.UnpinRequest(name=name, forget=forget))
        return reply

    def evict(self, name: str, *, force: bool = False, tier: pb.Tier = pb.TIER_ANY) -> pb.EvictResponse:
        """Drop the prompt's chunks from the tier; `force` does so for a pinned one, which stays pinned."""
        reply: pb.EvictResponse = self._call(self._stub.Evict, pb.EvictRequest(name=name, force=force, tier=tier))
        return reply

    def evict_all(
        self, *, force: bool = False, tier: pb.Tier = pb.TIER_ANY, namespace_id: str = ""
    ) -> pb.EvictResponse:
        """Drop every chunk that no pinned prompt has from the tier; with `force` those of pinned prompts too.

        With a namespace, its chunks only; no prompt is forgotten then.
        """
        request = pb.EvictRequest(all=True, force=force, tier=tier, namespace_id=namespace_id)
        reply: pb.EvictResponse = self._call(self._stub.Evict, request)
        return reply

    def fsck(self, request: pb.FsckRequest) -> pb.FsckReport:
        """Let the daemon check itself, and wait as long as that takes: a deep check reads every byte."""
        self.status()  # within the deadline: shows whether a daemon answers at all
        with self._translated():
            reply: pb.FsckReport = self._stub.Fsck(request, metadata=self._metadata)
            return reply

    def export(self, request: pb.ExportRequest) -> Iterator[bytes]:
        """Yield a prompt's bundle, piece by piece; leaving the iterator ends the call."""
        self.status()
        with self._translated():
            call = self._stub.Export(request, metadata=self._metadata)
            try:
                for piece in call:
                    yield piece.data
            finally:
                call.cancel()

    def import_bundle(self, start: pb.ImportStart, pieces: Iterable[bytes]) -> pb.PromptStatus:
        """Take a bundle in, given in pieces of at most 1 MiB; pin and chunks are durable when this returns.

        What `pieces` raises ends the call, and is raised here: gRPC would log it, and answer UNKNOWN.
        """
        self.status()
        call: Any = None
        has_begun, failures = threading.Event(), list[Exception]()

        def messages() -> Iterator[pb.ImportMessage]:
            yield pb.ImportMessage(start=start)
            try:
                for data in pieces:
                    yield pb.ImportMessage(piece=pb.BundlePiece(data=data))
            except Exception as exc:
                failures.append(exc)
                has_begun.wait()
                call.cancel()

        with self._translated():
            call = self._stub.Import.future(messages(), metadata=self._metadata)
            has_begun.set()
            try:
                reply: pb.PromptStatus = call.result()
            except grpc.FutureCancelledError as exc:
                raise (failures[0] if failures else call) from exc
            finally:
                call.cancel()
            return reply

    def watch(self, pin_id: str, *, timeout_s: float | None) -> MessageStream[pb.PromptStatus]:
        """Return a prompt's status now and at each change, as an iterator that ends by itself after `timeout_s`.

        None: it does not end by itself.
        """
        call = self._stub.WatchPrompt(pb.GetPromptRequest(pin_id=pin_id), timeout=timeout_s, metadata=self._metadata)
        return MessageStream(call, self._translated())

    def verify(self, request: pb.VerifyPromptRequest) -> pb.VerifyReport:
        """Let the daemon read every chunk of a prompt, and wait as long as that takes."""
        self.status()  # within the deadline: shows whether a daemon answers at all
        with self._translated():
            reply: pb.VerifyReport = self._stub.VerifyPrompt(request, metadata=self._metadata)
            return reply

    def watch_events(self, names: Iterable[str] = (), *, timeout_s: float | None) -> MessageStream[pb.Event]:
        """Return the events of these names (none: all) from now on; it ends by itself after `timeout_s`, if given."""
        self.status()
        call = self._stub.WatchEvents(pb.WatchEventsRequest(names=names), timeout=timeout_s, metadata=self._metadata)
        with self._translated():
            call.initial_metadata()  # sent once it has begun: what happens after this return is in the stream
        return MessageStream(call, self._translated())

    def quarantine(self, namespace_id: str, reason: str) -> pb.NamespaceStatus:
        """Stop a namespace: it serves and stores nothing. Durable when this returns."""
        request = pb.QuarantineNamespaceRequest(namespace_id=namespace_id, reason=reason)
        reply: pb.NamespaceStatus = self._call(self._stub.QuarantineNamespace, request)
        return reply

    def release(self, namespace_id: str) -> pb.NamespaceStatus:
        """End the quarantine of a namespace."""
        request = pb.ReleaseNamespaceRequest(namespace_id=namespace_id)
        reply: pb.NamespaceStatus = self._call(self._stub.ReleaseNamespace, request)
        return reply

    def create_grant(self, request: pb.CreateGrantRequest) -> pb.CreatedGrant:
        """Let someone in over TCP; the token is in the answer only."""
        reply: pb.CreatedGrant = self._call(self._stub.CreateGrant, request)
        return reply

    def grants(self) -> Sequence[pb.Grant]:
        """Return all grants, by name."""
        reply: pb.ListGrantsResponse = self._call(self._stub.ListGrants, pb.ListGrantsRequest())
        return reply.grants

    def revoke_grant(self, name: str) -> pb.Grant:
        """End a grant."""
        reply: pb.Grant = self._call(self._stub.RevokeGrant, pb.RevokeGrantRequest(name=name))
        return reply


class _TimedMessages(Iterator[pb.ApplyMessage]):
    """Messages that a call sends, and when it took the last one, or came to their end."""

    def __init__(self, messages: Iterable[pb.ApplyMessage]) -> None:
        self._messages, self._taken_s = iter(messages), time.monotonic()

    def __next__(self) -> pb.ApplyMessage:
        """gRPC asks for the next one when the daemon has taken the one before."""
        try:
            return next(self._messages)
        finally:
            self._taken_s = time.monotonic()

    def answer_of(self, call: Any, timeout_s: float) -> Any:
        """Return the answer.

        Raises:
            grpc.FutureTimeoutError: It did not come, and no message was taken for so long.
        """
        while (left_s := self._taken_s + timeout_s - time.monotonic()) > 0:
            with suppress(grpc.FutureTimeoutError):
                return call.result(timeout=left_s)
        raise grpc.FutureTimeoutError
