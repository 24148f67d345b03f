"""Boundaries are found once, within bounds of memory, time and concurrency."""

import asyncio
from typing import Any

import pytest

from kvtier.errors import RenderError
from kvtier.gateway import asgi, boundaries
from kvtier.gateway.boundaries import (
    MAX_AGE_S,
    MAX_CONCURRENT,
    MAX_ENTRIES,
    MAX_PER_OWNER,
    REFUSED_AGE_S,
    Boundaries,
)
from kvtier.gateway.markers.api_paths import read_markers
from kvtier.gateway.markers.marked_request import Api, Json, MarkedRequest, Marker
from kvtier.gateway.usage_numbers import MarkedPlace


def request(*texts: str, ttl_s: int = 300) -> MarkedRequest:
    """Return a request with a marker behind each text."""
    markers = [Marker(ttl_s=ttl_s, variants=({"text": f"{text} x"}, {"text": f"{text} y"})) for text in texts]
    return MarkedRequest(api=Api.CHAT, body={}, markers=tuple(markers))


class Renderer:
    """Renders characters as tokens."""

    def __init__(self) -> None:
        self.num_calls = self.num_running = self.most_running = 0
        self.gate: asyncio.Event | None = None

    async def __call__(self, api: Api, body: dict[str, Any]) -> list[int] | None:
        self.num_calls += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        self.num_running -= 1
        return None if "refused" in body["text"] else [ord(letter) for letter in body["text"]]


def test_breakpoints_are_in_order_and_equal_ones_are_one() -> None:
    found = asyncio.run(Boundaries().find(request("long text", "a", "a"), Renderer()))
    assert [point.num_tokens for point in found] == [2, 10]


def test_a_boundary_is_rendered_once_until_it_is_old() -> None:
    now_s, renderer = 0.0, Renderer()
    table = Boundaries(clock=lambda: now_s)
    for now_s in (0.0, MAX_AGE_S - 1):  # noqa: B007 (the clock reads it)
        asyncio.run(table.find(request("a"), renderer))
    assert renderer.num_calls == 2
    now_s = MAX_AGE_S + 1
    asyncio.run(table.find(request("a"), renderer))
    assert renderer.num_calls == 4


def test_a_hostile_client_grows_nothing_beyond_the_bound() -> None:
    async def flood() -> int:
        table = Boundaries()
        for number in range(MAX_ENTRIES + 500):
            await table.find(request(f"prompt {number}"), Renderer())
        return len(table._found)

    assert asyncio.run(flood()) == MAX_ENTRIES


def test_requests_wait_for_one_that_renders_the_same() -> None:
    async def many() -> Renderer:
        table, renderer = Boundaries(), Renderer()
        await asyncio.gather(*(table.find(request("a"), renderer) for _ in range(50)))
        await asyncio.gather(*(table.find(request(f"b{n}"), renderer) for n in range(50)))
        return renderer

    renderer = asyncio.run(many())
    assert renderer.num_calls <= 2 * MAX_CONCURRENT + 100
    assert renderer.most_running <= 2 * MAX_CONCURRENT


def test_what_vllm_refuses_has_no_boundary_and_is_asked_again_later() -> None:
    now_s, renderer = 0.0, Renderer()
    table = Boundaries(clock=lambda: now_s)
    for now_s, num_calls in ((0.0, 4), (REFUSED_AGE_S - 1, 4), (REFUSED_AGE_S + 1, 6)):  # noqa: B007 (the clock reads it)
        found = asyncio.run(table.find(request("refused", "b"), renderer))
        assert [point.num_tokens for point in found] == [2]
        assert renderer.num_calls == num_calls


def test_a_role_that_is_no_text_is_left_to_vllm() -> None:
    """It was a 500: half of a surrogate pair, which JSON can escape, has no bytes in UTF-8."""

    async def refuses(api: Api, body: Json) -> list[int] | None:
        return None

    system = {"role": "system", "content": "x", "cache_control": {"type": "ephemeral"}}
    marked = read_markers(Api.CHAT, {"model": "m", "messages": [system, {"role": "\ud800", "content": "hi"}]})
    assert marked is not None
    assert asyncio.run(Boundaries().find(marked, refuses)) == []


