"""Prompts that are applied together, renamed, owned; TTLs that slide; and pins whose engines have another namespace."""

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier.config.model import OwnerQuota, OwnersConfig
from kvtier.errors import LedgerError
from kvtier.ledger.promise_copies import prompt_id
from kvtier.ledger.promises import Promises
from kvtier.prompts import replacements
from kvtier.prompts.book import RequestedPin
from tests.fakes.gates import failing
from tests.fakes.operator import Stub, apply, pin, prompt_of, unpin, until, update
from tests.fakes.rig import rig
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(number) for number in range(5)]
OTHERS = [chunk_key(number) for number in range(10, 15)]
State = cache_pb2.PromptStatus
Pin = cache_pb2.PinRequest


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacements, "ATTACH_S", 0.0)


async def names(stub: Stub) -> list[str]:
    listed = (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts
    return sorted(each.name for each in listed)


async def durable_pin(stub: Stub, engine: ScriptedEngine, **how: object) -> str:
    pin_id = await pin(stub, **how)  # type: ignore[arg-type]
    await engine.bind(pin_id, KEYS)
    await engine.store(KEYS)
    await wait_durable(stub, "p")
    return pin_id


def test_a_sliding_end_moves_with_use_and_survives_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            view = await r.cache.pins.pin(RequestedPin(name="p", tokens=range(40), ttl_s=600, sliding=True))
            await r.cache.pins.pin(RequestedPin(name="fixed", tokens=range(50), ttl_s=600))
            began_s, pin_id = view.prompt.expires_unix_s, view.prompt.pin_id
            r.cache.expiry.used(pin_id, began_s - 600 + 30)
            await r.cache.expiry.look()
            assert r.cache.prompts.get("p").expires_unix_s == began_s, "within a tenth of the TTL nothing is written"
            for each in r.cache.prompts:
                r.cache.expiry.used(each.pin_id, began_s - 600 + 100)
            await r.cache.expiry.look()
            assert r.cache.prompts.get("p").expires_unix_s == pytest.approx(began_s + 100)
            assert r.cache.prompts.get("fixed").expires_unix_s < began_s + 1
            rows = {row.name: row.expires_unix_s for row in r.resources.ledger.load().prompts}
            assert rows["p"] == pytest.approx(began_s + 100)

    asyncio.run(scenario())


def test_a_sliding_pin_ends_when_it_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.prompts.expiry.SLOW_POLL_S", 0.02)

    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            await pin(stub, ttl_s=1, sliding=True, owner="team", labels=cache_pb2.Labels(values={"a": "b"}))

            async def ended() -> bool:
                return not (await prompt_of(stub)).pinned

            await until(ended)
            prompt = await prompt_of(stub)
            assert (prompt.ttl_s, prompt.sliding, prompt.expires_unix_s) == (0, False, 0)
            assert (prompt.owner, dict(prompt.labels)) == ("team", {"a": "b"}), "it is still selected by them"

    asyncio.run(scenario())


def test_what_is_applied_is_there_after_a_restart_and_nothing_of_what_the_ledger_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            await pin(stub, "old")
            with monkeypatch.context() as patch:
                failing(patch, Promises, "change_prompts", lambda: LedgerError("disk full"), times=1)
                with pytest.raises(grpc.aio.AioRpcError):
                    await apply(stub, Pin(name="a", recipe_json="{}"), unpin=["old"])
            assert await names(stub) == ["old"]
            assert (await prompt_of(stub, "old")).pinned
            await apply(stub, *(Pin(name=f"p{i}", recipe_json=f"[{i}]", owner="o") for i in range(50)), unpin=["old"])
        async with running(config) as stub:
            assert len(await names(stub)) == 51
            assert (await prompt_of(stub, "p7")).owner == "o"
            assert not (await prompt_of(stub, "old")).pinned

    asyncio.run(scenario())


def test_a_durable_pin_stays_until_a_source_that_replaces_it_is_rendered(tmp_path: Path) -> None:
    """Without vLLM there are no tokens yet; the version waits for them."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            first = await durable_pin(stub, engine, recipe_json="[1]")
            (made,) = (await apply(stub, Pin(name="p", recipe_json="[2]", priority=7))).pins
            assert made.made == "p@2"
            assert (await prompt_of(stub, "p@2")).state == State.UNRENDERED
            standing = await prompt_of(stub)
            assert (standing.pin_id, standing.replacement, standing.state) == (first, "p@2", State.DURABLE)
            # An engine renders it.
            second = await pin(stub, first=100, recipe_json="[2]", replace=True)
            staged = await prompt_of(stub, "p@2")
            assert (staged.pin_id, staged.num_tokens, staged.priority) == (second, 80, 7)
            # The same source again changes no token.
            await apply(stub, Pin(name="p", recipe_json="[2]", priority=8))
            staged = await prompt_of(stub, "p@2")
            assert (staged.pin_id, staged.num_tokens, staged.priority) == (second, 80, 8)
            await engine.bind(second, OTHERS)
            await engine.store(OTHERS)

            async def is_replaced() -> bool:
                return (await prompt_of(stub)).pin_id == second

            await until(is_replaced)
            assert (await prompt_of(stub)).priority == 8

    asyncio.run(scenario())


def test_versions_and_a_replacement_are_renamed_with_their_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            second = await pin(stub, first=100, replace=True)
            await stub.RenamePrompt(cache_pb2.RenamePromptRequest(name="p", new_name="q"))
            assert await names(stub) == ["q", "q@2"]
            assert (await prompt_of(stub, "q")).replacement == "q@2"
            await engine.bind(second, OTHERS)
            await engine.store(OTHERS)

            async def is_replaced() -> bool:
                return await names(stub) == ["q", "q@1"]

            await until(is_replaced)
            await pin(stub, "r@x")
            for new_name in ("r@3", "auto-1", "", "two words"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.RenamePrompt(cache_pb2.RenamePromptRequest(name="q", new_name=new_name))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with running(config) as stub:
            assert await names(stub) == ["q", "q@1", "r@x"]
            assert (await prompt_of(stub, "q")).pin_id == second

    asyncio.run(scenario())


def test_an_owner_has_at_most_its_quota(tmp_path: Path) -> None:
    async def scenario() -> None:
        quotas = {"small": OwnerQuota(pins=2, tokens=100)}
        config = replace(config_in(tmp_path), owners=OwnersConfig(default=OwnerQuota(pins=3), named=quotas))
        async with running(config) as stub:
            await pin(stub, "a", tokens=40, owner="small")
            await pin(stub, "b", tokens=40, owner="small")
            for name, tokens, what in (("c", 10, "has 2 of 2 pins, and this adds 1"), ("a", 70, "80 of 100 tokens")):
                with pytest.raises(grpc.aio.AioRpcError, match=what) as caught:
                    await pin(stub, name, tokens=tokens, owner="small", replace=True)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await pin(stub, "a", tokens=50, owner="small", replace=True)
            with pytest.raises(grpc.aio.AioRpcError, match="0 of 3 pins, and this adds 4"):
                await apply(stub, *(Pin(name=f"p{i}", recipe_json="{}", owner="other") for i in range(4)))
            await apply(stub, *(Pin(name=f"p{i}", recipe_json="{}", owner="other") for i in range(3)))
            with pytest.raises(grpc.aio.AioRpcError, match="has 2 of 2 pins"):
                await update(stub, "p0", owner="small")
            # What ends makes place for what comes with it.
            await apply(stub, Pin(name="new", recipe_json="{}", owner="small"), unpin=["b"])
            await pin(stub, "free", tokens=1000)
            await unpin(stub, "p1")
            await pin(stub, "p4", owner="other")

    asyncio.run(scenario())


def test_a_pin_is_stale_for_an_engine_of_another_namespace_until_that_has_computed_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            async with ScriptedEngine(config) as engine:
                pin_id = await durable_pin(stub, engine)
            async with ScriptedEngine(config, fingerprint={"weights": "2"}, engine_id="new") as engine:
                await engine.bind(pin_id, KEYS)

                async def state() -> int:
                    return int((await prompt_of(stub)).state)

                async def is_stale() -> bool:
                    return await state() == State.STALE

                await until(is_stale)
                await engine.store(KEYS[:2])

                async def is_refreshing() -> bool:
                    return await state() == State.REFRESHING

                await until(is_refreshing)
                await engine.store(KEYS[2:])
                await wait_durable(stub, "p")

    asyncio.run(scenario())


def test_what_was_to_replace_a_pin_that_the_ledger_lost_takes_its_name(tmp_path: Path) -> None:
    """It is what is left of the promise; before, it was forgotten."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            second = await pin(stub, first=100, replace=True)
        with closing(sqlite3.connect(config.disk.disk_dir / "ledger.sqlite")) as ledger:
            ledger.execute("DELETE FROM prompts WHERE name = 'p'")
            ledger.commit()
        (copy,) = (config.disk.disk_dir / "promises").glob(f"{prompt_id('p')}-*.json")
        copy.unlink()
        async with running(config) as stub:

            async def is_promoted() -> bool:
                return await names(stub) == ["p"]

            await until(is_promoted)
            prompt = await prompt_of(stub)
            assert (prompt.pin_id, prompt.pinned, prompt.origin) == (second, True, "named")

    asyncio.run(scenario())
