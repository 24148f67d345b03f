"""The check of every call: who makes it, whether that caller may, and what is written down of it.

At the TCP port a call is checked before its first message is read: a caller without credentials cannot make the daemon
parse 16 MiB. So its handlers take a stream of messages, also where there is one; on the wire that is the same.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote

import grpc

from kvtier.access.call_roles import CALL_RULES, check_call, check_request, is_free_to
from kvtier.access.caller import ACTING_FOR_KEY, LOCAL, Caller, Door, enter_call, parse_acting_for
from kvtier.access.gatekeeper import OK, Gatekeeper
from kvtier.access.open_streams import Ended, unless_ended
from kvtier.errors import ForbiddenError, InvalidArgumentError, KvtierError, UnauthenticatedError
from kvtier.rpc.error_statuses import Context

_OURS = "/kvtier."
_OPEN = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List")
"""Of foreign services at the TCP port, without credentials: for load balancers. Its `Watch` would hold calls open."""
_AUTHORIZATION = "authorization"

Identify = Callable[[Context, str], Caller]
"""Returns who makes a call, named by the second argument, or raises."""


class AccessControl(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """One for each server; stands within `ErrorStatuses`, which makes statuses of what it raises."""

    def __init__(self, gatekeeper: Gatekeeper, door: Door) -> None:
        """Take what is asked, and which door this is."""
        self._gatekeeper, self._door = gatekeeper, door

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return handler if self._door is Door.SOCKET or method in _OPEN else None  # None: UNIMPLEMENTED
        call = method.rpartition("/")[2]
        if self._door is Door.SOCKET and is_free_to(LOCAL, call) and not _is_acting(handler_call_details):
            return handler  # engines among them: a check of each message took a seventh of the loop's time
        return self._checking(handler, call)

    def _checking(self, handler: Any, call: str) -> Any:
        reads_stream = handler.request_streaming or self._door is not Door.SOCKET
        kind = f"{'stream' if reads_stream else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        serve = _CheckedCall(self._gatekeeper, self._identify, handler, call)
        method = serve.answers if handler.response_streaming else serve.answer
        make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
        return make_handler(method, handler.request_deserializer, handler.response_serializer)

    def _identify(self, context: Context, call: str) -> Caller:
        metadata = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        acting_for = [value for key, value in metadata if key == ACTING_FOR_KEY]
        if self._door is Door.SOCKET:
            if len(acting_for) > 1:
                raise InvalidArgumentError(ACTING_FOR_KEY, acting_for[0], "comes twice; a call is made for one caller")
            return parse_acting_for(acting_for[0]) if acting_for else LOCAL
        address = _host_of(context.peer())
        authorization = [value for key, value in metadata if key == _AUTHORIZATION]
        names = list(context.auth_context().get("x509_common_name", ()))
        return self._gatekeeper.identify(
            self._door,
            address,
            call=call,
            authorization=authorization[0] if authorization else None,
            certificate=names[0].decode(errors="replace") if len(names) == 1 else None,
        )


def _is_acting(handler_call_details: Any) -> bool:
    return any(key == ACTING_FOR_KEY for key, _ in handler_call_details.invocation_metadata or ())


class _CheckedCall:
    """A method of a servicer behind the check."""

    def __init__(self, gatekeeper: Gatekeeper, identify: Identify, handler: Any, call: str) -> None:
        self._gatekeeper, self._identify, self._call = gatekeeper, identify, call
        self._reads_stream, self._answers_stream = handler.request_streaming, handler.response_streaming
        kinds = ["stream" if streams else "unary" for streams in (self._reads_stream, self._answers_stream)]
        self._method = getattr(handler, "_".join(kinds))

    async def answer(self, request: Any, context: Context) -> Any:
        """Serve a call with one answer."""
        noted = _Noted(self._gatekeeper, self._call)
        with noted:
            self._check(noted, context)
            if not self._reads_stream:
                return await self._method(await noted.only(request), context)
            with self._gatekeeper.streams.watching(noted.caller) as ended:
                return await _step(noted.caller, ended, self._method(noted.each(request), context))

    async def answers(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        """Serve a call with a stream of answers."""
        noted = _Noted(self._gatekeeper, self._call)
        with noted, self._gatekeeper.streams.watching(self._check(noted, context)) as ended:
            given = noted.each(request) if self._reads_stream else await noted.only(request)
            async with aclosing(self._method(given, context)) as messages:
                while (message := await _step(noted.caller, ended, anext(messages, None))) is not None:
                    yield message

    def _check(self, noted: "_Noted", context: Context) -> Caller:
        caller = noted.caller = self._identify(context, self._call)
        noted.is_known = True
        self._gatekeeper.admit(caller)
        check_call(caller, self._call)
        enter_call(caller)
        return caller


async def _step(caller: Caller, ended: Ended, step: Awaitable[Any]) -> Any:
    return await (unless_ended(ended, step) if caller.grant_id else step)


class _Noted:
    """What a call is about and how it ends; written to the audit log if it changes something or is refused."""

    def __init__(self, gatekeeper: Gatekeeper, call: str) -> None:
        self.caller, self.is_known = LOCAL, False
        self._gatekeeper, self._call = gatekeeper, call
        self._names: list[str] = []
        rule = CALL_RULES.get(call)
        self._changes = rule is not None and rule.changes

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.is_known:  # `identify` has written it
            return
        if isinstance(error, ForbiddenError):
            self._gatekeeper.num_forbidden += 1
        if self._changes or isinstance(error, ForbiddenError | UnauthenticatedError):
            outcome = OK if error is None else _kind_of(error)
            self._gatekeeper.record(self.caller, self._call, outcome, self._names)

    async def only(self, request: Any) -> Any:
        """Return the message of a call that has one."""
        if isinstance(request, AsyncIterator):
            request = await anext(request, None)
            if request is None:
                raise InvalidArgumentError("message", None, "the call ended without its message; send one")
        if self._call in CALL_RULES:
            self._changes = check_request(self.caller, self._call, request)
        self._note(request)
        return request

    async def each(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the messages of a call that has many."""
        async for message in messages:
            self._note(message)
            yield message

    def _note(self, message: Any) -> None:
        for field in ("start", "pin"):
            if getattr(message, "DESCRIPTOR", None) is not None and field in message.DESCRIPTOR.fields_by_name:
                self._note_names(getattr(message, field), ("name",))
        self._note_names(message, ("name", "unpin", "namespace_id"))

    def _note_names(self, message: Any, fields: tuple[str, ...]) -> None:
        for field in fields:
            if isinstance(name := getattr(message, field, None), str) and name:
                self._names.append(name[:200])


def _kind_of(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return type(error).__name__ if isinstance(error, KvtierError) else "failed"


def _host_of(peer: str) -> str:
    """Return the host of gRPC's name of a peer: `ipv4:127.0.0.1:4711`, `ipv6:%5B::1%5D:4711`."""
    address = unquote(peer.partition(":")[2])
    return address.rpartition(":")[0].strip("[]") or address
