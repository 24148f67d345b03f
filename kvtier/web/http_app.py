"""All paths of the daemon's HTTP server, as one ASGI application."""

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvtier.errors import KvtierError
from kvtier.printable import shown_value
from kvtier.version import __version__
from kvtier.web.api import bundle_routes, daemon_routes, live_routes, pin_routes, prompt_routes, request_routes
from kvtier.web.api.daemon_calls import DaemonDoor
from kvtier.web.api.json_schemas import SCHEMAS
from kvtier.web.callers import Callers
from kvtier.web.console.console_files import ConsoleFiles
from kvtier.web.event_hub import EventHub
from kvtier.web.number_history import NumberHistory
from kvtier.web.probes import Probes
from kvtier.web.problems import Problem, problem_of
from kvtier.web.request_guard import RequestGuard
from kvtier.web.transport.http_bounds import HttpBounds
from kvtier.web.transport.http_server import App

logger = logging.getLogger(__name__)

_SUMMARY = "kvtier's daemon over HTTP: what the command line does. docs/http-api.md explains it."
_TITLES = {
    HTTPStatus.NOT_FOUND: "PathNotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "BodyTooLongError",
}


def http_app(probes: Probes, door: DaemonDoor, history: NumberHistory, callers: Callers, bounds: HttpBounds) -> App:
    """Return what answers.

    Args:
        probes: Answer what needs no credentials.
        door: To the daemon, for the API.
        history: Of its numbers.
        callers: Say who asks.
        bounds: Of requests.
    """
    app = FastAPI(
        title="kvtier",
        version=__version__,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # its redirects are to http, also behind a proxy that ends TLS
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.door, app.state.history = door, history
    app.state.hub = EventHub(bounds.max_event_streams, bounds.max_waiting_events)
    app.state.keep_alive_s = bounds.keep_alive_s
    app.router.routes.extend(probes.routes())
    app.router.routes.extend(ConsoleFiles().routes())
    for routes in (daemon_routes, prompt_routes, pin_routes, bundle_routes, request_routes, live_routes):
        app.include_router(routes.router, prefix="/api/v1")
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    app.add_exception_handler(KvtierError, _kvtier_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(Exception, _defect)
    return RequestGuard(app, callers, bounds.max_body_bytes)


def _described(app: FastAPI) -> dict[str, Any]:
    """Return the description of the API: FastAPI's, with the schemas of the library's values."""
    if app.openapi_schema is None:
        description = get_openapi(title=app.title, version=app.version, summary=_SUMMARY, routes=app.routes)
        description.setdefault("components", {}).setdefault("schemas", {}).update(SCHEMAS.named)
        app.openapi_schema = description
    return app.openapi_schema


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


async def _left(_: Request, __: Exception) -> Response:
    """Answer a client that is gone before its body was whole; nothing is sent, and it is no defect."""
    return Response()


async def _defect(request: Request, error: Exception) -> Response:
    logger.error("a request cannot be answered: %s %s", request.method, request.url.path, exc_info=error)
    detail = "a defect of kvtier: the daemon's log has its traceback"
    return Problem(status=HTTPStatus.INTERNAL_SERVER_ERROR, title=type(error).__name__, detail=detail).response()
