"""One client shuts out no other: what it may have of the bodies on their way, and for how long a body may take."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvtier.gateway import PromptCaching
from kvtier.gateway.asgi import Message
from kvtier.gateway.gateway_settings import MarkerSettings
from kvtier.gateway.proxy.request_bounds import LEAST_BYTES_PER_S, RequestBounds
from tests.unit.gateway.vllm_app import Response, VllmApp

HERE, ELSEWHERE = "192.0.2.1", "192.0.2.2"
PATH = "/v1/completions"


def bounded(**bounds: Any) -> RequestBounds:
    """Return a vLLM with the app around it, within bounds."""
    limits: dict[str, Any] = {"max_requests": 8, "max_held_bytes": 2000} | bounds
    return RequestBounds(PromptCaching(VllmApp(), MarkerSettings()), **limits)


async def send(
    app: RequestBounds,
    *parts: bytes,
    path: str = PATH,
    address: str = HERE,
    method: str = "POST",
    is_whole: bool = True,
    receive: Callable[[], Awaitable[Message]] | None = None,
    **headers: str,
) -> Response:
    """Send a request; one that is not whole stops behind its last part."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if is_whole:
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[Message] = []

    async def next_part() -> Message:
        return messages.pop(0) if messages else await asyncio.get_running_loop().create_future()

    async def keep(message: Message) -> None:
        sent.append(message)

    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": fields, "client": (address, 1)}
    await asyncio.wait_for(app(scope, receive or next_part, keep), 30)
    return Response(sent)


async def stalled(number: int, app: RequestBounds, *parts: bytes, **how: Any) -> list[asyncio.Task[Response]]:
    """Begin requests that do not end."""
    tasks = [asyncio.create_task(send(app, *parts, is_whole=False, **how)) for _ in range(number)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    return tasks


async def leave(tasks: list[asyncio.Task[Response]]) -> None:
    """End them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_only_asking_for_health_is_not_counted() -> None:
    """A body that was sent there was held, by any number of requests and for any time."""

    async def run() -> list[int]:
        app = bounded(max_requests=1)
        waiting = await stalled(1, app, b"x", path="/health")
        answers = [await send(app), await send(app, path="/health"), await send(app, path="/health", method="GET")]
        await leave(waiting)
        return [answer.status for answer in [*answers, await send(app)]]

    assert asyncio.run(run()) == [503, 503, 200, 200]


def test_one_client_has_half_of_the_bytes_that_are_on_their_way() -> None:
    """Sixteen connections that stopped before the last byte of the largest body had all that is held, for hours."""

    async def run() -> None:
        app = bounded()
        waiting = await stalled(2, app, b"x" * 500)
        refused = await send(app, b"x" * 500)
        assert (refused.status, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "1000 bytes of this client are on their way" in refused.json()["error"]["message"]
        # Others', and a body that has come whole already, are held.
        assert (await send(app, b"x" * 900, address=ELSEWHERE)).status == 200
        assert (await send(app)).status == 200
        await leave(waiting)
        assert (await send(app, b"x" * 900)).status == 200
        del waiting
        gc.collect()
        assert not app._shares

    asyncio.run(run())


def test_one_client_has_half_of_the_requests_whose_body_is_on_its_way() -> None:
    async def run() -> None:
        app = bounded(max_requests=4)
        waiting = await stalled(2, app)
        assert (await send(app)).status == 429
        assert (await send(app, address=ELSEWHERE)).status == 200
        await leave(waiting)
        assert (await send(app)).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"address": "2001:db8::1"}, {"address": "2001:db8::2"}, True),
        ({"address": "2001:db8::1"}, {"address": "2001:db8:0:1::1"}, False),
        ({"x_tenant": "blue"}, {"x_tenant": "green"}, False),
        ({"x_tenant": "blue"}, {"x_tenant": "blue", "address": ELSEWHERE}, True),
        ({"authorization": "Bearer a"}, {"authorization": "Bearer b"}, True),
    ],
)
def test_the_trusted_header_or_their_network_distinguishes_clients(one: Any, other: Any, is_same: bool) -> None:
    """By what vLLM has not checked yet they would be as many as they like."""

    async def run() -> int:
        app = bounded(max_requests=4, owner_header="x-tenant")
        waiting = await stalled(2, app, **one)
        status = (await send(app, **other)).status
        await leave(waiting)
        return status

    assert asyncio.run(run()) == (429 if is_same else 200)


def test_a_body_that_came_quickly_may_not_stop_for_longer() -> None:
    """Each 4 KiB were another second: 32 MiB but for a byte were held for more than two hours."""

    async def run() -> int:
        app = bounded(max_held_bytes=10**8, body_s=0.05)
        return (await send(app, b"x" * 1_000_000, is_whole=False)).status

    assert asyncio.run(run()) == 408


def test_a_body_that_comes_slowly_but_for_ever_ends() -> None:
    async def run() -> int:
        app = bounded(max_held_bytes=10**9, body_s=0.1)

        async def receive() -> Message:
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b"x" * LEAST_BYTES_PER_S, "more_body": True}

        return (await send(app, receive=receive)).status

    assert asyncio.run(run()) == 408
