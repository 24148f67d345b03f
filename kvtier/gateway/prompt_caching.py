"""The ASGI app around vLLM, or around the proxy to it.

A request without markers passes as it is. Of one with markers the app finds the breakpoints, writes them into the
request's `kv_transfer_params` and lets vLLM answer: whatever vLLM refuses never reaches the connector. On the way back
it writes the usage.
"""

import json
import logging
from typing import Any, NamedTuple

from kvtier.core.requests.request_instructions import PARAMETER
from kvtier.errors import RenderError
from kvtier.gateway.answers import MAX_BODY_BYTES, RewritingSend
from kvtier.gateway.asgi import (
    App,
    BodyRefusedError,
    BodyTooLargeError,
    CutShortError,
    DisconnectedError,
    Headers,
    NestedTooDeeplyError,
    Receive,
    Scope,
    Send,
    apart,
    header,
    post_json,
    read_body,
    replaced,
    replay,
    replay_body,
    send_json,
    to_json,
    while_connected,
)
from kvtier.gateway.boundaries import Boundaries
from kvtier.gateway.client_instructions import (
    UnreadInstructionError,
    checked_instruction,
    guarded,
    may_be_json,
    may_instruct,
)
from kvtier.gateway.gateway_settings import MAX_BODY, MarkerSettings
from kvtier.gateway.markers.api_paths import error_body, may_be_marked, read_markers, refusal
from kvtier.gateway.markers.marked_request import Api, Json, MarkedRequest, MarkerError
from kvtier.gateway.owners import owner_of
from kvtier.gateway.refused_keys import RefusedKeys
from kvtier.gateway.usage_numbers import MarkedPlace, UsageWriter
from kvtier.gateway.vllm_process import MEASURED, count_cached_tokens, is_inside_vllm, render_app

_APIS = {api.value: api for api in Api}
_KEY_PATHS = ("/v1", "/v2", "/inference", "/cohere")
"""Where vLLM checks its API key, if it has one. Source: vLLM 0.32, `entrypoints/serve/middleware/authenticate.py`. At
others (`/invocations`, which takes chats too) a client would be any owner that it likes."""
_REFUSED = (400, 422)
_SCALE_OUT = b"--enable-scale-out"
"""In vLLM's answer where its render endpoints are off."""

_log = logging.getLogger(__name__)


class _Prepared(NamedTuple):
    """A request as vLLM gets it. Nothing of it is parsed any longer: in memory, JSON takes up to 30 times its bytes."""

    body: bytes
    headers: Headers
    usage: UsageWriter | None = None  # of a request with markers


class _Asked(NamedTuple):
    """What a client asks: all fields, those with markers, and what it asks of kvtier by itself."""

    fields: Json
    request: MarkedRequest | None
    own: Json | None


