"""One table: which kvtier error is which gRPC status. `tests/unit/rpc` proves it complete."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvtier import errors
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

ERROR_NAME_KEY = "kvtier-error"
"""Trailing metadata: class name of the error, so that a client can raise the same one."""

STATUS_OF: dict[type[errors.KvtierError], grpc.StatusCode] = {
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigErrors: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PromptNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.PromptExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.PromptPinnedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PromptUnrenderedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.QuotaExceededError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DiskSpaceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NamespaceMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ArenaError: grpc.StatusCode.INTERNAL,
    errors.ArenaFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TierIOError: grpc.StatusCode.INTERNAL,
    errors.ChunkDamagedError: grpc.StatusCode.DATA_LOSS,
    errors.FormatVersionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LedgerError: grpc.StatusCode.INTERNAL,
    errors.AlreadyRunningError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BundleDamagedError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PromptNotDurableError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DrainingError: grpc.StatusCode.UNAVAILABLE,
    errors.HelloTimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_of(error: errors.KvtierError) -> grpc.StatusCode:
    """Return the status of the nearest listed class of an error."""
    for kind in type(error).__mro__:
        if kind in STATUS_OF:
            return STATUS_OF[kind]
    return grpc.StatusCode.INTERNAL


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
