"""Which reader an endpoint has, how its errors look, and whether a body can hold a marker at all."""

import re
from collections.abc import Callable

from kvtier.gateway.markers.anthropic_markers import read_messages_request
from kvtier.gateway.markers.marked_request import Api, Json, MarkedRequest, MarkerError
from kvtier.gateway.markers.openai_markers import read_chat_request, read_responses_request

_READERS: dict[Api, Callable[[Json], MarkedRequest | None]] = {
    Api.MESSAGES: read_messages_request,
    Api.CHAT: read_chat_request,
    Api.RESPONSES: read_responses_request,
}
_PREWARM = re.compile(rb'"max_tokens"\s*:\s*0\s*[,}]')


def read_markers(api: Api, body: Json) -> MarkedRequest | None:
    """Return what is marked; None when nothing is. MarkerError: the hosted API refuses a marker."""
    return _READERS[api](body)


def may_be_marked(api: Api, raw: bytes) -> bool:
    """Return whether a body may hold a marker, without parsing it."""
    if b"cache_" in raw and (b"cache_control" in raw or b'"prompt_cache_' in raw):
        return True
    return api is Api.MESSAGES and _PREWARM.search(raw) is not None


def error_body(api: Api, message: str, *, path: str = "", kind: str = "invalid_request_error") -> Json:
    """Return an error in the shape of an API. Anthropic's has no field for the `path`: there the message names it."""
    if api is Api.MESSAGES:
        return {"type": "error", "error": {"type": kind, "message": message}}
    code = "invalid_value" if path else None
    return {"error": {"message": message, "type": kind, "param": path or None, "code": code}}


def refusal(api: Api, error: MarkerError) -> Json:
    """Return the answer to a marker that the hosted API refuses."""
    if api is Api.MESSAGES:
        return error_body(api, str(error))
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.path).removeprefix(".")
    return error_body(api, error.problem, path=path)
