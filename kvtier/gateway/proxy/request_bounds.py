"""What all requests of a gateway hold together: how many run, how many bytes of bodies they hold, how long these take.

Bytes count from the moment at which they arrive: a body that never ends is held too.
"""

import asyncio
import contextlib

from kvtier.gateway.asgi import App, Message, Receive, Scope, Send
from kvtier.gateway.proxy.refusals import CLOSE, RETRY, refuse

HEALTH_PATHS = ("/health", "/health/live")
BODY_S, LEAST_BYTES_PER_S = 30.0, 4096
"""A body has half a minute, and a second more for each of its 4 KiB: a client that sends byte by byte would take one of
the running requests for as long as it likes. Source: Apache's mod_reqtimeout (`body=20,MinRate=500`)."""


LINGER_S = 2.0
"""How long the rest of a refused body is read: it is discarded, and its request no longer counts as running."""


class _BodyRefusedError(Exception):
    def __init__(self, status: int, problem: str, kind: str) -> None:
        super().__init__(problem)
        self.status, self.problem, self.kind = status, problem, kind


class RequestBounds:
    """An ASGI app around another, which sees what is within the bounds. One event loop.

    Args:
        app: It reads bodies before it answers.
        max_requests: That run at a time; a further one is answered 503.
        max_held_bytes: Of the bodies of all running requests, as received; beyond it 503.
        body_s: See `BODY_S`; a slower body is answered 408.
    """

    def __init__(self, app: App, *, max_requests: int, max_held_bytes: int, body_s: float = BODY_S) -> None:
        self._app = app
        self._max_requests, self._max_held_bytes, self._body_s = max_requests, max_held_bytes, body_s
        self._num_requests = self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the start and stop of the server."""
        if scope["type"] != "http" or scope["path"] in HEALTH_PATHS:
            await self._app(scope, receive, send)
        elif self._num_requests >= self._max_requests:
            text = f"{self._max_requests} requests run (--max-requests); try again"
            await refuse(scope, send, 503, text, "overloaded_error", RETRY)
        else:
            body = _Body(receive)
            self._num_requests += 1
            refused: tuple[int, str, str] | None = None  # not the exception: its frames hold the body
            try:
                await self._app(scope, lambda: self._receive(body), send)
            except _BodyRefusedError as exc:
                refused = exc.status, exc.problem, exc.kind
            finally:
                self._num_requests -= 1
                self._held_bytes -= body.num_bytes
            if refused is not None:
                await refuse(scope, _lingering(receive, send), *refused, (*RETRY, *CLOSE))

    async def _receive(self, body: "_Body") -> Message:
        if body.is_complete:
            return await body.receive()
        try:
            async with asyncio.timeout_at(body.began_s + self._body_s + body.num_bytes / LEAST_BYTES_PER_S):
                message = await body.receive()
        except TimeoutError as exc:
            raise _BodyRefusedError(408, "the request's body does not arrive in time", "timeout_error") from exc
        num_bytes = len(message.get("body", b""))
        if self._held_bytes + num_bytes > self._max_held_bytes:
            problem = f"running requests hold {self._held_bytes} bytes, of at most {self._max_held_bytes}; try again"
            raise _BodyRefusedError(503, problem, "overloaded_error")
        self._held_bytes += num_bytes
        body.num_bytes += num_bytes
        body.is_complete = not message.get("more_body", False)
        return message


def _lingering(receive: Receive, send: Send) -> Send:
    """Return a `send` that discards the rest of the request's body after the answer's, and ends the answer then.

    A connection that is closed while something of the request is unread is reset, and a reset can reach the client
    before it has read the answer. Source: RFC 9112, section 9.6.
    """

    async def send_and_drain(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while (await receive()).get("more_body", False):
                        pass
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    return send_and_drain


class _Body:
    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.began_s = asyncio.get_running_loop().time()
        self.num_bytes, self.is_complete = 0, False
