"""Prompts that are applied together, renamed, owned; TTLs that slide; and pins whose engines have another namespace."""

import asyncio
import gc
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier.concurrency.turns import Breather
from kvtier.config.model import OwnerQuota, OwnersConfig
from kvtier.errors import LedgerError, PromptExistsError, QuotaExceededError
from kvtier.ledger.promise_copies import prompt_id
from kvtier.ledger.promises import Promises
from kvtier.prompts import expiry, replacements
from kvtier.prompts.beginnings import Beginnings
from kvtier.prompts.book import PinUpdate, RequestedPin
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


def test_a_sliding_end_moves_with_the_use_of_a_longer_pin(tmp_path: Path) -> None:
    """A system prompt ended although each request began with it: the pin of a conversation, or of the same chunks by a
    request, was what was used.
    """

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, _ = await r.session()
            how: dict[str, Any] = {"tokens": range(40), "ttl_s": 600, "sliding": True}
            others: dict[str, dict[str, Any]] = {
                "p": {},
                "public": {"public": True},
                "elsewhere": {"model": "other"},
                "salted": {"cache_salt": "other"},
                "differs": {"tokens": [*range(31), 7]},
                "fixed": {"sliding": False},
            }
            for name, changes in others.items():
                await r.cache.pins.pin(RequestedPin(name=name, **how | changes))
            await r.cache.pins.pin(RequestedPin(name="longer", tokens=range(36), model="model"))
            for name in ("p", "public", "elsewhere", "salted", "differs", "longer"):
                pin_id, keys = r.cache.prompts.get(name).pin_id, [chunk_key(0), chunk_key(name)]
                await r.cache.bindings.bind(session, pin_id, keys, 32, "")
            ends_s = {each.name: each.expires_unix_s for each in r.cache.prompts}
            r.cache.expiry.used(r.cache.prompts.get("longer").pin_id, ends_s["p"] - 600 + 100)
            await r.cache.expiry.look()
            moved = {each.name for each in r.cache.prompts if each.expires_unix_s != ends_s[each.name]}
            assert moved == {"p", "public"}

    asyncio.run(scenario())


def test_many_pins_whose_ends_slide_are_not_compared_with_each_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2,000 pins behind one system prompt 100 were used in a second: to compare each two took the loop 5 s."""
    num_pins, num_steps = 40, 0

    class Steps(Breather):
        async def pause(self) -> None:
            nonlocal num_steps
            num_steps += 1

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, _ = await r.session()
            for number in range(num_pins):
                tokens = [*range(16), number, 0]
                view = await r.cache.pins.pin(RequestedPin(name=f"p{number}", tokens=tokens, ttl_s=600, sliding=True))
                await r.cache.bindings.bind(session, view.prompt.pin_id, [chunk_key(number)], 16, "")
                r.cache.expiry.used(view.prompt.pin_id, view.prompt.expires_unix_s - 600 + 100)
            monkeypatch.setattr(expiry, "Breather", Steps)
            ends_s = {each.name: each.expires_unix_s for each in r.cache.prompts}
            await r.cache.expiry.look()
            assert all(each.expires_unix_s > ends_s[each.name] for each in r.cache.prompts)
            assert num_steps <= 4 * num_pins

    asyncio.run(scenario())


def test_what_a_look_at_used_pins_has_found_is_not_kept(tmp_path: Path) -> None:
    """Prompts that were forgotten since stayed in memory, tokens and all, until a pin whose end slides was used."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, _ = await r.session()
            view = await r.cache.pins.pin(RequestedPin(name="p", tokens=list(range(16)), ttl_s=600, sliding=True))
            await r.cache.bindings.bind(session, view.prompt.pin_id, [chunk_key(0)], 16, "")
            r.cache.expiry.used(view.prompt.pin_id, view.prompt.expires_unix_s - 600 + 100)
            await r.cache.expiry.look()
            assert r.cache.prompts.get("p").expires_unix_s > view.prompt.expires_unix_s
            assert not any(type(each) is Beginnings for each in gc.get_objects())

    asyncio.run(scenario())


def test_a_sliding_end_needs_a_ttl_and_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            await pin(stub)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await update(stub, sliding=True)
            assert "sliding = True: " in (caught.value.details() or "")
            assert "give it too: --ttl 12h (ttl_s)" in (caught.value.details() or "")

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
            assert (prompt.ttl_s, prompt.sliding, prompt.expires_unix_s > 0) == (0, False, True)
            assert (prompt.owner, dict(prompt.labels)) == ("team", {"a": "b"}), "it is still selected by them"
            await pin(stub)
            assert (await prompt_of(stub)).expires_unix_s == 0, "the end of before is none of the new pin"

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


