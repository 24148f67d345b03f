"""Errors of the gateway itself, in the shape of the API that was asked."""

from kvtier.gateway.asgi import Headers, Scope, Send, send_json
from kvtier.gateway.markers.api_paths import error_body
from kvtier.gateway.markers.marked_request import Api

RETRY: Headers = ((b"retry-after", b"1"),)
CLOSE: Headers = ((b"connection", b"close"),)
"""What is left of the body is not read."""


async def refuse(
    scope: Scope, send: Send, status: int, text: str, kind: str = "invalid_request_error", headers: Headers = ()
) -> None:
    """Answer with an error."""
    api = Api.MESSAGES if scope["path"].startswith(Api.MESSAGES) else Api.CHAT
    await send_json(send, status, error_body(api, text, kind=kind), headers)
