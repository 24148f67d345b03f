"""Events as server-sent events: bounded, one watch for all streams of a caller, nothing left when clients leave."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtier.library.values.proof_values import Event
from kvtier.web.event_hub import EventStream
from kvtier.web.transport.http_bounds import HttpBounds
from tests.fakes.fake_cache_service import FakeCacheService
from tests.fakes.threads import without_new_threads
from tests.fakes.waiting import wait_for
from tests.unit.cli.fake_vllm import FakeVllm
from tests.unit.web.http_rig import gatekeeper_in, headers_of_viewer, served_door

QUICK = HttpBounds(max_event_streams=3, keep_alive_s=0.1, sweep_s=0.05)


@pytest.fixture
def url(daemon: FakeCacheService, vllm: FakeVllm, tmp_path: Path) -> Iterator[str]:
    with served_door(socket=tmp_path / "s", vllm_url=vllm.url, bounds=QUICK) as server:
        yield f"{server.url}/api/v1"
    wait_for(lambda: not num_watches())


def num_watches() -> int:
    return sum(thread.name == "kvtier-http-events" for thread in threading.enumerate())


@contextmanager
def streaming(url: str, **params: Any) -> Iterator[Callable[[], str]]:
    """Open a stream; what is yielded returns its next line that is not empty."""
    with httpx.stream("GET", f"{url}/events", params=params, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines) == "retry: 2000"
        yield lambda: next(line for line in lines if line)


def event_of(following: Callable[[], str]) -> dict[str, Any]:
    while (line := following()).startswith(":"):
        pass
    assert line.startswith("data: ")
    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return found


def test_events_come_as_they_happen_with_comments_between(url: str, daemon: FakeCacheService) -> None:
    with streaming(url) as following, streaming(url, name="pin_renamed") as other:
        assert num_watches() == 1
        httpx.put(f"{url}/prompts/bot", json={"tokens": [1] * 40, "warm": False}, timeout=30)
        event = event_of(following)
        assert (event["name"], event["fields"]["name"]) == ("pin_registered", "bot")
        assert list(event) == ["name", "unix_s", "level", "fields"]
        assert following() == ":"
        daemon.events.append(type(daemon.events[0])(name="pin_renamed"))
        assert event_of(other)["name"] == "pin_renamed"
    wait_for(lambda: not num_watches())


def test_a_system_without_threads_refuses_a_stream_as_it_does_a_call(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was a defect, 500, with a traceback for each try of each console."""
    with without_new_threads(monkeypatch, named="kvtier-http-events"):
        refused = httpx.get(f"{url}/events")
    assert (refused.status_code, refused.json()["title"]) == (429, "TooManyStreamsError")
    assert "no more threads; try again, or raise" in refused.json()["detail"]
    assert caplog.text == ""
    with streaming(url), streaming(url), streaming(url):
        assert num_watches() == 1


def test_one_stream_too_many_is_refused_and_a_place_is_free_again(url: str) -> None:
    with streaming(url), streaming(url), streaming(url):
        refused = httpx.get(f"{url}/events")
        assert (refused.status_code, refused.json()["title"]) == (429, "TooManyStreamsError")
        assert refused.headers["retry-after"] == "1"

    def is_free() -> bool:
        with httpx.stream("GET", f"{url}/events") as answer:
            return answer.status_code == 200

    wait_for(is_free)


def test_a_caller_has_a_share_of_the_streams(daemon: FakeCacheService, tmp_path: Path) -> None:
    gatekeeper = gatekeeper_in(tmp_path, needs_credentials=True)
    greedy, other = (headers_of_viewer(gatekeeper, name) for name in ("greedy", "other"))
    bounds = replace(QUICK, max_event_streams=8)
    with (
        served_door(socket=tmp_path / "s", gatekeeper=gatekeeper, bounds=bounds) as server,
        httpx.Client(base_url=f"{server.url}/api/v1", timeout=30) as client,
        client.stream("GET", "/events", headers=greedy),
        client.stream("GET", "/events", headers=greedy),
    ):
        refused = client.get("/events", headers=greedy)
        assert (refused.status_code, refused.json()["title"]) == (429, "TooManyStreamsError")
        assert "for this caller" in refused.json()["detail"]
        with client.stream("GET", "/events", headers=other) as answer:
            assert answer.status_code == 200


def test_without_a_daemon_it_is_a_problem() -> None:
    with served_door(bounds=QUICK) as server:
        answer = httpx.get(f"{server.url}/api/v1/events")
        assert (answer.status_code, answer.json()["title"]) == (503, "DaemonUnreachableError")
    wait_for(lambda: not num_watches())


def test_streams_end_with_the_server(daemon: FakeCacheService, tmp_path: Path) -> None:
    with httpx.Client() as client:
        with served_door(socket=tmp_path / "s", bounds=QUICK) as server:
            answer = client.send(client.build_request("GET", f"{server.url}/api/v1/events"), stream=True)
            assert answer.status_code == 200
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 10
        wait_for(lambda: not num_watches())
        answer.close()


def test_comments_come_while_events_come_that_are_not_wanted(daemon: FakeCacheService, tmp_path: Path) -> None:
    """A stream of one name was silent then: proxies ended it, and a client that was gone kept its place."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(0.02):
            daemon.events.append(type(daemon.events[0])(name="pin_registered"))

    bounds = replace(QUICK, keep_alive_s=0.7)
    with served_door(socket=tmp_path / "s", bounds=bounds) as server:
        httpx.put(f"{server.url}/api/v1/prompts/bot", json={"tokens": [1] * 40, "warm": False}, timeout=30)
        working = threading.Thread(target=work)
        working.start()
        try:
            with streaming(f"{server.url}/api/v1", name="pin_renamed") as other:
                assert [other(), other()] == [":", ":"]
        finally:
            is_over.set()
            working.join()


def test_events_that_are_not_wanted_take_no_place_of_those_that_are() -> None:
    async def scenario() -> list[str]:
        stream = EventStream(max_waiting=2, names=("a",))
        for name in "abbbbab":
            stream.add(Event(name=name, unix_s=0, level="info", fields={}))
        stream.end()
        return [each.name async for each in stream.events(1) if each is not None]

    assert asyncio.run(scenario()) == ["a", "a"]


def test_a_slow_reader_loses_the_oldest_events_and_learns_how_many() -> None:
    async def scenario() -> list[Event | None]:
        stream = EventStream(max_waiting=3)
        for number in range(10):
            stream.add(Event(name=str(number), unix_s=0, level="info", fields={}))
        stream.end()
        return [each async for each in stream.events(1)]

    found = [each for each in asyncio.run(scenario()) if each is not None]
    assert [each.name for each in found] == ["dropped", "7", "8", "9"]
    assert found[0].fields == {"events": "7"}