def test_how_a_prompt_is_pinned_changes_beside_its_replacement_with_the_same_source(tmp_path: Path) -> None:
    """An engine has rendered the source to other tokens; a change of priority ended what it had made."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine, recipe_json="[1]")
            second = await pin(stub, first=100, recipe_json="[1]", replace=True)
            (made,) = (await apply(stub, Pin(name="p", recipe_json="[1]", priority=4))).pins
            assert (made.made, made.pin_id) == ("p@2", second)
            assert [(await prompt_of(stub, name)).priority for name in ("p", "p@2")] == [4, 4]
            assert (await prompt_of(stub, "p@2")).num_tokens == 80

    asyncio.run(scenario())


def test_a_source_without_tokens_never_takes_the_place_of_tokens(tmp_path: Path) -> None:
    """The pin was not durable yet, so it was replaced at once."""

    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            first = await pin(stub, recipe_json="[1]")
            (made,) = (await apply(stub, Pin(name="p", recipe_json="[2]"))).pins
            assert made.made == "p@2"
            standing = await prompt_of(stub)
            assert (standing.pin_id, standing.num_tokens, standing.replacement) == (first, 80, "p@2")

    asyncio.run(scenario())


def test_the_same_source_for_another_model_is_another_prompt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            await pin(stub, recipe_json="[1]", model="llama")
            same = (await apply(stub, Pin(name="p", recipe_json="[1]"), Pin(name="q", recipe_json="[1]"))).pins
            assert same[0].made == "p"
            (other,) = (await apply(stub, Pin(name="p", recipe_json="[1]", model="qwen"))).pins
            assert other.made == "p@2"
            assert (await prompt_of(stub, "p@2")).model == "qwen"

    asyncio.run(scenario())


def test_a_pin_is_only_changed_if_it_is_still_the_one_that_was_meant(tmp_path: Path) -> None:
    """An engine renders for seconds; meanwhile its pin may be replaced, or end."""

    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            first = await pin(stub, recipe_json="[1]")
            await pin(stub, first=7, recipe_json="[1]", replace=True, if_pin_id=first)
            for name in ("p", "gone"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await pin(stub, name, first=9, replace=True, if_pin_id=first)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            await unpin(stub)
            with pytest.raises(grpc.aio.AioRpcError):
                await pin(stub, first=9, replace=True, if_pin_id=(await prompt_of(stub)).pin_id)

    asyncio.run(scenario())


def test_a_pin_that_is_to_be_replaced_is_of_the_set_of_its_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub, ScriptedEngine(config_in(tmp_path)) as engine:
            await durable_pin(stub, engine, recipe_json="[1]")
            taken = Pin(name="p", recipe_json="[2]", labels=cache_pb2.Labels(values={"kvtier/set": "b"}))
            (made,) = (await apply(stub, taken)).pins
            assert made.made == "p@2"
            for expected in (
                cache_pb2.ExpectedPin(),
                cache_pb2.ExpectedPin(set="b", pin_id="0"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await apply(stub, unpin=["p"], expected=expected)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            pin_ids = ((await prompt_of(stub)).pin_id, made.pin_id)
            for pin_id in pin_ids:
                await apply(stub, unpin=["p"], expected=cache_pb2.ExpectedPin(set="b", pin_id=pin_id), dry_run=True)
            await apply(stub, unpin=["p"], expected=cache_pb2.ExpectedPin(set="b", pin_id=made.pin_id))
            assert await names(stub) == ["p"]

    asyncio.run(scenario())


def test_a_use_never_brings_an_end_back(tmp_path: Path) -> None:
    """`set --ttl never` was acknowledged, and a use from before gave the pin an end again, and its old priority."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            view = await r.cache.pins.pin(RequestedPin(name="p", tokens=range(40), ttl_s=600, sliding=True))
            pin_id = view.prompt.pin_id
            r.cache.expiry.used(pin_id, view.prompt.expires_unix_s + 100)
            await r.cache.pins.update(PinUpdate(name="p", ttl_s=0, priority=7))
            await r.cache.expiry.look()
            prompt = r.cache.prompts.get("p")
            assert (prompt.expires_unix_s, prompt.sliding, prompt.priority) == (0.0, False, 7)
            r.cache.expiry.used(pin_id, prompt.created_unix_s + 10_000)
            await r.cache.expiry.look()
            assert r.cache.prompts.get("p").expires_unix_s == 0.0

    asyncio.run(scenario())


