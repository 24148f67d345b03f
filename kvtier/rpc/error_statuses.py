"""The gRPC status of every call that fails: kvtier's errors by one table, and bytes that are no message."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvtier import errors
from kvtier.client.address import ERROR_NAME_KEY
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_OURS = "/kvtier."

_ERRORS_OF: dict[grpc.StatusCode, tuple[type[errors.KvtierError], ...]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (
        errors.ConfigError,
        errors.ConfigErrors,
        errors.InvalidArgumentError,
        errors.BundleDamagedError,
        errors.BundleTooNewError,
    ),
    grpc.StatusCode.NOT_FOUND: (
        errors.PromptNotFoundError,
        errors.NamespaceNotFoundError,
        errors.RequestNotFoundError,
        errors.GrantNotFoundError,
    ),
    grpc.StatusCode.UNAUTHENTICATED: (errors.UnauthenticatedError,),
    grpc.StatusCode.PERMISSION_DENIED: (errors.ForbiddenError,),
    grpc.StatusCode.ALREADY_EXISTS: (errors.PromptExistsError, errors.NameTakenError, errors.GrantExistsError),
    grpc.StatusCode.FAILED_PRECONDITION: (
        errors.PromptPinnedError,
        errors.PromptNotPinnedError,
        errors.PromptUnrenderedError,
        errors.PromptNotDurableError,
        errors.PromptNotBoundError,
        errors.NamespaceQuarantinedError,
        errors.EphemeralNamespaceError,
        errors.NamespaceMismatchError,
        errors.FormatVersionError,
        errors.KeyMissingError,
        errors.ChunkSealedError,
        errors.RemoteSealedError,
        errors.RemoteNewerError,
        errors.AlreadyRunningError,
        errors.RemoteRefusedError,
        errors.RemoteMissingError,
        errors.GrantsUnusableError,
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        errors.QuotaExceededError,
        errors.OwnerQuotaError,
        errors.RequestLimitError,
        errors.DiskSpaceError,
        errors.ArenaFullError,
        errors.TooManyWatchersError,
        errors.TooManyCallsError,
    ),
    grpc.StatusCode.INTERNAL: (errors.ArenaError, errors.TierIOError, errors.LedgerError, errors.RemoteStoreError),
    grpc.StatusCode.DATA_LOSS: (errors.ChunkDamagedError, errors.ChunkTamperedError, errors.RemoteDamagedError),
    grpc.StatusCode.UNAVAILABLE: (errors.DrainingError, errors.RemoteUnavailableError),
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.HelloTimeoutError, errors.MessageTimeoutError),
}
STATUS_OF = {error: status for status, kinds in _ERRORS_OF.items() for error in kinds}


def status_of(error: errors.KvtierError) -> grpc.StatusCode:
    """Return the status of the nearest listed class of an error."""
    listed = (STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)
    return next(listed, grpc.StatusCode.INTERNAL)


class ErrorStatuses(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Ends a call of our services with the status of the kvtier error that its method raises.

    If a message cannot be parsed, that is INVALID_ARGUMENT. gRPC itself would log a traceback for each.
    """

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        return _translating(handler, method) if handler is not None and method.startswith(_OURS) else handler


def _translating(handler: Any, method: str) -> Any:
    streaming = (handler.request_streaming, handler.response_streaming)
    kind = "_".join("stream" if streams else "unary" for streams in streaming)
    parsed = _all_parsed if handler.request_streaming else _parsed
    serving = _streaming if handler.response_streaming else _answering
    make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
    return make_handler(
        serving(getattr(handler, kind), parsed),
        _parser(handler.request_deserializer, method),
        handler.response_serializer,
    )


def _parser(parse: Callable[[bytes], object], method: str) -> Callable[[bytes], object]:
    def parse_or_refuse(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError as exc:  # gRPC has no call yet to raise it in, so it takes the place of the message
            remedy = f"no message of {method}; run client and daemon of one version ({exc})"
            return errors.InvalidArgumentError("message", f"{len(data)} bytes", remedy)

    return parse_or_refuse


def _parsed(message: Any) -> Any:
    if isinstance(message, errors.InvalidArgumentError):
        raise message
    return message


async def _all_parsed(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _parsed(message)


def _answering(method: Callable[..., Awaitable[object]], parsed: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answer(request: Any, context: Context) -> object:
        async with translated(context):
            return await method(parsed(request), context)

    return answer


def _streaming(method: Callable[..., Any], parsed: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answers(request: Any, context: Context) -> AsyncIterator[object]:
        async with translated(context), aclosing(method(parsed(request), context)) as messages:
            async for message in messages:
                yield message

    return answers


@asynccontextmanager
async def translated(context: Context) -> AsyncIterator[None]:
    """End the call with the status of a kvtier error, its message as details and its class name as metadata."""
    try:
        yield
    except errors.KvtierError as error:
        code = status_of(error)
        if code is grpc.StatusCode.INTERNAL:
            log_event(logger, "call_failed", level=logging.ERROR, error=type(error).__name__, problem=str(error))
        await context.abort(code, str(error), ((ERROR_NAME_KEY, type(error).__name__),))
