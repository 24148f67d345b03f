"""An ASGI app with vLLM's endpoints: renders words as tokens, and answers with the words of the prompt it has seen."""

import asyncio
import json
import zlib
from collections.abc import Iterator
from typing import Any

from kvtier.gateway.asgi import Message, Receive, Scope, Send, send_json

Json = dict[str, Any]
ANSWER = "a b c"


class VllmApp:
    """Answers as vLLM 0.32 does.

    Attributes:
        has_render: Whether `--enable-scale-out` is given.
        has_details: Whether `--enable-prompt-tokens-details` is given.
        api_key: Of `--api-key`, empty for none.
        bodies: Of all requests except for rendering, as they arrived.
        num_renders: How many prompts were rendered.
        stream_gate: Streams wait for it before their first event; None: they wait for nothing.
        is_streaming: Set when one waits for it.
        report: What kvtier's connector says of instructions; None: there is none.
    """

    def __init__(self, *, has_render: bool = True, has_details: bool = True, api_key: str = "") -> None:
        self.has_render, self.has_details, self.api_key = has_render, has_details, api_key
        self.bodies: list[bytes] = []
        self.scopes: list[Scope] = []
        self.num_renders = 0
        self.stream_gate: asyncio.Event | None = None
        self.is_streaming = asyncio.Event()
        self.report: Json | None = None
        self.refused_text = ""
        self._computed: set[tuple[int, ...]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "lifespan":
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self.api_key and headers.get(b"authorization") != f"Bearer {self.api_key}".encode():
            await send_json(send, 401, {"error": "Unauthorized"})
            return
        body = await _body(receive)
        if scope["path"].endswith("/render"):
            await self._render(body, send)
            return
        self.bodies.append(body)
        self.scopes.append(scope)
        if scope["path"] in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
            await self._answer(scope["path"], json.loads(body), send)
        else:
            await send_json(send, 200, {"path": scope["path"], "num_bytes": len(body)})

    @property
    def last(self) -> Json:
        """Return the body of the last request."""
        return json.loads(self.bodies[-1])  # type: ignore[no-any-return]

    async def _render(self, body: bytes, send: Send) -> None:
        if not self.has_render:
            await send_json(send, 403, {"error": {"message": "Restart vllm serve with --enable-scale-out"}})
            return
        self.num_renders += 1
        if self.refused_text and self.refused_text.encode() in body:
            await send_json(send, 400, {"error": {"message": "the template refuses this"}})
            return
        await send_json(send, 200, {"token_ids": render(json.loads(body))})

    async def _answer(self, path: str, body: Json, send: Send) -> None:
        tokens = render(body)
        cached = max((n for n in range(len(tokens)) if tuple(tokens[:n]) in self._computed), default=0)
        self._computed |= {tuple(tokens[: n + 1]) for n in range(len(tokens))}
        usage = self._usage(path, len(tokens), cached)
        if body.get("stream"):
            if self.stream_gate is not None:
                self.is_streaming.set()
                await self.stream_gate.wait()
            await _stream(send, list(_events(path, body, usage)))
        else:
            is_instructed = "kvtier" in (body.get("kv_transfer_params") or {})
            report = {"kvtier": self.report} if self.report is not None and is_instructed else None
            await send_json(send, 200, {**_whole(path, usage), "kv_transfer_params": report})

    def _usage(self, path: str, num_tokens: int, cached: int) -> Json:
        if path == "/v1/messages":
            details = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0} if self.has_details else {}
            return {"input_tokens": num_tokens - (cached if self.has_details else 0), "output_tokens": 3, **details}
        if path == "/v1/responses":
            details = {"cached_tokens": cached, "cache_write_tokens": 0}
            return {"input_tokens": num_tokens, "output_tokens": 3, "input_tokens_details": details}
        usage: Json = {"prompt_tokens": num_tokens, "completion_tokens": 3, "total_tokens": num_tokens + 3}
        return usage | ({"prompt_tokens_details": {"cached_tokens": cached}} if self.has_details else {})


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if not message.get("more_body"):
            return body


def _whole(path: str, usage: Json) -> Json:
    if path == "/v1/messages":
        content = [{"type": "text", "text": ANSWER}]
        return {"id": "m", "type": "message", "content": content, "stop_reason": "end_turn", "usage": usage}
    if path == "/v1/responses":
        return {
            "id": "r",
            "object": "response",
            "output": [{"type": "message"}],
            "status": "incomplete",
            "usage": usage,
        }
    return {"id": "c", "choices": [{"index": 0, "message": {"content": ANSWER}}], "usage": usage}


def _events(path: str, body: Json, usage: Json) -> Iterator[str]:
    if path == "/v1/messages":
        started = {"input_tokens": usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), "output_tokens": 0}
        yield _named({"type": "message_start", "message": {"id": "m", "usage": started}})
        for word in ANSWER.split():
            yield _named({"type": "content_block_delta", "delta": {"text": word}})
        yield _named({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage})
        yield _named({"type": "message_stop"})
    elif path == "/v1/responses":
        yield _named({"type": "response.created", "response": {"id": "r", "usage": None}})
        yield _named({"type": "response.completed", "response": {"id": "r", "usage": usage}})
    else:
        for word in ANSWER.split():
            yield f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n"
        if (body.get("stream_options") or {}).get("include_usage"):
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


def _named(event: Json) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


async def _stream(send: Send, events: list[str]) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for event in events:
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def render(body: Json) -> list[int]:
    """Return the prompt's words as tokens, in the order of a template that writes tools behind the system's text."""
    turns: Any = body.get("messages", body.get("input"))
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    words = ["<system>", *_words(body.get("system") or body.get("instructions") or "")]
    for tool in body.get("tools") or []:
        words += ["<tool>", *json.dumps(tool).split()]
    for turn in turns:
        words += [f"<{turn['role']}>", *_words(turn.get("content") or "")]
    return [zlib.crc32(word.encode()) for word in [*words, "<assistant>"]]


def _words(content: Any) -> list[str]:
    if isinstance(content, str):
        return content.split()
    return [word for part in content for word in _words(part.get("text") or part.get("content") or "")]


class Client:
    """Sends requests to an ASGI app."""

    def __init__(self, app: Any, **headers: str) -> None:
        self._app = app
        self._headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def post(self, path: str, body: Any, *, parts: int = 1) -> "Response":
        """POST JSON, or bytes as they are, in a number of parts."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = -(-len(raw) // parts) or 1
        pieces = [raw[start : start + size] for start in range(0, len(raw), size)] or [b""]
        messages: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": index < len(pieces) - 1}
            for index, piece in enumerate(pieces)
        ]
        return await self.send("POST", path, messages, [(b"content-length", str(len(raw)).encode())])

    async def send(self, method: str, path: str, messages: list[Message], headers: Any = ()) -> "Response":
        """Send a request of ASGI messages."""
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"host", b"here"), *self._headers, *headers],
        }  # fmt: skip
        sent: list[Message] = []

        async def receive() -> Message:
            return messages.pop(0) if messages else await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        return Response(sent)


class Response:
    """What an app sent."""

    def __init__(self, messages: list[Message]) -> None:
        self.status: int = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0].get("headers", [])}
        self.parts = [message.get("body", b"") for message in messages[1:]]
        self.body = b"".join(self.parts)

    def json(self) -> Any:
        """Return the body."""
        return json.loads(self.body)

    def events(self) -> list[Json]:
        """Return the data of the events of a stream."""
        lines = [line for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line.removeprefix("data: ")) for line in lines if "[DONE]" not in line]
