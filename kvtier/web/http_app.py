"""All paths of the daemon's HTTP server, as one ASGI application."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvtier.errors import KvtierError
from kvtier.obs.exposition import Problem as WhyNotReady
from kvtier.obs.exposition import Read
from kvtier.printable import shown_value
from kvtier.version import __version__
from kvtier.web.call_threads import CallThreads
from kvtier.web.callers import Callers
from kvtier.web.http_bounds import HttpBounds
from kvtier.web.http_server import App
from kvtier.web.probes import Probes
from kvtier.web.problems import Problem, problem_of
from kvtier.web.request_guard import RequestGuard

_TITLES = {
    HTTPStatus.NOT_FOUND: "PathNotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "BodyTooLongError",
}


def http_app(read: Read, why_not_ready: WhyNotReady, callers: Callers, bounds: HttpBounds) -> App:
    """Return what answers.

    Args:
        read: Takes a reading of the daemon; see `kvtier.obs.exposition.Read`.
        why_not_ready: See `kvtier.obs.exposition.Problem`.
        callers: Say who asks.
        bounds: Of requests.
    """
    app = FastAPI(
        title="kvtier",
        version=__version__,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    app.router.routes.extend(Probes(read, why_not_ready, CallThreads("probe", bounds.max_probes)).routes())
    app.add_exception_handler(KvtierError, _kvtier_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _defect)
    return RequestGuard(app, callers, bounds.max_body_bytes)


async def _kvtier_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, KvtierError)
    return problem_of(error).response()


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    detail = "; ".join(_mistake(each) for each in error.errors()[:10])
    return Problem(status=HTTPStatus.BAD_REQUEST, title="InvalidArgumentError", detail=detail).response()


def _mistake(error: Any) -> str:
    """Return field, value and remedy of one mistake; the text of a prompt is not shown."""
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", "query", "path")) or "body"
    value = error.get("input")
    shown = f" = {shown_value(value)}" if isinstance(value, bool | int | float) else ""
    return f"{place}{shown}: {error['msg']}"


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    detail = "nothing here; the API is at /api/v1/, described at /openapi.json, and the metrics are at /metrics"
    if status != HTTPStatus.NOT_FOUND:
        detail = str(error.detail)
    title = _TITLES.get(status, "InvalidArgumentError")
    return Problem(status=status, title=title, detail=detail, headers=error.headers or {}).response()


async def _defect(_: Request, error: Exception) -> Response:
    # uvicorn logs the traceback.
    detail = "a defect of kvtier: the daemon's log has its traceback"
    return Problem(status=HTTPStatus.INTERNAL_SERVER_ERROR, title=type(error).__name__, detail=detail).response()
