"""Rewrites the usage in vLLM's answers: in a JSON body, or in the events of a stream as they pass."""

import json
from enum import Enum
from typing import Any

from kvtier.gateway.asgi import Message, NestedTooDeeplyError, Send, apart, header, replaced, to_json
from kvtier.gateway.markers.marked_request import Api, Json
from kvtier.gateway.usage_numbers import UsageWriter

MAX_BODY_BYTES = 32 * 1024**2
"""Of an answer that is held to be rewritten; a longer one passes as vLLM sent it."""
MAX_EVENT_BYTES = 4 * 1024**2
"""Of an event of a stream, likewise."""
_EVENT_END = b"\n\n"
_DATA = b"data: "


class _Mode(Enum):
    PASS = "pass"
    JSON = "json"
    STREAM = "stream"


class RewritingSend:
    """An ASGI `send` through which an answer of vLLM goes to the client. Errors pass unchanged."""

    def __init__(self, send: Send, usage: UsageWriter) -> None:
        self._send, self._usage = send, usage
        self._mode = _Mode.PASS
        self._start: Message = {}
        self._held = bytearray()

    @property
    def has_begun(self) -> bool:
        """Whether the client may have had a part of the answer: one that is held is sent when it is complete."""
        return self._mode is not _Mode.JSON

    async def __call__(self, message: Message) -> None:
        """Send a message on, now or as part of a later one."""
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] != "http.response.body" or self._mode is _Mode.PASS:
            await self._send(message)
        elif self._mode is _Mode.JSON:
            await self._collect(message)
        else:
            await self._pass_events(message)

    async def _begin(self, message: Message) -> None:
        headers = message.get("headers", [])
        kind = header(headers, b"content-type").partition(b";")[0].strip().lower()
        if message["status"] == 200 and header(headers, b"content-encoding").lower() in (b"", b"identity"):
            self._mode = {b"application/json": _Mode.JSON, b"text/event-stream": _Mode.STREAM}.get(kind, _Mode.PASS)
        if self._mode is _Mode.STREAM:
            message = {**message, "headers": replaced(headers, content_length=None)}
        if self._mode is _Mode.JSON:
            self._start = message
        else:
            await self._send(message)

    async def _collect(self, message: Message) -> None:
        self._held += message.get("body", b"")
        more = message.get("more_body", False)
        if more and len(self._held) <= MAX_BODY_BYTES:
            return
        body = bytes(self._held)
        if not more:
            body = await apart(len(body), rewritten_json, body, self._usage)
        self._held.clear()
        self._mode = _Mode.PASS
        if not more:
            headers = replaced(
                self._start["headers"], content_length=str(len(body)).encode(), kvtier_cached_tokens=self._sources()
            )
            self._start = {**self._start, "headers": headers}
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _sources(self) -> bytes | None:
        """Return a dictionary as in RFC 9651: tokens by where they were cached."""
        if not self._usage.result or self._usage.has_siblings:
            return None
        return ", ".join(f"{key}={num}" for key, num in (self._usage.sources or {"device": 0}).items()).encode()

    async def _pass_events(self, message: Message) -> None:
        """Send complete events on at once; vLLM writes whole ones, so nothing is held as a rule."""
        self._held += message.get("body", b"")
        more = message.get("more_body", False)
        end = self._held.rfind(_EVENT_END) + len(_EVENT_END)
        # No vLLM ends lines with CR LF (and JSON escapes both): what does is not for us to hold.
        if not more or len(self._held) > MAX_EVENT_BYTES or b"\r\n" in self._held:
            end = len(self._held)
        elif end < len(_EVENT_END):
            return
        events = bytes(self._held[:end])
        del self._held[:end]
        await self._send({**message, "body": rewritten_events(events, self._usage)})


def rewritten_json(body: bytes, usage: UsageWriter) -> bytes:
    """Return an answer with its usage rewritten; what is no answer of the API stays."""
    answer = _object(body)
    if answer is None or not isinstance(answer.get("usage"), dict):
        return body
    usage.read_report(answer.get("kv_transfer_params"))
    answer["usage"] = usage.write(answer["usage"])
    if usage.is_prewarm and usage.api is Api.MESSAGES:
        answer |= {"content": [], "stop_reason": "max_tokens", "stop_sequence": None}
    elif usage.is_prewarm:
        answer |= {"output": [], "status": "completed", "incomplete_details": None}
    return _written(answer, body)


def rewritten_events(events: bytes, usage: UsageWriter) -> bytes:
    """Return events of a stream with their usage rewritten."""
    if b'"usage"' not in events:
        return events
    return _EVENT_END.join(
        _rewritten_event(event, usage) if b'"usage"' in event else event for event in events.split(_EVENT_END)
    )


def _rewritten_event(event: bytes, usage: UsageWriter) -> bytes:
    lines = event.split(b"\n")
    for index, line in enumerate(lines):
        if line.startswith(_DATA) and (data := _object(line[len(_DATA) :])) is not None and _rewrite(data, usage):
            lines[index] = _written(data, line, _DATA)
    return b"\n".join(lines)


def _rewrite(data: Json, usage: UsageWriter) -> bool:
    """Rewrite the usage in an event, if it is one that has the whole request's; return whether it was."""
    holder: Any = data
    if usage.api is Api.MESSAGES and data.get("type") == "message_start":
        holder = data.get("message")
        # vLLM's own first event never has cached tokens. Without a count of the engine, the last event has them.
        if isinstance(holder, dict) and not usage.is_known(holder.get("usage") or {}):
            return False
    elif usage.api is Api.RESPONSES:
        holder = data.get("response")
    elif usage.api is Api.CHAT and data.get("choices"):
        return False
    if not isinstance(holder, dict) or not isinstance(holder.get("usage"), dict):
        return False
    usage.read_report(holder.get("kv_transfer_params"))
    holder["usage"] = usage.write(holder["usage"])
    return True


def _object(text: bytes) -> Json | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _written(value: Json, original: bytes, prefix: bytes = b"") -> bytes:
    """Return JSON behind a prefix; the original where it is nested too deeply: responses repeat their request."""
    try:
        return prefix + to_json(value)
    except NestedTooDeeplyError:
        return original
