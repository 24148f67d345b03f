"""One client cannot shut out others: its share of the bodies that still arrive, and how long one may take."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from kvtier.gateway import PromptCaching
from kvtier.gateway.asgi import Message
from kvtier.gateway.gateway_settings import MarkerSettings
from kvtier.gateway.proxy.request_bounds import RequestBounds
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
    within_s: float = 30,
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
    await asyncio.wait_for(app(scope, receive or next_part, keep), within_s)
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


KIB = 1024


def arriving(parts: Iterable[tuple[float, int]], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[Message]]:
    """Return a `receive` that gives parts of a body; each comes some seconds of the loop's clock after the last."""
    loop, waiting, passed_s = asyncio.get_running_loop(), list(parts), 0.0
    real_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_s() + passed_s)

    async def receive() -> Message:
        nonlocal passed_s
        if not waiting:
            return {"type": "http.disconnect"}
        pause_s, num_bytes = waiting.pop(0)
        passed_s += pause_s
        for _ in range(5):  # what is due meanwhile happens
            await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * num_bytes, "more_body": bool(waiting)}

    return receive


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([(15, 64 * KIB)] * 512, id="32 MiB on a slow link"),
        pytest.param([(0, 10_000 * KIB), (31, 1)], id="a stall after a fast part"),
        pytest.param([(0, 10_000 * KIB), *[(290, 1)] * 8], id="stalls as long as the average is kept"),
    ],
)
def test_a_body_whose_average_is_kept_is_served(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was 408 after ten minutes of any size, and after half a minute's stall."""

    async def run() -> int:
        app = bounded(max_held_bytes=10**9)
        return (await send(app, receive=arriving(parts, monkeypatch), within_s=10**6)).status

    assert asyncio.run(run()) == 200


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([(29, 1), (2, 1)], id="bytes one by one"),
        pytest.param([(17, 64 * KIB)] * 40, id="less than the average"),
        pytest.param([(0, 1_000 * KIB), *[(31, 1)] * 10], id="a fast part that is used up"),
        pytest.param([(0, 32_000 * KIB), (301, 1)], id="a client that lost power"),
    ],
)
def test_a_body_that_comes_too_slowly_ends(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one byte of 32 MiB were held for more than two hours."""

    async def run() -> int:
        app = bounded(max_held_bytes=10**9)
        return (await send(app, receive=arriving(parts, monkeypatch), within_s=10**6)).status

    assert asyncio.run(run()) == 408
