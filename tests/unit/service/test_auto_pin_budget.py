"""One budget of automatic pins for all namespaces, within what other pins leave of the disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.discovery import auto_pins
from tests.fakes.operator import pin, unpin, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, running, wait_durable
from tests.unit.service.test_auto_pins import (
    SYSTEM_TOKENS,
    ask,
    attached,
    auto_config,
    counts_are_loaded,
    digest_of,
    found,
    names,
    send_tokens,
    tokens_of,
)

PROMPT_BYTES = 6000 * SYSTEM_TOKENS // 16


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_pins, "SLOW_POLL_S", 0.02)


def test_a_better_prompt_of_another_model_displaces_one_that_is_used_less(tmp_path: Path) -> None:
    """The model that came first kept all of the budget: the others got nothing until its pins had ended."""

    async def scenario() -> None:
        config = auto_config(tmp_path, auto_pin_max_bytes=PROMPT_BYTES)
        async with attached(config) as (stub, engine):
            first = await found(engine, "first", 4)
            async with ScriptedEngine(config, model_names=["other"], fingerprint={"weights": "2"}) as other:
                await until(lambda: counts_are_loaded(stub, 2))
                await ask(other, "second", 40)
                await send_tokens(other, "second")
                await other.receive("pin_added")
                assert first.name not in await names(stub)
                assert len(await names(stub)) == 1

    asyncio.run(scenario())


def test_what_a_pin_with_a_name_keeps_takes_nothing_of_the_budget(tmp_path: Path) -> None:
    """It was chosen for good, and no tokens came that would pin it: its share of the budget stayed empty."""

    async def scenario() -> None:
        async with attached(auto_config(tmp_path, auto_pin_max_bytes=PROMPT_BYTES)) as (stub, engine):
            await stub.Pin(cache_pb2.PinRequest(name="policy", tokens=tokens_of("support", 200)))
            await ask(engine, "support", 40)
            await send_tokens(engine, "support")
            other = await found(engine, "other", 4)
            assert await names(stub) == {"policy", other.name}
            (advised,) = (await stub.GetAdvice(cache_pb2.GetAdviceRequest())).namespaces
            assert advised.chosen_bytes <= PROMPT_BYTES

    asyncio.run(scenario())


def test_tokens_that_came_while_another_model_had_the_budget_are_wanted_again(tmp_path: Path) -> None:
    """The engine had sent them, and was not asked again: the prompt was worth a pin for good, and never got one."""

    async def scenario() -> None:
        config = auto_config(tmp_path, auto_pin_max_bytes=PROMPT_BYTES)
        other: dict[str, Any] = {"model_names": ["other"], "fingerprint": {"weights": "2"}}
        async with attached(config) as (stub, engine), ScriptedEngine(config, **other) as second:
            await until(lambda: counts_are_loaded(stub, 2))
            await ask(engine, "first", 4)
            await engine.receive("prefixes_wanted")
            await ask(second, "second", 40)
            await second.receive("prefixes_wanted")
            tokens = pb.PrefixTokens(digest=digest_of("first", SYSTEM_TOKENS), tokens=tokens_of("first"))
            await engine.send(prefix_tokens=tokens)
            await engine.all_done()
            assert not await names(stub)
            await stub.Pin(cache_pb2.PinRequest(name="policy", tokens=tokens_of("second", 200), model="other"))
            tokens = pb.PrefixTokens(digest=digest_of("second", SYSTEM_TOKENS), tokens=tokens_of("second"))
            await second.send(prefix_tokens=tokens)
            await ask(second, "second", 1, first=50)
            await second.all_done()
            await asyncio.sleep(0.1)
            await found(engine, "first", 1)

    asyncio.run(scenario())


def test_what_an_operator_has_unpinned_leaves_its_budget_to_others(tmp_path: Path) -> None:
    """It was chosen for good and not pinned, so that unpinning an automatic pin made space for no other one."""

    async def scenario() -> None:
        async with attached(auto_config(tmp_path, auto_pin_max_bytes=PROMPT_BYTES)) as (stub, engine):
            first = await found(engine, "first", 40)
            await unpin(stub, first.name)
            await ask(engine, "first", 1, first=50)
            await send_tokens(engine, "first")
            second = await found(engine, "second", 4)
            assert await names(stub) == {first.name, second.name}
            (advised,) = (await stub.GetAdvice(cache_pb2.GetAdviceRequest())).namespaces
            assert cache_pb2.AdvisedPrefix.CHOSEN in [each.verdict for each in advised.prefixes]

    asyncio.run(scenario())


def test_a_start_ends_no_pin_that_fits(tmp_path: Path) -> None:
    """The namespace that chose first took the whole budget, and the pins of the next one ended."""

    async def scenario() -> None:
        config = auto_config(tmp_path, auto_pin_max_bytes=2 * PROMPT_BYTES)
        other: dict[str, Any] = {"model_names": ["other"], "fingerprint": {"weights": "2"}}
        async with attached(config) as (stub, first), ScriptedEngine(config, **other) as second:
            await until(lambda: counts_are_loaded(stub, 2))
            for engine, system in ((first, "first"), (second, "second")):
                bound = await found(engine, system, 4)
                await engine.bind(bound.pin_id, [chunk_key((system, n)) for n in range(SYSTEM_TOKENS // 16)])
            kept = await names(stub)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await until(lambda: counts_are_loaded(stub, 2))
            await ask(engine, "new", 40)
            await engine.receive("prefixes_wanted")
            await asyncio.sleep(0.2)
            assert await names(stub) == kept, "nothing has come that takes their bytes"

    asyncio.run(scenario())


def test_a_pin_counts_in_each_namespace_of_its_model(tmp_path: Path) -> None:
    """Engines of one model with different parallel shapes each store it: that was up to twice the budget."""

    async def scenario() -> None:
        config = auto_config(tmp_path, auto_pin_max_bytes=PROMPT_BYTES * 3 // 2)
        async with attached(config) as (stub, engine):
            async with ScriptedEngine(config, fingerprint={"weights": "1", "ranks": "2"}):
                await ask(engine, "support", 4)
                await send_tokens(engine, "support")
                await engine.barrier()
                assert not await names(stub)
            await found(engine, "other")
            assert len(await names(stub)) == 1

    asyncio.run(scenario())


def test_automatic_pins_end_when_a_pin_with_a_name_has_no_place_on_disk(tmp_path: Path) -> None:
    """A pin that was made before its engine came was over quota for good, beside automatic pins of another model."""

    async def scenario() -> None:
        config = auto_config(tmp_path, disk_bytes=70_000, auto_pin_max_bytes=35_000)
        async with attached(config) as (stub, engine):
            await pin(stub, "policy", tokens=160, model="other")
            bound = await found(engine, "support")
            keys = [chunk_key(("support", n)) for n in range(SYSTEM_TOKENS // 16)]
            await engine.bind(bound.pin_id, keys)
            await engine.store(keys)
            await wait_durable(stub, bound.name)
            async with ScriptedEngine(config, model_names=["other"], fingerprint={"weights": "2"}) as other:
                (policy,) = other.welcome.pins
                keys = [chunk_key(("policy", n)) for n in range(10)]
                await other.bind(policy.pin_id, keys)
                await other.store(keys)
                await wait_durable(stub, "policy")
                assert await names(stub) == {"policy"}

    asyncio.run(scenario())
