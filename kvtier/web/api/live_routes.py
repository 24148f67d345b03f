"""What changes by itself: events as they happen, and numbers over time."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from kvtier.library.values.plain_json import to_jsonable
from kvtier.library.values.proof_values import Event
from kvtier.web.api.daemon_calls import Daemon
from kvtier.web.api.disconnection import until_disconnected
from kvtier.web.api.json_schemas import answers
from kvtier.web.event_hub import EventHub
from kvtier.web.number_history import MAX_POINTS, History, Span

router = APIRouter(tags=["live"])

_TYPE = "text/event-stream"


@router.get(
    "/events",
    response_class=Response,
    response_model=None,
    responses={200: {"description": "Server-sent events; `data` is an Event.", "content": {_TYPE: {}}}},
)
async def stream_events(
    daemon: Daemon,
    request: Request,
    name: Annotated[list[str] | None, Query(description="Only these events; may come several times.")] = None,
) -> Response:
    """Send what the daemon does from now on, the events of docs/logs.md, as server-sent events.

    A comment comes every 15 s. `Last-Event-ID` is not supported: what happened while a client was away is not sent. An
    event `dropped` says how many were lost because the client read too slowly.
    """
    hub: EventHub = request.app.state.hub
    client = daemon.client
    watch, keep_alive_s = partial(daemon.acting, client.watch_events), request.app.state.keep_alive_s
    return _EventResponse(hub.stream(daemon.caller, watch, keep_alive_s, name or ()))  # type: ignore[arg-type]  # an async generator


@router.get("/history", **answers(History))
async def get_history(
    daemon: Daemon,
    request: Request,
    span: Span = "hour",
    name: Annotated[list[str] | None, Query(description="Only these series; may come several times.")] = None,
    points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = 360,
) -> Response:
    """Return the last hour (sampled each second) or week (each minute) of the daemon's numbers, since its start."""
    history = request.app.state.history
    return await daemon.answer(lambda _: history.over(span, name or (), points))


class _EventResponse(Response):
    """Sends events until the client leaves or the watch ends."""

    def __init__(self, events: AsyncGenerator[Event | None, None]) -> None:
        super().__init__(media_type=_TYPE)
        del self.headers["content-length"]
        self.headers["x-accel-buffering"] = "no"  # nginx would hold events back
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, None)  # begun, or an error: then it is a problem
            assert first is None
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            sending = asyncio.ensure_future(self._send(events, send))
            leaving = asyncio.ensure_future(until_disconnected(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.wait({sending, leaving})
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, events: AsyncGenerator[Event | None, None], send: Any) -> None:
        await send({"type": "http.response.body", "body": b"retry: 2000\n\n", "more_body": True})
        async for event in events:
            piece = b":\n\n" if event is None else f"data: {json.dumps(to_jsonable(event))}\n\n".encode()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
