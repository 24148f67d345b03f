"""Automatic pins when engines come and go, files are damaged and the disk hangs."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import GroupLayout
from kvtier.discovery import auto_pins
from kvtier.discovery.auto_pins import AutoPins
from kvtier.discovery.choices import Selection
from kvtier.discovery.namespace_traffic import NamespaceTraffic
from kvtier.discovery.saved_traffic import SavedTraffic
from tests.fakes.gates import failing
from tests.fakes.operator import Stub, pin, prompt_of, reached, status_of, unpin, until
from tests.fakes.scripted_engine import ONE_GROUP, ScriptedEngine, chunk_key, running
from tests.unit.service.test_auto_pins import (
    SYSTEM_TOKENS,
    ask,
    attached,
    auto_config,
    counts_are_loaded,
    digest_of,
    found,
    names,
    request,
    send_tokens,
    stored,
    tokens_of,
)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_pins, "SLOW_POLL_S", 0.02)


def test_an_engine_that_comes_later_is_asked_for_what_others_did_not_send(tmp_path: Path) -> None:
    """The list was sent when it changed, to the engines of that moment: a vLLM that started again never got it."""

    async def scenario() -> None:
        config = auto_config(tmp_path)
        async with attached(config) as (stub, first):
            await ask(first, "support", 4)
            await first.receive("prefixes_wanted")
            async with ScriptedEngine(config) as second:
                wanted = (await second.receive("prefixes_wanted")).prefixes_wanted.digests
                assert list(wanted) == [digest_of("support", SYSTEM_TOKENS)]
            async with ScriptedEngine(config) as third:
                await send_tokens(third, "support")
                await third.receive("pin_added")
                assert len(await names(stub)) == 1

    asyncio.run(scenario())


def test_one_failure_does_not_end_the_choosing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception ended the task for good: nothing was pinned, and nothing was saved, until the next start."""
    select, failures = AutoPins.select, list[Exception]()

    async def failing(self: AutoPins, *given: Any) -> Selection:
        if failures:
            raise failures.pop()
        return await select(self, *given)

    async def scenario() -> None:
        monkeypatch.setattr(AutoPins, "select", failing)
        async with attached(auto_config(tmp_path)) as (_, engine):
            failures.append(KeyError("a mistake"))
            await ask(engine, "support", 4)
            while failures:  # noqa: ASYNC110 - another task empties it
                await asyncio.sleep(0.02)
            await ask(engine, "support", 4, first=10)
            await engine.receive("prefixes_wanted")

    asyncio.run(scenario())


def test_counts_that_cannot_be_read_hold_up_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first report waited for the one background thread: behind it, acquires of the engine had no answer."""
    load, disk_answers = SavedTraffic.load, threading.Event()

    def hanging(self: SavedTraffic, namespace_id: str) -> NamespaceTraffic:
        disk_answers.wait()
        return load(self, namespace_id)

    async def scenario() -> None:
        monkeypatch.setattr(SavedTraffic, "load", hanging)
        config = auto_config(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            try:
                await ask(engine, "support", 4)
                await engine.send(changing_middle=pb.ChangingMiddle(num_stable_tokens=1, num_tokens=2, num_prompts=9))
                await engine.send(prefix_tokens=pb.PrefixTokens(digest=digest_of("support", SYSTEM_TOKENS)))
                await engine.barrier()
                assert (await status_of(stub)).counters["requests_skipped"] == 4
            finally:
                disk_answers.set()
            await until(lambda: counts_are_loaded(stub))
            await ask(engine, "support", 4)
            await engine.receive("prefixes_wanted")

    asyncio.run(scenario())


def test_another_ttl_counts_for_the_pins_there_are(tmp_path: Path) -> None:
    """A pin with an end kept it after "never", and one without an end never got one; `observe` moved no end at all."""

    async def scenario() -> None:
        config = auto_config(tmp_path)
        async with attached(config) as (_, engine):
            name = (await found(engine, "support")).name
        for mode, ttl, ends_in_s in (("pin", "never", 0), ("observe", "1h", 3600), ("observe", "30d", 30 * 86400)):
            config = auto_config(tmp_path, auto_pin=mode, auto_pin_ttl=ttl)
            expires_unix_s = time.time() + ends_in_s if ends_in_s else 0
            async with running(config) as stub:
                await until(partial(_expires, stub, name, expires_unix_s))

    asyncio.run(scenario())


async def _expires(stub: Stub, name: str, at_unix_s: float) -> bool:
    return bool(abs((await prompt_of(stub, name)).expires_unix_s - at_unix_s) < 60)


def test_an_automatic_pin_that_an_operator_unpins_stays_unpinned(tmp_path: Path) -> None:
    """The second request after `kvtier unpin auto-...` pinned it again."""

    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (stub, engine):
            name = (await found(engine, "support")).name
            await unpin(stub, name)
            await ask(engine, "support", 4, first=10)
            await send_tokens(engine, "support")
            await engine.all_done()
            assert not (await prompt_of(stub, name)).pinned

    asyncio.run(scenario())


def test_a_pin_ends_for_a_longer_one_only_when_that_is_bound(tmp_path: Path) -> None:
    """It ended within seconds of the longer pin's row, also when the engine could not bind that one."""

    def both(question: int) -> pb.SeenRequest:
        prefixes = [
            pb.SeenPrefix(digest=digest_of("support", each), num_tokens=each, is_system_prompt=False)
            for each in (SYSTEM_TOKENS, 2 * SYSTEM_TOKENS)
        ]
        return pb.SeenRequest(prefixes=prefixes, prompt_digest=question, num_tokens=200)

    async def scenario() -> None:
        async with attached(auto_config(tmp_path)) as (stub, engine):
            first = [request("support", question) for question in range(3)]
            for each in first:
                each.prefixes[0].is_system_prompt = False
            await engine.send(requests_seen=pb.RequestsSeen(requests=first))
            await send_tokens(engine, "support")
            shorter = (await engine.receive("pin_added")).pin_added.pin
            keys = [chunk_key(("support", n)) for n in range(8)]
            await engine.bind(shorter.pin_id, keys[:4])
            await engine.send(requests_seen=pb.RequestsSeen(requests=map(both, range(400, 420))))
            digest = digest_of("support", 2 * SYSTEM_TOKENS)
            while digest not in (await engine.receive("prefixes_wanted")).prefixes_wanted.digests:
                pass
            tokens = tokens_of("support", 2 * SYSTEM_TOKENS)
            await engine.send(prefix_tokens=pb.PrefixTokens(digest=digest, tokens=tokens))
            longer = (await engine.receive("pin_added")).pin_added.pin
            await ask_for_a_while(engine, both)
            assert await names(stub) == {shorter.name, longer.name}
            await engine.bind(longer.pin_id, keys)

            async def is_alone() -> bool:
                await ask_for_a_while(engine, both)
                return await names(stub) == {longer.name}

            await until(is_alone)

    asyncio.run(scenario())


