"""The ASGI app that passes requests on to a vLLM, and its answer back as it comes.

The client's pace is vLLM's: the next part of an answer is read when the last one was sent. A client that leaves ends
its request at vLLM.
"""

import json
import logging
from contextlib import suppress
from typing import Any

import httpx

from kvtier.gateway.asgi import (
    BodyRefusedError,
    BodyTooLargeError,
    CutShortError,
    DisconnectedError,
    Headers,
    Receive,
    Scope,
    Send,
    apart,
    header,
    read_body,
    replaced,
    send_json,
    while_connected,
)
from kvtier.gateway.proxy.refusals import refuse
from kvtier.gateway.proxy.request_bounds import HEALTH_PATHS
from kvtier.gateway.proxy.upstreams import Upstreams, under
from kvtier.obs.log import log_event

_PASSED = ("/v1/", "/v2/", "/inference/", "/cohere/", "/tokenize", "/detokenize", "/version", "/metrics", "/ping")
"""vLLM's other paths change the server (`/sleep`, `/reset_prefix_cache`), and its API key does not guard them."""
_REFUSED = ("v1/load_lora_adapter", "v1/unload_lora_adapter", "inference/v1/abort_requests")
"""These change it too, or end requests of others."""
_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip

_log = logging.getLogger(__name__)


class ReverseProxy:
    """Passes requests on, within `RequestBounds`, which answers what it refuses of bodies.

    Args:
        upstreams: The vLLMs.
        transport: Over which they are asked; closed when the server stops.
        max_body_bytes: Of a request; a larger one is answered 413.
        timeouts: To connect, and between two parts of an answer.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        transport: httpx.AsyncBaseTransport,
        *,
        max_body_bytes: int,
        timeouts: httpx.Timeout,
    ) -> None:
        self._upstreams, self._transport = upstreams, transport
        self._max_body_bytes = max_body_bytes
        self._extensions = {"timeout": timeouts.as_dict()}
        self._away: set[httpx.URL] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the start and stop of the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "kvtier-gateway passes HTTP only"})
        elif scope["path"] in HEALTH_PATHS:
            await self._answer_health(scope, send)
        elif not _is_passed(scope["path"]):
            await refuse(scope, send, 404, f"kvtier-gateway does not pass {scope['path']:.100} on; ask vLLM itself")
        else:
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.shutdown":
                await self._transport.aclose()
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def _answer_health(self, scope: Scope, send: Send) -> None:
        if scope["path"] == "/health/live":
            await send_json(send, 200, {"status": "ok"})
            return
        healthy = await self._upstreams.health()
        is_ok = any(healthy.values())
        shown = [{"url": url, "healthy": answers} for url, answers in healthy.items()]
        await send_json(send, 200 if is_ok else 503, {"status": "ok" if is_ok else "no vLLM", "upstreams": shown})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope["headers"], receive, self._max_body_bytes)
        except BodyTooLargeError:
            text = f"the request has more than {self._max_body_bytes} bytes (--max-body)"
            raise BodyRefusedError(413, text, "request_too_large") from None
        except DisconnectedError:
            return
        await self._route(scope, body, receive, send)

    async def _route(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        is_list = scope["path"] == "/v1/models" and len(self._upstreams.urls) > 1
        if is_list and (models := await self._upstreams.models(scope["headers"])) is not None:
            await send_json(send, 200, models)
            return
        model = await apart(len(body), _model_of, body) if len(self._upstreams.urls) > 1 else ""
        url = self._upstreams.urls[0] if is_list else await self._upstreams.serving(model, scope["headers"])
        if url is None:
            known = "names no model" if not model else f"names the model {model!r:.100}, which no vLLM serves"
            await refuse(scope, send, 404, f"the request {known}; GET /v1/models lists them", "not_found_error")
            return
        with suppress(DisconnectedError):
            await while_connected(receive, self._pass(url, scope, body, send))

    async def _pass(self, url: httpx.URL, scope: Scope, body: bytes, send: Send) -> None:
        path = scope.get("raw_path", b"").partition(b"?")[0].decode("latin-1") or scope["path"]
        try:
            target = under(url, path, scope["query_string"])
        except ValueError:
            await refuse(scope, send, 400, "the request's target is no path and query of a URL; escape it")
            return
        headers = [(b"host", url.netloc), *_end_to_end(scope["headers"])]
        if body or header(headers, b"content-length"):
            # It may have come in chunks. With another length vLLM would take the next request for its rest.
            headers = replaced(headers, content_length=str(len(body)).encode())
        # No httpx.Client: it adds headers, follows redirects and keeps cookies, and takes longer than all of this.
        request = httpx.Request(
            scope["method"], target, headers=headers, stream=httpx.ByteStream(body), extensions=self._extensions,
        )  # fmt: skip
        try:
            response = await self._transport.handle_async_request(request)
        except httpx.HTTPError as exc:
            await self._report(scope, send, url, exc)
            return
        self._away.discard(url)
        try:
            fields = _end_to_end(response.headers.raw)
            await send({"type": "http.response.start", "status": response.status_code, "headers": fields})
            async for part in response.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except httpx.HTTPError as exc:
            # If the client has had a part, the connection ends early, which says that this is not all.
            reason = str(exc) or type(exc).__name__
            log_event(_log, "answer_cut_short", level=logging.WARNING, url=str(url), reason=reason)
            text = f"vLLM at {url} stopped in the middle of its answer ({reason.lower()}); send the request again"
            raise CutShortError(text, is_late=isinstance(exc, httpx.ReadTimeout)) from exc
        finally:
            await response.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _report(self, scope: Scope, send: Send, url: httpx.URL, exc: httpx.HTTPError) -> None:
        if isinstance(exc, httpx.ReadTimeout):
            await refuse(scope, send, 504, f"vLLM at {url} did not answer in time (--timeout)", "timeout_error")
        else:
            reason = str(exc).lower() or type(exc).__name__
            text = f"no vLLM answers at {url} ({reason}); start `vllm serve`, or correct --upstream"
            if url not in self._away:  # said once, until it has answered again
                self._away.add(url)
                log_event(_log, "vllm_away", level=logging.WARNING, url=str(url), reason=reason)
            await refuse(scope, send, 502, text, "api_error")


def _is_passed(path: str) -> bool:
    """Return whether a decoded path is one of vLLM's that clients need, whatever normalizes it on its way."""
    parts = [part for part in path.split("/") if part]
    return path.startswith(_PASSED) and "/".join(parts) not in _REFUSED and not {".", ".."} & set(parts)


def _model_of(body: bytes) -> str:
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    model = value.get("model") if isinstance(value, dict) else None
    return model if isinstance(model, str) else ""


def _end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return headers without those of one connection, and those that `connection` names (RFC 9110, 7.6.1)."""
    fields = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in fields if name == b"connection" for part in value.split(b",")}
    dropped = _HOP_BY_HOP | named | {b"host"}
    return [(name, value) for name, value in fields if name not in dropped]
