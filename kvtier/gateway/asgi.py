"""ASGI, as far as the gateway needs it: bodies held and sent on, answers of JSON, calls of an app by itself."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any, TypeVar, TypeVarTuple

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]
_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")

LONG_BYTES = 256 * 1024
"""Of JSON that takes longer than a few milliseconds to read or to write."""
_JSON = b"application/json"
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_MAX_GOT_BYTES = 4 * 1024**2

_log = logging.getLogger(__name__)


def header(headers: Headers, name: bytes) -> bytes:
    """Return the first header of a name in lower case, empty when there is none."""
    return next((value for key, value in headers if key.lower() == name), b"")


def replaced(headers: Headers, **values: bytes | None) -> list[tuple[bytes, bytes]]:
    """Return headers with some set, or taken out by None; `content_length` stands for `content-length`."""
    named = {name.replace("_", "-").encode(): value for name, value in values.items()}
    kept = [(key, value) for key, value in headers if key.lower() not in named]
    return kept + [(name, value) for name, value in named.items() if value is not None]


class BodyTooLargeError(Exception):
    """A body is larger than may be held; `first` are the messages that were read of it."""

    def __init__(self, first: list[Message]) -> None:
        super().__init__("body too large")
        self.first = first


class BodyRefusedError(Exception):
    """A body is answered with an error, and the rest of it is not held."""

    def __init__(self, status: int, problem: str, kind: str, headers: Headers = ()) -> None:
        super().__init__(problem)
        self.status, self.problem, self.kind, self.headers = status, problem, kind, headers


class NestedTooDeeplyError(Exception):
    """A value was read, and cannot be written."""


class DisconnectedError(Exception):
    """The client went away before its body was complete, or before it was answered."""


class CutShortError(Exception):
    """An answer did not arrive whole; its text says why. `is_late`: the rest did not come in time."""

    def __init__(self, text: str, *, is_late: bool) -> None:
        super().__init__(text)
        self.is_late = is_late


async def read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """Read a request's whole body.

    Raises:
        BodyTooLargeError: It has, or announces, more than `max_bytes`.
        DisconnectedError: It does not arrive.
    """
    announced = header(headers, b"content-length")
    if announced.isdigit() and int(announced) > max_bytes:
        raise BodyTooLargeError([])
    messages: list[Message] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise DisconnectedError
        messages.append(message)
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise BodyTooLargeError(messages)
        if not message.get("more_body", False):
            return b"".join(each.get("body", b"") for each in messages)


def replay(messages: Iterable[Message], receive: Receive) -> Receive:
    """Return a `receive` that gives these messages first."""
    waiting = list(messages)

    async def receive_again() -> Message:
        return waiting.pop(0) if waiting else await receive()

    return receive_again


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a whole body first."""
    return replay([{"type": "http.request", "body": body, "more_body": False}], receive)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return what `work` for a client returns. The request's body is whole, so nothing of it is taken away here.

    Raises:
        DisconnectedError: The client has left, and the work was cancelled.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():  # also where the work is done: a server need not say it twice
            leaving.result()
            raise DisconnectedError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Return when the client has left. What gives its whole body once more is no server, and is asked no further.

    An app in between may give that body each time, without a pause in which anything else would run.
    """
    if (await receive())["type"] != "http.disconnect":
        await _never()


async def send_json(send: Send, status: int, value: Any, headers: Headers = ()) -> None:
    """Answer with JSON."""
    body = to_json(value)
    fields = [(b"content-type", _JSON), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def to_json(value: Any) -> bytes:
    """Return compact JSON in UTF-8. What UTF-8 cannot say (a lone surrogate) is escaped.

    Raises:
        NestedTooDeeplyError: Python's stack is too short for it.
    """
    try:
        return _COMPACT.encode(value).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()
    except RecursionError as exc:
        raise NestedTooDeeplyError from exc


async def apart(num_bytes: int, work: Callable[[*_Args], _Result], *args: *_Args) -> _Result:
    """Call `work`, which reads or writes so much JSON: in a thread where it is long, as the event loop serves all."""
    return work(*args) if num_bytes <= LONG_BYTES else await asyncio.to_thread(work, *args)


async def post_json(app: App, scope: Scope, path: str, body: bytes, max_bytes: int) -> tuple[int, bytes]:
    """POST JSON to an app, in this process, with the headers of another request; return status and body.

    Raises:
        BodyTooLargeError: The answer has more than `max_bytes`.
        Exception: What the app raised.
    """
    return await _call(app, scope, "POST", path, body, max_bytes)


async def get_status(app: App, scope: Scope, path: str) -> int:
    """GET from an app, likewise; return the status, 0 when there is none."""
    try:
        return (await _call(app, scope, "GET", path, b"", _MAX_GOT_BYTES))[0]
    except Exception as exc:
        _log.debug("GET %s raised %r", path, exc)
        return 0


async def _call(app: App, scope: Scope, method: str, path: str, body: bytes, max_bytes: int) -> tuple[int, bytes]:
    headers = replaced(
        scope["headers"], content_length=str(len(body)).encode(), content_type=_JSON, transfer_encoding=None,
        accept_encoding=None, expect=None,
    )  # fmt: skip
    inner = dict(scope) | {
        "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers,
    }  # fmt: skip
    status, answer = 0, bytearray()

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            answer.extend(message.get("body", b""))
            if len(answer) > max_bytes:
                raise BodyTooLargeError([])

    await app(inner, replay_body(body, _never), send)
    return status, bytes(answer)


async def _never() -> Message:
    await asyncio.get_running_loop().create_future()
    raise AssertionError  # it is never done