async def ask_for_a_while(engine: ScriptedEngine, seen: Callable[[int], pb.SeenRequest]) -> None:
    for number in range(10):
        requests = [seen(1000 + 20 * number + each) for each in range(20)]
        await engine.send(requests_seen=pb.RequestsSeen(requests=requests))
        await asyncio.sleep(0.03)


WINDOWED = replace(
    ONE_GROUP,
    groups=(
        GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=6000),
        GroupLayout(group_idx=1, chunk_tokens=16, useful_bytes=6000, window_chunks=2),
    ),
)


def test_where_layers_have_windows_a_pin_has_the_next_token(tmp_path: Path) -> None:
    """Only exactly the prefix was taken, and a pin of exactly whole chunks does not reach its last one there."""

    async def scenario() -> None:
        config = auto_config(tmp_path)
        async with running(config) as stub, ScriptedEngine(config, WINDOWED) as engine:
            await until(lambda: counts_are_loaded(stub))
            await ask(engine, "support", 4)
            await engine.receive("prefixes_wanted")
            tokens = tokens_of("support", SYSTEM_TOKENS + 1)
            digest = digest_of("support", SYSTEM_TOKENS)
            await engine.send(prefix_tokens=pb.PrefixTokens(digest=digest, tokens=tokens))
            assert list((await engine.receive("pin_added")).pin_added.pin.tokens) == tokens

    asyncio.run(scenario())


@pytest.mark.parametrize(("num_tokens", "is_covered"), [(64, False), (65, True), (80, True), (81, False), (200, False)])
def test_where_layers_have_windows_a_longer_pin_keeps_no_shorter_prefix(
    tmp_path: Path, num_tokens: int, is_covered: bool
) -> None:
    """A request hits only where a pin ends there: beside an operator's longer pin a system prompt was never pinned."""

    async def scenario() -> None:
        config = auto_config(tmp_path)
        async with running(config) as stub, ScriptedEngine(config, WINDOWED) as engine:
            await until(lambda: counts_are_loaded(stub))
            await stub.Pin(cache_pb2.PinRequest(name="policy", tokens=tokens_of("support", num_tokens)))
            await ask(engine, "support", 4)
            await engine.receive("prefixes_wanted")
            digest = digest_of("support", SYSTEM_TOKENS)
            tokens = tokens_of("support", SYSTEM_TOKENS + 1)
            await engine.send(prefix_tokens=pb.PrefixTokens(digest=digest, tokens=tokens))
            await engine.all_done()
            assert len(await names(stub)) == (1 if is_covered else 2)

    asyncio.run(scenario())


def test_a_pin_with_a_name_comes_first_also_before_the_counts_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Automatic pins whose counts are not in memory, just after a start or of one namespace of many, did not end."""

    async def scenario() -> None:
        config = auto_config(tmp_path, disk_bytes=13 * 6000)
        async with attached(config) as (stub, engine):
            await stored(stub, engine, "old")
        gate = threading.Event()
        load = SavedTraffic.load

        def hanging(*args: Any) -> NamespaceTraffic:
            gate.wait(10)
            return load(*args)

        monkeypatch.setattr(SavedTraffic, "load", hanging)
        try:
            async with running(config) as stub, ScriptedEngine(config):
                await pin(stub, "long", tokens=16 * 13)
                assert await names(stub) == {"long"}
                gate.set()
                await until(lambda: counts_are_loaded(stub))
                assert await names(stub) == {"long"}
                assert (await status_of(stub)).counters["auto_pins_ended"] == 1
        finally:
            gate.set()

    asyncio.run(scenario())


def test_counts_that_could_not_be_written_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one refusal of the disk they counted as written: without another request a stop lost them."""
    monkeypatch.setattr(auto_pins, "SAVE_INTERVAL_S", 0.05)

    async def scenario() -> None:
        config = auto_config(tmp_path, auto_pin="observe")
        refused = threading.Event()

        def refusal() -> OSError:
            refused.set()
            return OSError("disk full")

        async with attached(config) as (_, engine):
            failing(monkeypatch, SavedTraffic, "write", refusal, times=1)
            await ask(engine, "support", 4)
            await reached(refused)
        async with attached(config) as (stub, _):
            (advice,) = (await stub.GetAdvice(cache_pb2.GetAdviceRequest())).namespaces
            assert [each.digest for each in advice.prefixes] == [digest_of("support", SYSTEM_TOKENS)]

    asyncio.run(scenario())