def test_a_conversation_that_vllm_refuses_says_nothing_of_one_that_goes_on_otherwise() -> None:
    """Another owner's broken turn behind the same system prompt took the pin from everyone for a minute."""
    system = {"role": "system", "content": "rules", "cache_control": {"type": "ephemeral"}}

    async def render(api: Api, body: Json) -> list[int] | None:
        contents = [turn["content"] for turn in body["messages"]]
        return None if 0 in contents else [ord(letter) for content in contents for letter in f"<{content}"]

    def marked(following: Any) -> MarkedRequest:
        turns = [system, {"role": "assistant", "content": following}, {"role": "user", "content": "go"}]
        found = read_markers(Api.CHAT, {"model": "m", "messages": turns})
        assert found is not None
        return found

    table = Boundaries()
    assert asyncio.run(table.find(marked(0), render, "careless")) == []
    assert asyncio.run(table.find(marked("hello"), render, "other")) == [MarkedPlace(len("<rules<"), 300)]


def test_what_the_markers_of_a_request_share_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole body was, for each marker."""
    written: list[Any] = []

    def to_json(value: Any) -> bytes:
        written.append(value)
        return asgi.to_json(value)

    monkeypatch.setattr(boundaries, "to_json", to_json)
    parts = [{"type": "text", "text": f"{n}", "cache_control": {"type": "ephemeral"}} for n in range(2)]
    turns = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}]
    marked = read_markers(Api.MESSAGES, {"model": "m", "messages": [*turns, {"role": "user", "content": parts}]})
    assert marked is not None
    keys = boundaries._digests(marked)
    assert [written.count(text) for text in ("first", "second", {"type": "text", "text": "0"})] == [1, 1, 1]
    assert len(set(keys)) == 2


def test_a_vllm_that_cannot_render_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(api: Api, body: Any) -> list[int] | None:
        raise RenderError("it is off")

    table = Boundaries()
    for _ in range(3):
        assert asyncio.run(table.find(request("a"), fails)) == []
    assert [record.getMessage() for record in caplog.records] == ["cache markers have no effect: it is off (said once)"]
    assert len(asyncio.run(table.find(request("a"), Renderer()))) == 1


def test_what_fails_ends_the_other_rendering() -> None:
    """It went on, when its slot was another request's."""

    async def run() -> tuple[bool, bool]:
        has_begun = has_ended = False

        async def render(api: Api, body: Json) -> list[int] | None:
            nonlocal has_begun, has_ended
            if body["text"].endswith("y"):
                raise RenderError("vLLM is away")
            has_begun = True
            try:
                await asyncio.Event().wait()
            finally:
                has_ended = True
            return None

        assert await Boundaries().find(request("a"), render) == []
        return has_begun, has_ended

    assert asyncio.run(run()) == (True, True)


def test_a_vllm_that_does_not_answer_in_time_holds_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "TIMEOUT_S", 0.01)

    async def hangs() -> Any:
        renderer = Renderer()
        renderer.gate = asyncio.Event()
        return await Boundaries().find(request("a"), renderer)

    assert asyncio.run(hangs()) == []


def test_slow_prompts_of_an_owner_delay_no_other() -> None:
    """They took all slots, and everyone else waited for ten seconds and went on without a pin."""

    async def run() -> None:
        table, hanging = Boundaries(), Renderer()
        hanging.gate = asyncio.Event()
        slow = [asyncio.create_task(table.find(request(f"a{n}"), hanging, "hostile")) for n in range(20)]
        await asyncio.sleep(0)
        assert len(await table.find(request("b"), Renderer(), "other")) == 1
        assert hanging.num_running == 2 * MAX_PER_OWNER
        done, waiting = await asyncio.wait(slow, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert all(task.result() == [] for task in done)
        hanging.gate.set()
        await asyncio.gather(*waiting)
        assert not table._slots_of

    asyncio.run(run())


def test_no_one_waits_long_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "WAIT_S", 0.01)

    async def run() -> None:
        table, hanging = Boundaries(), Renderer()
        hanging.gate = asyncio.Event()
        slow = [asyncio.create_task(table.find(request(f"a{n}"), hanging, f"{n}")) for n in range(MAX_CONCURRENT)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(table.find(request("b"), Renderer(), "other"), 5) == []
        hanging.gate.set()
        assert all(len(found) == 1 for found in await asyncio.gather(*slow))
        assert len(await table.find(request("b"), Renderer(), "other")) == 1

    asyncio.run(run())
