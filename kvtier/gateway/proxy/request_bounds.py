"""What all requests of a gateway hold together: how many run, how many bytes of bodies they hold, how long these take.

Bytes count from the moment at which they arrive: a body that never ends is held too. Of bodies that are on their way
one client has half of the places and half of the bytes. Whole ones are held until they are answered, and count for no
client: behind a proxy all clients may have one address, and would have half of what may run.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from weakref import WeakValueDictionary

from kvtier.access.rate_limits import network_of
from kvtier.gateway.asgi import App, BodyRefusedError, Headers, Message, Receive, Scope, Send
from kvtier.gateway.owners import owner_of
from kvtier.gateway.proxy.refusals import CLOSE, RETRY, refuse

HEALTH_PATHS = ("/health", "/health/live")
BODY_S, LEAST_BYTES_PER_S, MAX_STALL_PERIODS = 30.0, 4096, 10
"""A body has half a minute, and a second more for each of its 4 KiB: a client that sends byte by byte would take one of
the running requests for as long as it likes. Source: Apache's mod_reqtimeout (`body=20,MinRate=500`). So 32 MiB may
take a slow link two hours, and a fast one may stall; one client that abuses this holds its half, no more. Five minutes
without a byte end any body: a client that lost power says nothing, and would hold a part of that half for hours, which
others behind the same address need."""
LINGER_S = 2.0
"""How long the rest of a refused body is read: it is discarded, and its request no longer counts as running."""


class RequestBounds:
    """An ASGI app around another, which sees what is within the bounds. One event loop.

    Args:
        app: It reads bodies before it answers. What raises BodyRefusedError there is answered here.
        max_requests: That run at a time; a further one is answered 503.
        max_held_bytes: Of the bodies of all running requests, as received; beyond it 503.
        owner_header: Distinguishes clients, as it does for pins; where a request has none, its address does.
        body_s: See `BODY_S`; a slower body is answered 408.
    """

    def __init__(
        self, app: App, *, max_requests: int, max_held_bytes: int, owner_header: str = "", body_s: float = BODY_S
    ) -> None:
        self._app, self._owner_header, self._body_s = app, owner_header, body_s
        self._max_requests, self._max_held_bytes = max_requests, max_held_bytes
        self._num_requests = self._held_bytes = 0
        self._shares: WeakValueDictionary[str, _Share] = WeakValueDictionary()  # by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the start and stop of the server."""
        if scope["type"] != "http" or (scope["path"] in HEALTH_PATHS and scope["method"] in ("GET", "HEAD")):
            await self._app(scope, receive, send)
        elif self._num_requests >= self._max_requests:
            text = f"{self._max_requests} requests run (--max-requests); try again"
            await refuse(scope, send, 503, text, "overloaded_error", RETRY)
        else:
            await self._serve(scope, _Body(receive, self._share_of(scope), self._body_s), send)

    async def _serve(self, scope: Scope, body: "_Body", send: Send) -> None:
        refused: tuple[int, str, str, Headers] | None = None  # not the exception: its frames hold the body
        self._num_requests += 1
        try:
            await self._app(scope, lambda: self._receive(body), send)
        except BodyRefusedError as exc:
            refused = exc.status, exc.problem, exc.kind, (*exc.headers, *CLOSE)
        finally:
            self._num_requests -= 1
            self._held_bytes -= body.num_bytes
            body.ended()
        if refused is not None:
            await refuse(scope, send if body.is_whole else _lingering(body.receive, send), *refused)

    def _share_of(self, scope: Scope) -> "_Share":
        client = owner_of(scope["headers"], self._owner_header) if self._owner_header else ""
        if not client and scope.get("client"):
            client = network_of(scope["client"][0])
        return self._shares.setdefault(client, _Share()) if client else _Share()

    async def _receive(self, body: "_Body") -> Message:
        if body.is_whole:
            return await body.receive()
        if not body.is_coming:
            self._check_number(body.share)
            body.begun()
        try:
            async with asyncio.timeout_at(body.due_s):
                message = await body.receive()
        except TimeoutError as exc:
            raise BodyRefusedError(408, "the request's body does not arrive in time", "timeout_error", RETRY) from exc
        self._check_bytes(body.share, len(message.get("body", b"")), is_last=not message.get("more_body", False))
        self._held_bytes += len(message.get("body", b""))
        body.add(message)
        return message

    def _check_number(self, share: "_Share") -> None:
        if share.num_bodies >= max(1, self._max_requests // 2):
            problem = f"{share.num_bodies} bodies of this client are on their way; try again when one is whole"
            raise BodyRefusedError(429, problem, "rate_limit_error", RETRY)

    def _check_bytes(self, share: "_Share", num_bytes: int, *, is_last: bool) -> None:
        if self._held_bytes + num_bytes > self._max_held_bytes:
            problem = f"running requests hold {self._held_bytes} bytes, of at most {self._max_held_bytes}; try again"
            raise BodyRefusedError(503, problem, "overloaded_error", RETRY)
        if not is_last and share.num_bytes + num_bytes > self._max_held_bytes // 2:
            problem = f"{share.num_bytes} bytes of this client are on their way; try again when a body is whole"
            raise BodyRefusedError(429, problem, "rate_limit_error", RETRY)


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


@dataclass
class _Share:
    """What is on its way of one client: bodies that are not whole yet, and what has arrived of them."""

    num_bodies: int = 0
    num_bytes: int = 0


class _Body:
    """A body, and when more of it must have arrived: `due_s`."""

    def __init__(self, receive: Receive, share: _Share, period_s: float) -> None:
        self.receive, self.share = receive, share
        self.num_bytes, self.is_coming, self.is_whole = 0, False, False
        self._began_s, self._period_s = asyncio.get_running_loop().time(), period_s
        self.due_s = self._began_s + period_s

    def begun(self) -> None:
        """It is waited for."""
        self.is_coming = True
        self.share.num_bodies += 1

    def add(self, message: Message) -> None:
        """A part of it has arrived."""
        num_bytes = len(message.get("body", b""))
        self.num_bytes += num_bytes
        self.share.num_bytes += num_bytes
        if not message.get("more_body", False):
            self.is_whole = True
            self.ended()
        elif num_bytes:
            longest_s = asyncio.get_running_loop().time() + MAX_STALL_PERIODS * self._period_s
            self.due_s = min(self._began_s + self._period_s + self.num_bytes / LEAST_BYTES_PER_S, longest_s)

    def ended(self) -> None:
        """It is whole, or its request has ended: nothing of it is on its way."""
        if self.is_coming:
            self.is_coming = False
            self.share.num_bodies -= 1
            self.share.num_bytes -= self.num_bytes
