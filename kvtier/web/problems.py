"""Errors over HTTP: `application/problem+json` (RFC 9457)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from kvtier import errors
from kvtier.client.remote_errors import RemoteError
from kvtier.errors import KvtierError
from kvtier.library.rendering.vllm_client import VllmUnreachableError

MEDIA_TYPE = "application/problem+json"

_STATUS_OF_CODE = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "ALREADY_EXISTS": HTTPStatus.CONFLICT,
    "FAILED_PRECONDITION": HTTPStatus.CONFLICT,
    "RESOURCE_EXHAUSTED": HTTPStatus.INSUFFICIENT_STORAGE,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}
"""By the gRPC status of what the daemon refused; any other: 500."""
_TOO_MANY = (errors.TooManyCallsError, errors.TooManyWatchersError, errors.RequestLimitError)
_STATUS_OF_ERROR: tuple[tuple[tuple[type[KvtierError], ...], HTTPStatus], ...] = (
    (_TOO_MANY, HTTPStatus.TOO_MANY_REQUESTS),
    ((errors.InvalidArgumentError, errors.ConfigError), HTTPStatus.BAD_REQUEST),
    ((errors.PromptNotFoundError, errors.NamespaceNotFoundError), HTTPStatus.NOT_FOUND),
    ((errors.PromptUnusableError,), HTTPStatus.CONFLICT),
    ((VllmUnreachableError,), HTTPStatus.SERVICE_UNAVAILABLE),
    ((errors.RenderError,), HTTPStatus.BAD_GATEWAY),
    ((errors.DaemonSilentError,), HTTPStatus.GATEWAY_TIMEOUT),
    ((errors.DaemonUnreachableError, errors.DrainingError), HTTPStatus.SERVICE_UNAVAILABLE),
)
"""Of errors that the library raises itself."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is answered instead of a value.

    Attributes:
        title: The error's class.
        detail: Names field, value and remedy.
        headers: Of the answer, besides the usual ones.
        more: Members of the body besides those of the RFC.
    """

    status: HTTPStatus
    title: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def response(self) -> Response:
        """Return the answer."""
        body = {"type": "about:blank", "title": self.title, "status": int(self.status), "detail": self.detail}
        return Response(json.dumps(body | dict(self.more)), self.status, self.headers, MEDIA_TYPE)


def problem_of(error: KvtierError) -> Problem:
    """Return the problem that an error is."""
    if isinstance(error, _TOO_MANY):
        return Problem(
            status=HTTPStatus.TOO_MANY_REQUESTS, title=_title(error), detail=str(error), headers={"Retry-After": "1"}
        )
    return Problem(status=_status_of(error), title=_title(error), detail=str(error))


def _title(error: KvtierError) -> str:
    return (isinstance(error, RemoteError) and error.kind) or type(error).__name__


def _status_of(error: KvtierError) -> HTTPStatus:
    if isinstance(error, RemoteError):
        return _STATUS_OF_CODE.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    found = (status for kinds, status in _STATUS_OF_ERROR if isinstance(error, kinds))
    return next(found, HTTPStatus.INTERNAL_SERVER_ERROR)