@pytest.mark.parametrize("used", ["p", "p@2"])
def test_a_use_moves_the_ends_of_a_sliding_pin_and_of_its_replacement(tmp_path: Path, used: str) -> None:
    """Clients sent the new version already: the pin ended while it waited for that, and the version with it."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            how = {"ttl_s": 600, "sliding": True}
            await r.cache.pins.pin(RequestedPin(name="p", tokens=range(40), **how))  # type: ignore[arg-type]
            await r.cache.pins.pin(RequestedPin(name="p", recipe_json="[2]", replace=True))
            ends = {each.name: each.expires_unix_s for each in r.cache.prompts}
            assert set(ends) == {"p", "p@2"}
            r.cache.expiry.used(r.cache.prompts.get(used).pin_id, ends[used] + 1)
            await r.cache.expiry.look()
            later = {each.name for each in r.cache.prompts if each.expires_unix_s > ends[each.name] + 500}
            assert later == {"p", "p@2"}

    asyncio.run(scenario())


def test_a_dry_run_ends_no_automatic_pin(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            ended: list[object] = []

            async def end(error: QuotaExceededError) -> bool:
                ended.append(error)
                return False

            async def refuse(*_: object, **__: object) -> None:
                raise QuotaExceededError("p", 1, 1, 1)

            r.cache.pins.end_automatic_pins = end
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("kvtier.prompts.pins.check_quota", refuse)
                with pytest.raises(QuotaExceededError):
                    await r.cache.pins.apply([RequestedPin(name="p", tokens=range(40))], dry_run=True)
                assert not ended
                with pytest.raises(QuotaExceededError):
                    await r.cache.pins.apply([RequestedPin(name="p", tokens=range(40))])
                assert ended

    asyncio.run(scenario())


def test_what_is_applied_ends_no_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await durable_pin(stub, engine)
            await pin(stub, first=100, replace=True)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await apply(stub, unpin=["p@2"])
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (await prompt_of(stub, "p@2")).pinned

    asyncio.run(scenario())


def test_a_name_whose_old_versions_are_known_is_not_taken_by_a_rename(tmp_path: Path) -> None:
    """A rollback would have given the prompt the text of another one."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.cache.pins.pin(RequestedPin(name="p", tokens=range(40)))
            await r.cache.pins.pin(RequestedPin(name="q@1", tokens=range(50)))
            with pytest.raises(PromptExistsError, match="q@1"):
                await r.cache.renames.rename("p", "q")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "new_name", "says"),
    [
        ("p", "q", "new_name = 'q': prompt 'q' exists; choose another name, or forget that one first: kvtier unpin q"),
        ("p", "p", "new_name = 'p': it has this name already; give another one"),
        ("none", "r", "no prompt named 'none'; `kvtier list` shows the names"),
        ("p", "a b", "new_name = 'a b': use 1 to 128 letters"),
    ],
)
def test_a_rename_that_cannot_be_says_what_to_do(tmp_path: Path, name: str, new_name: str, says: str) -> None:
    """It spoke of an option that `kvtier rename` does not have."""

    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            for number, each in enumerate("pq"):
                await pin(stub, each, first=number)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.RenamePrompt(cache_pb2.RenamePromptRequest(name=name, new_name=new_name))
            assert says in (caught.value.details() or "")

    asyncio.run(scenario())


def test_a_rename_and_what_replaces_the_prompt_do_not_meet(tmp_path: Path) -> None:
    """The look at replacements had seen the old name; it took the pin for lost, and made another one of it."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.cache.pins.pin(RequestedPin(name="p", tokens=range(40)))
            await r.cache.pins.pin(RequestedPin(name="p", recipe_json="[2]", replace=True))
            seen = r.cache.prompts.replacements["p"]
            await r.cache.renames.rename("p", "q")
            await r.cache.replacements._look_at(seen)
            assert sorted(each.name for each in r.cache.prompts) == ["q", "q@2"]
            assert r.cache.prompts.replacements["q"].pin_id == seen.pin_id

    asyncio.run(scenario())


def test_an_adopted_pin_counts_for_its_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = replace(config_in(tmp_path), owners=OwnersConfig(default=OwnerQuota(pins=1)))
        async with running(config) as stub:
            await pin(stub, "mine", owner="team")
            await pin(stub, "theirs", first=5, owner="other")
            with pytest.raises(grpc.aio.AioRpcError, match="has 1 of 1 pins"):
                await pin(stub, "theirs", first=5, owner="team")

    asyncio.run(scenario())
