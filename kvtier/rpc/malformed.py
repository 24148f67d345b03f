"""Bytes that are no message: an error of the call like any other, instead of gRPC's traceback for each."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvtier.errors import InvalidArgumentError
from kvtier.rpc.error_statuses import Context, translated

_OURS = "/kvtier."


@dataclass(frozen=True)
class _Malformed:
    """In place of a message that could not be parsed: what to say of it, once there is a call to say it in."""

    method: str
    num_bytes: int
    problem: str


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Ends calls of our services with INVALID_ARGUMENT when a message cannot be parsed."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        return _refusing(handler, method) if handler is not None and method.startswith(_OURS) else handler


def _refusing(handler: Any, method: str) -> Any:
    parse = _parser(handler.request_deserializer, method)
    if handler.unary_unary:
        answer = _answering(handler.unary_unary, _whole)
        return grpc.unary_unary_rpc_method_handler(answer, parse, handler.response_serializer)
    if handler.stream_unary:
        answer = _answering(handler.stream_unary, _all_whole)
        return grpc.stream_unary_rpc_method_handler(answer, parse, handler.response_serializer)
    if handler.unary_stream:
        answers = _streaming(handler.unary_stream, _whole)
        return grpc.unary_stream_rpc_method_handler(answers, parse, handler.response_serializer)
    answers = _streaming(handler.stream_stream, _all_whole)
    return grpc.stream_stream_rpc_method_handler(answers, parse, handler.response_serializer)


def _parser(parse: Callable[[bytes], object], method: str) -> Callable[[bytes], object]:
    def parsed(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError as exc:
            return _Malformed(method, len(data), str(exc))

    return parsed


def _answering(method: Callable[..., Awaitable[object]], take: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answer(request: Any, context: Context) -> object:
        async with translated(context):
            return await method(take(request), context)

    return answer


def _streaming(method: Callable[..., Any], take: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answers(request: Any, context: Context) -> AsyncIterator[object]:
        async with translated(context), aclosing(method(take(request), context)) as messages:
            async for message in messages:
                yield message

    return answers


def _whole(message: Any) -> Any:
    if isinstance(message, _Malformed):
        remedy = f"no message of {message.method}; run client and daemon of one version ({message.problem})"
        raise InvalidArgumentError("message", f"{message.num_bytes} bytes", remedy)
    return message


async def _all_whole(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _whole(message)
