"""Usage follows a pin through restarts and names; others are notified of a use at most once a second."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2, engine_pb2
from kvtier.core.limits import MAX_ENDED_REQUESTS
from kvtier.outcomes.outcome_book import OutcomeBook
from kvtier.outcomes.recent_requests import MAX_RECENT_REQUESTS, RecentRequests
from kvtier.outcomes.saved_usage import SavedUsage
from kvtier.prompts.book import RequestedPin
from tests.fakes.gates import failing
from tests.fakes.operator import pin, prompt_of, status_of
from tests.fakes.rig import rig
from tests.fakes.scripted_engine import ScriptedEngine, config_in, running
from tests.unit.outcomes.test_saved_usage import ended


def report(pin_id: str, outcome: str = "HIT", **fields: int) -> engine_pb2.RequestEnded:
    return engine_pb2.RequestEnded(
        request_id="r", outcome=outcome, pin_id=pin_id, prompt_tokens=60, shared_tokens=48, ended_unix_s=1e9, **fields
    )


def test_usage_survives_a_restart_and_metrics_count_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            pin_id = await pin(stub, "p", tokens=48)
            async with ScriptedEngine(config) as engine:
                messages = [report(pin_id, host_tokens=48), report("", "UNKNOWN"), report("gone")]
                await engine.send(requests_ended=engine_pb2.RequestsEnded(requests=messages, num_dropped=2))
                await engine.barrier()
            counters = (await status_of(stub)).counters
            assert (counters["requests_hit"], counters["requests_unknown"]) == (2, 1)
            assert counters["requests_unreported"] == 2
            assert (counters["prompt_tokens_host"], counters["prompt_tokens_computed"]) == (48, 132)
            before = (await prompt_of(stub)).usage
        async with running(config) as stub:
            assert (await prompt_of(stub)).usage == before
            assert before.num_hits == 1
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Explain(cache_pb2.ExplainRequest(request_id="r"))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "wrong",
    [
        [engine_pb2.RequestEnded(request_id="r")],
        [engine_pb2.RequestEnded(request_id="r" * 257, outcome="HIT")],
        [engine_pb2.RequestEnded(outcome="HIT")],
        [report("p" * 65)],
        [report("p")] * (MAX_ENDED_REQUESTS + 1),
    ],
)
def test_a_report_out_of_bounds_ends_the_session(tmp_path: Path, wrong: list[engine_pb2.RequestEnded]) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), ScriptedEngine(config) as engine:
            await engine.send(requests_ended=engine_pb2.RequestsEnded(requests=wrong))
            with pytest.raises((EOFError, grpc.aio.AioRpcError), match="requests_ended"):
                await engine.receive("pong")

    asyncio.run(scenario())


def test_a_use_is_announced_once_a_second_and_requests_are_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            prompt = (await r.cache.pins.pin(RequestedPin(name="p", tokens=range(48)))).prompt
            session, _ = await r.session()
            book: OutcomeBook = r.cache.outcomes
            uses: list[tuple[str, float]] = []
            book.on_use = lambda pin_id, used_unix_s: uses.append((pin_id, used_unix_s))
            times = [10.0, 10.5, 11.0, 10.7, 13.0]
            of_pin = (replace(ended(ended_unix_s=each), pin_id=prompt.pin_id) for each in times)
            await book.take(session, of_pin, 0)
            assert uses == [(prompt.pin_id, 10.0), (prompt.pin_id, 11.0), (prompt.pin_id, 13.0)]
            await book.take(session, (ended() for _ in range(MAX_RECENT_REQUESTS + 5)), 0)
            assert len(book.recent) == MAX_RECENT_REQUESTS

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("known_as", "engine_id"),
    [
        ("chatcmpl-1", "chatcmpl-1"),
        ("1", "chatcmpl-1"),
        ("cmpl-1", "cmpl-1-0"),
        ("1", "cmpl-1-0"),
        ("resp_1", "resp_1_0"),
        ("chatcmpl-1", "0_chatcmpl-1"),
        ("1", "0_chatcmpl-1"),
        ("cmpl-1", "0_cmpl-1-0"),
        ("1", "0_cmpl-1-0"),
    ],
)
def test_a_request_is_found_by_what_its_client_calls_it(known_as: str, engine_id: str) -> None:
    """Those of the Responses API, and those with `n` above 1, were not found."""
    recent = RecentRequests()
    recent.add(replace(ended(), request_id=engine_id))
    recent.add(replace(ended(), request_id=f"{engine_id}1"))
    assert recent.find(known_as).request_id == engine_id


def test_usage_that_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one refusal of the disk it counted as written: without another request a stop lost it."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            prompt = (await r.cache.pins.pin(RequestedPin(name="p", tokens=range(48)))).prompt
            session, _ = await r.session()
            await r.cache.outcomes.take(session, iter([replace(ended(), pin_id=prompt.pin_id)]), 0)
            failing(monkeypatch, SavedUsage, "write", lambda: OSError("disk full"), times=1)
            await r.cache.outcomes.save()
            await r.cache.outcomes.save()
            assert prompt.pin_id in SavedUsage(r.resources.config.disk.disk_dir).load()

    asyncio.run(scenario())