class PromptCaching:
    """Understands the cache markers of Anthropic's and OpenAI's APIs.

    Args:
        app: vLLM's, or a proxy to one.
        settings: From the environment by default.
    """

    def __init__(self, app: App, settings: MarkerSettings | None = None) -> None:
        self._app = app
        self._settings = settings or MarkerSettings.from_environment()
        self._boundaries = Boundaries()
        self._refused_keys = RefusedKeys()
        self._private_render: App | None = None
        self._warned = False
        # Models of which the last answer had no daemon. vLLM has answered for each name, so they are few.
        self._away: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. Of requests to other endpoints only a client's own instruction is read."""
        if scope["type"] != "http" or scope["method"] != "POST" or not may_be_json(scope["headers"]):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        api = _APIS.get(path)
        # Before the body is read: some servers add to the headers what a client sends behind it.
        owner = self._owner(path, scope["headers"])
        if is_inside_vllm(scope) and await self._refused_keys.refuse(self._app, scope):
            await self._pass_unread(api, scope, receive, send)
            return
        try:
            body = await read_body(scope["headers"], receive, self._settings.max_body_bytes)
        except BodyTooLargeError as exc:
            await self._pass_unread(api, scope, replay(exc.first, receive), send)
            return
        except DisconnectedError:
            return
        try:
            await self._serve(api, owner, body, scope, receive, send)
        except DisconnectedError:
            return
        except MarkerError as exc:
            await send_json(send, 400, refusal(api or Api.CHAT, exc))
        except NestedTooDeeplyError:
            await send_json(send, 400, error_body(api or Api.CHAT, "the request is nested too deeply"))

    def _owner(self, path: str, headers: Headers) -> str:
        has_owner = bool(self._settings.owner_header) or path.startswith(_KEY_PATHS)
        return owner_of(headers, self._settings.owner_header) if has_owner else ""

    async def _serve(
        self, api: Api | None, owner: str, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        prepared = await self._prepare(api, owner, body, scope, receive)
        inner = scope if prepared.body is body else {**scope, "headers": prepared.headers}
        if prepared.usage is None:
            await self._app(inner, replay_body(prepared.body, receive), send)
        else:
            await self._serve_marked(prepared.body, prepared.usage, inner, receive, send)

    async def _prepare(self, api: Api | None, owner: str, body: bytes, scope: Scope, receive: Receive) -> _Prepared:
        readable = api if _is_plain(scope) else None
        is_read = (readable is not None and may_be_marked(readable, body)) or may_instruct(body)
        asked = await apart(len(body), _asked, readable, owner, body) if is_read else None
        if asked is None:
            return _Prepared(body, scope["headers"])
        if asked.request is not None:
            marked = self._prepare_marked(asked.request, owner, asked.own, len(body), scope)
            return await while_connected(receive, marked)
        if asked.own is None:
            return _Prepared(body, scope["headers"])
        body = await apart(len(body), to_json, with_instruction(asked.fields, [], owner, asked.own))
        return _Prepared(body, _headers_of(body, scope))

    async def _prepare_marked(
        self, request: MarkedRequest, owner: str, own: Json | None, num_bytes: int, scope: Scope
    ) -> _Prepared:
        async def render(api: Api, body: Json) -> list[int] | None:
            return await self._render(scope, api, await apart(num_bytes, to_json, body))

        points = await self._boundaries.find(request, render, owner, num_bytes)
        model = request.body.get("model")
        model = model if isinstance(model, str) else ""
        usage = UsageWriter(
            api=request.api,
            points=points,
            is_kept=bool(owner),
            has_cache_control=request.has_cache_control,
            is_prewarm=request.is_prewarm,
            has_siblings=_has_siblings(request),
            model=model,
            is_daemon_away=model in self._away,
        )
        body = await apart(num_bytes, to_json, with_instruction(request.body, points, owner, own))
        return _Prepared(body, _headers_of(body, scope, accept_encoding=b"identity"), usage)

    async def _pass_unread(self, api: Api | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a body as it arrives, unless it asks something of kvtier: it would do so in any owner's name."""
        try:
            await self._app(scope, guarded(receive), send)
        except UnreadInstructionError:
            most = self._settings.max_body_bytes
            text = f'a request with "{PARAMETER}" may have {most} bytes at most ({MAX_BODY})'
            await send_json(send, 413, error_body(api or Api.CHAT, text, kind="request_too_large"))

    async def _serve_marked(self, body: bytes, usage: UsageWriter, scope: Scope, receive: Receive, send: Send) -> None:
        # The Responses API reports cached tokens always, and over all turns of its tools.
        is_counted = usage.api is not Api.RESPONSES and count_cached_tokens(scope)
        token = MEASURED.set(usage if is_counted else None)
        rewriting = RewritingSend(send, usage)
        try:
            await self._app(scope, replay_body(body, receive), rewriting)
        except CutShortError as exc:
            if rewriting.has_begun:
                raise
            status, kind = (504, "timeout_error") if exc.is_late else (502, "api_error")
            await send_json(send, status, error_body(usage.api, str(exc), kind=kind))
        finally:
            MEASURED.reset(token)
            if usage.result:  # without a report it says what was known when it began
                self._away.discard(usage.model)
                if usage.is_daemon_away:
                    self._away.add(usage.model)
        if usage.was_unknown and not self._warned:
            self._warned = True
            _log.warning("vLLM reports no cached tokens, so usage says 0: start it with --enable-prompt-tokens-details")

    async def _render(self, scope: Scope, api: Api, body: bytes) -> list[int] | None:
        """Ask vLLM with the caller's own headers: a caller that vLLM refuses has nothing rendered."""
        path = f"{scope.get('root_path', '')}{api}/render"
        status, answer = await _post(self._app, scope, path, body)
        if status == 403 and _SCALE_OUT in answer:  # the key is right (else 401), and the endpoints are off
            self._private_render = self._private_render or render_app(scope)
            if self._private_render is None:
                raise RenderError("vLLM's render endpoints are off: start it with --enable-scale-out")
            status, answer = await _post(self._private_render, scope, path, body)
        if status in _REFUSED:
            return None
        tokens = (await apart(len(answer), _parsed, answer) or {}).get("token_ids")
        if status != 200 or not isinstance(tokens, list):
            raise RenderError(f"{path} answered {status}; it must be a vLLM from 0.32 on that takes this API key")
        return tokens


async def _post(app: App, scope: Scope, path: str, body: bytes) -> tuple[int, bytes]:
    try:
        return await post_json(app, scope, path, body, MAX_BODY_BYTES)
    except (BodyRefusedError, CutShortError) as exc:  # the proxy's, not vLLM's word on the conversation
        raise RenderError(f"{path}: {exc}") from exc
    except Exception as exc:
        # vLLM's routes raise what its own app turns into an answer: a template that refuses the conversation.
        _log.debug("%s raised %s", path, exc)
        return 400, b""


def with_instruction(body: Json, points: list[MarkedPlace], owner: str, own: Json | None) -> Json:
    """Return a request that says what the connector shall pin, beside what the client itself asks of it (`own`)."""
    params: Any = body.get("kv_transfer_params")
    instruction = dict(own or {})
    if points and owner:  # no key, no pin
        instruction |= {"breakpoints": [point._asdict() for point in points], "owner": owner}
    # What a client sent in place of parameters is not ours to replace: vLLM says what is wrong with it.
    if not instruction or not isinstance(params, dict | None):
        return body
    return body | {"kv_transfer_params": (params or {}) | {PARAMETER: instruction}}


def _headers_of(body: bytes, scope: Scope, **values: bytes) -> Headers:
    """Return the headers of a request with another body."""
    length = str(len(body)).encode()
    return replaced(scope["headers"], content_length=length, transfer_encoding=None, **values)


def _is_plain(scope: Scope) -> bool:
    """Return whether the body is not compressed; a compressed one is vLLM's to read or to refuse."""
    return header(scope["headers"], b"content-encoding").lower() in (b"", b"identity")


def _has_siblings(request: MarkedRequest) -> bool:
    return request.api is Api.CHAT and not request.body.get("stream") and request.body.get("n") not in (None, 1)


def _asked(api: Api | None, owner: str, body: bytes) -> _Asked | None:
    """Read a body; None when it is no JSON object. MarkerError: it asks what cannot be."""
    fields = _parsed(body)
    if fields is None:
        return None
    request = read_markers(api, fields) if api is not None else None
    return _Asked(fields, request, checked_instruction(fields, owner, is_marked=request is not None))


def _parsed(body: bytes) -> Json | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    except RecursionError as exc:  # vLLM's stack may be longer, and what it reads here is not known
        raise NestedTooDeeplyError from exc
    return value if isinstance(value, dict) else None
