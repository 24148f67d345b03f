"""The check of every call: who makes it, whether that caller may, and what is written down of it.

At the TCP port a call is checked before its first message is read: a caller without credentials cannot make the daemon
parse 16 MiB. So its handlers take a stream of messages, also where there is one; on the wire that is the same.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from typing import Any

import grpc

from kvtier.access.call_roles import CALL_RULES, check_call, check_request, is_free_to
from kvtier.access.caller import ACTING_FOR_KEY, LOCAL, Caller, Door, enter_call, parse_acting_for
from kvtier.access.caller_shares import CallerShares
from kvtier.access.gatekeeper import OK, Gatekeeper
from kvtier.access.open_streams import Ended, unless_ended
from kvtier.errors import (
    ForbiddenError,
    InvalidArgumentError,
    KvtierError,
    MessageTimeoutError,
    TooManyCallsError,
    TooManyWatchersError,
    UnauthenticatedError,
)
from kvtier.rpc.doors.call_messages import MESSAGE_TIMEOUT_S, each_message, host_of, only_message
from kvtier.rpc.doors.open_calls import OpenCalls
from kvtier.rpc.error_statuses import Context

_OURS = "/kvtier."
_OPEN = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List")
"""Of foreign services at the TCP port, without credentials: for load balancers. Its `Watch` would hold calls open."""
MAX_CALLS = 1000
"""At the TCP port at a time, over all connections."""
MAX_CALLS_EACH = 200
"""Of one caller."""
_AUTHORIZATION = "authorization"

Identify = Callable[[Context, str], Caller]
"""Returns who makes a call, named by the second argument, or raises."""


class AccessControl(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """One for each server; stands within `ErrorStatuses`, which makes statuses of what it raises."""

    def __init__(self, gatekeeper: Gatekeeper, door: Door) -> None:
        """Take what is asked, and which door this is."""
        self._gatekeeper, self._door = gatekeeper, door
        self._open_calls = OpenCalls(gatekeeper)
        self._places = CallerShares("calls are open", MAX_CALLS, MAX_CALLS_EACH)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return self._foreign(handler, method)
        call = method.rpartition("/")[2]
        if self._door is Door.SOCKET and is_free_to(LOCAL, call) and not _is_acting(handler_call_details):
            return handler  # engines among them: a check of each message took a seventh of the loop's time
        return self._checking(handler, call)

    def _foreign(self, handler: Any, method: str) -> Any:
        if handler is None or self._door is Door.SOCKET:
            return handler
        if method not in _OPEN:
            return None  # UNIMPLEMENTED
        serve = self._open_calls.serving(handler, method.rpartition("/")[2])
        return grpc.stream_unary_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)

    def _checking(self, handler: Any, call: str) -> Any:
        reads_stream = handler.request_streaming or self._door is not Door.SOCKET
        kind = f"{'stream' if reads_stream else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        serve = _CheckedCall(self._gatekeeper, self._identify, self._places, handler, call)
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
        address = host_of(context.peer())
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

    def __init__(
        self, gatekeeper: Gatekeeper, identify: Identify, places: CallerShares, handler: Any, call: str
    ) -> None:
        self._gatekeeper, self._identify, self._places, self._call = gatekeeper, identify, places, call
        self._reads_stream, self._answers_stream = handler.request_streaming, handler.response_streaming
        kinds = ["stream" if streams else "unary" for streams in (self._reads_stream, self._answers_stream)]
        self._method = getattr(handler, "_".join(kinds))

    async def answer(self, request: Any, context: Context) -> Any:
        """Serve a call with one answer."""
        noted = _Noted(self._gatekeeper, self._call)
        with noted, self._admitted(noted, context):
            if not self._reads_stream:
                message = await noted.only(request)
                self._gatekeeper.check_stands(noted.caller)  # the message may have taken half a minute
                return await self._method(message, context)
            with self._gatekeeper.streams.watching(noted.caller) as ended:
                return await _step(noted.caller, ended, self._method(noted.each(request), context))

    async def answers(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        """Serve a call with a stream of answers."""
        noted = _Noted(self._gatekeeper, self._call)
        with noted, self._admitted(noted, context) as caller, self._gatekeeper.streams.watching(caller) as ended:
            given = noted.each(request) if self._reads_stream else await noted.only(request)
            async with aclosing(self._method(given, context)) as messages:
                while (message := await _step(noted.caller, ended, anext(messages, None))) is not None:
                    yield message

    @contextmanager
    def _admitted(self, noted: "_Noted", context: Context) -> Iterator[Caller]:
        caller = noted.caller = self._identify(context, self._call)
        noted.is_known = True
        self._gatekeeper.check_stands(caller)
        self._gatekeeper.admit(caller)
        check_call(caller, self._call)
        enter_call(caller)
        with self._places.holding(caller.grant_id) if caller.door is Door.GRPC else nullcontext():
            yield caller


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
        self._gatekeeper.num_forbidden += isinstance(error, ForbiddenError)
        self._gatekeeper.num_too_many += isinstance(error, TooManyCallsError | TooManyWatchersError)
        self._gatekeeper.num_silent += isinstance(error, MessageTimeoutError)
        if self._changes or isinstance(error, ForbiddenError | UnauthenticatedError | MessageTimeoutError):
            outcome = OK if error is None else _kind_of(error)
            self._gatekeeper.record(self.caller, self._call, outcome, self._names)

    async def only(self, request: Any) -> Any:
        """Return the message of a call that has one."""
        if isinstance(request, AsyncIterator):
            request = await only_message(request, MESSAGE_TIMEOUT_S)
        if self._call in CALL_RULES:
            self._changes = check_request(self.caller, self._call, request)
        self._note(request)
        return request

    async def each(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the messages of a call that has many."""
        # HTTP, which acts for others at the socket, has bounds of its own
        timeout_s = MESSAGE_TIMEOUT_S if self.caller.door is Door.GRPC else None
        async for message in each_message(messages, timeout_s):
            self._note(message)
            yield message

    def _note(self, message: Any) -> None:
        for field in ("start", "pin"):
            if getattr(message, "DESCRIPTOR", None) is not None and field in message.DESCRIPTOR.fields_by_name:
                self._note_names(getattr(message, field), ("name",))
        self._note_names(message, ("name", "new_name", "adopt", "unpin", "namespace_id"))

    def _note_names(self, message: Any, fields: tuple[str, ...]) -> None:
        for field in fields:
            if isinstance(name := getattr(message, field, None), str) and name:
                self._names.append(name[:200])


def _kind_of(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return type(error).__name__ if isinstance(error, KvtierError) else "failed"
