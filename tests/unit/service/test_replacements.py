"""Replacements of durable pins: the old one serves until the new one is durable, whatever happens meanwhile."""

import asyncio
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.ledger import PromptRow
from kvtier.prompts import replacements
from kvtier.prompts.pins import Pins
from tests.fakes.operator import Stub, pin, prompt_of, unpin, until, update
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(number) for number in range(5)]
OTHERS = [chunk_key(number) for number in range(10, 15)]
State = cache_pb2.PromptStatus


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacements, "ATTACH_S", 0.0)


async def names(stub: Stub) -> list[str]:
    listed = (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts
    return sorted(each.name for each in listed)


async def durable_pin(stub: Stub, engine: ScriptedEngine) -> str:
    pin_id = await pin(stub)
    await engine.bind(pin_id, KEYS)
    await engine.store(KEYS)
    await wait_durable(stub, "p")
    return pin_id


async def replaced(stub: Stub, pin_id: str) -> None:
    async def is_replaced() -> bool:
        return (await prompt_of(stub)).pin_id == pin_id

    await until(is_replaced)


async def forgotten(stub: Stub, name: str) -> None:
    async def is_forgotten() -> bool:
        return name not in await names(stub)

    await until(is_forgotten)


def test_a_daemon_that_starts_again_finishes_what_was_begun(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            second = await pin(stub, first=100, replace=True)
            await engine.bind(second, OTHERS)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            assert (await prompt_of(stub)).replacement == "p@2"
            await engine.store(OTHERS)
            await replaced(stub, second)
            assert (await prompt_of(stub)).state == State.DURABLE
            assert await names(stub) == ["p", "p@1"]

    asyncio.run(scenario())


def test_one_that_no_engine_can_use_leaves_the_pin_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pin --replace` with a prompt below one chunk deleted the pin that was good."""
    monkeypatch.setattr(replacements, "_REFUSED_KEPT_S", 0.5)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            first = await durable_pin(stub, engine)
            second = await pin(stub, tokens=3, first=100, replace=True)
            await engine.send(bind_pin=pb.BindPin(pin_id=second, error="less than one chunk"))

            async def is_refused() -> bool:
                return (await prompt_of(stub, "p@2")).error == "less than one chunk"

            await until(is_refused)
            await forgotten(stub, "p@2")
            standing = await prompt_of(stub)
            assert (standing.pin_id, standing.pinned, standing.state) == (first, True, State.DURABLE)

    asyncio.run(scenario())


def test_another_replacement_takes_the_place_of_one_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            first = await durable_pin(stub, engine)
            second = await pin(stub, first=100, replace=True)
            assert await pin(stub, first=100, replace=True) == second, "the same again"
            third = await pin(stub, first=200, replace=True)
            assert await names(stub) == ["p", "p@2"]
            assert (await prompt_of(stub, "p@2")).pin_id == third
            assert await pin(stub) == first, "and what stands ends them all"
            assert await names(stub) == ["p"]

    asyncio.run(scenario())


def test_a_replacement_ends_with_its_pin(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            await pin(stub, first=100, replace=True)
            await unpin(stub)
            assert await names(stub) == ["p"]

    asyncio.run(scenario())


def test_what_is_set_meanwhile_holds_for_both(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            second = await pin(stub, first=100, replace=True)
            await update(stub, priority=9)
            await engine.bind(second, OTHERS)
            await engine.store(OTHERS)
            await replaced(stub, second)
            assert (await prompt_of(stub)).priority == 9
            assert (await prompt_of(stub, "p@1")).priority == 0

    asyncio.run(scenario())


def test_the_last_versions_are_kept_and_can_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            for number in range(1, replacements.KEPT_VERSIONS + 2):
                pin_id = await pin(stub, first=100 * number, replace=True)
                keys = [chunk_key(100 * number + each) for each in range(5)]
                await engine.bind(pin_id, keys)
                await engine.store(keys)
                await replaced(stub, pin_id)
            await forgotten(stub, "p@1")
            assert await names(stub) == ["p", "p@2", "p@3", "p@4"]
            status = await stub.Pin(cache_pb2.PinRequest(name="p", version=3, replace=True))
            assert status.name == "p@6"
            await engine.bind(status.pin_id, [chunk_key(200 + each) for each in range(5)])
            await replaced(stub, status.pin_id)
            assert (await stub.GetTokens(cache_pb2.GetTokensRequest(name="p"))).tokens[0] == 200
            with pytest.raises(grpc.aio.AioRpcError, match="no prompt named 'p@1'; there are p@"):
                await stub.Pin(cache_pb2.PinRequest(name="p", version=1, replace=True))

    asyncio.run(scenario())


def test_a_replacement_that_is_unpinned_was_never_a_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            await pin(stub, first=100, replace=True)
            status = await stub.Unpin(cache_pb2.UnpinRequest(name="p@2"))
            assert (status.name, status.pinned) == ("p@2", False)
            assert await names(stub) == ["p"]
            assert (await prompt_of(stub)).pinned

    asyncio.run(scenario())


def test_an_unpin_of_a_replacement_that_has_just_taken_over_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that the old one stays, and the new one served."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            pin_id = await pin(stub, first=100, replace=True)
            await engine.bind(pin_id, OTHERS)
            forget = Pins.forget

            async def late(self: Pins, prompt: PromptRow) -> bool:
                await engine.store(OTHERS)
                await replaced(stub, pin_id)
                return await forget(self, prompt)

            monkeypatch.setattr(Pins, "forget", late)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Unpin(cache_pb2.UnpinRequest(name="p@2"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert (await prompt_of(stub)).pin_id == pin_id

    asyncio.run(scenario())


def test_a_pin_does_not_end_before_what_is_to_replace_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            await update(stub, ttl_s=60)
            await pin(stub, first=100, replace=True, ttl_s=6000)
            ends = [(await prompt_of(stub, name)).expires_unix_s for name in ("p", "p@2")]
            assert ends[0] == ends[1]
            await pin(stub, first=200, replace=True, ttl_s=0)
            assert not (await prompt_of(stub)).expires_unix_s

    asyncio.run(scenario())


def test_pins_that_were_named_like_versions_before_there_were_any_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            with monkeypatch.context() as patch:
                patch.setattr("kvtier.core.limits.check_chosen_name", lambda *_: None)
                await pin(stub, "p@2", first=500)
            first = await pin(stub)
            await engine.bind(first, KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            second = await pin(stub, first=100, replace=True)
            assert await names(stub) == ["p", "p@2", "p@4"]
            await engine.bind(second, OTHERS)
            await engine.store(OTHERS)
            await replaced(stub, second)
            assert await names(stub) == ["p", "p@2", "p@3"]
            assert (await prompt_of(stub, "p@2")).pinned

    asyncio.run(scenario())


def test_names_of_versions_cannot_be_chosen(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="those of versions; choose another"):
                await pin(stub, "p@2")
            await pin(stub, "team@example.org/p@x")

    asyncio.run(scenario())
