"""What holds for every request before a handler sees it: the caller, the length of the body, headers of the answer."""

from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvtier.web.callers import Callers
from kvtier.web.problems import Problem
from kvtier.web.transport.http_server import App

API = "/api/"
BUNDLES = "/api/v1/bundles"

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_TWO_LENGTHS = Problem(
    status=HTTPStatus.BAD_REQUEST,
    title="InvalidArgumentError",
    detail="the request has Content-Length and Transfer-Encoding, which may disagree about where it ends; send one",
    headers={"Connection": "close"},
)
"""Of RFC 9112, section 6.1: a proxy in front may go by the other one, and take the body's rest for a request."""


class RequestGuard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: App, callers: Callers, max_body_bytes: int) -> None:
        self._app, self._callers, self._max_body_bytes = app, callers, max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI. The caller is `request.state.caller`."""
        path = scope["path"]

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if path.startswith(API):
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        if {b"content-length", b"transfer-encoding"} <= dict(scope["headers"]).keys():
            await _TWO_LENGTHS.response()(scope, receive, send_with_headers)
            return
        if path.startswith(API):
            caller = self._callers.caller_of(Request(scope))
            if isinstance(caller, Problem):
                await caller.response()(scope, receive, send_with_headers)
                return
            scope["state"]["caller"] = caller
            # Or a name with a slash would be two parts of the path.
            scope["path"] = unquote(scope["raw_path"].decode("ascii").replace("%2f", "%2F").replace("%2F", "%252F"))
        if path == BUNDLES:
            await self._app(scope, receive, send_with_headers)
            return
        if self._length_of(scope) > self._max_body_bytes:
            detail = _too_long(self._max_body_bytes)
            problem = Problem(status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE, title="BodyTooLongError", detail=detail)
            await problem.response()(scope, receive, send_with_headers)
            return
        await self._app(scope, _Counted(receive, self._max_body_bytes), send_with_headers)

    def _length_of(self, scope: Any) -> int:
        # h11 has refused what is no number, and two that differ.
        return int(dict(scope["headers"]).get(b"content-length", b"0"))


def _too_long(max_bytes: int) -> str:
    return f"the body has more than {max_bytes} bytes; bundles go to POST {BUNDLES}"


class _Counted:
    """Receives a body up to its bound. A body that comes in chunks does not say its length."""

    def __init__(self, receive: Any, max_bytes: int) -> None:
        self._receive, self._max_bytes, self._left_bytes = receive, max_bytes, max_bytes

    async def __call__(self) -> Any:
        message = await self._receive()
        self._left_bytes -= len(message.get("body", b""))
        if self._left_bytes < 0:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_long(self._max_bytes))
        return message
