"""What a request would get now, and why: as a request would find it, without changing anything."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.tokens import TokenIds
from kvtier.errors import KvtierError
from kvtier.outcomes.explain import AskedPrompt, Explanation
from kvtier.outcomes.missing_chunks import why_missing
from kvtier.prompts.book import RequestedPin
from tests.fakes.rig import ListPeer, Rig, eventually, hello_of, keys_of, rig
from tests.fakes.scripted_engine import ONE_GROUP

TOKENS = [*range(1000, 1064)]


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def explained(r: Rig, tokens: list[int] | None = None, **names: str) -> Explanation:
    asked = AskedPrompt(tokens=TokenIds(tokens or [*TOKENS, 1, 2]), **names)
    return await r.cache.explainer.explain(asked)


async def pinned(r: Rig, name: str = "p", tokens: list[int] | None = None, **fields: Any) -> str:
    view = await r.cache.pins.pin(RequestedPin(name=name, tokens=tokens or TOKENS, **fields))
    return view.prompt.pin_id


async def bound(r: Rig, pin_id: str, numbers: range) -> None:
    (session, *_) = r.cache.live_sessions
    await r.cache.bindings.bind(session, pin_id, keys_of(numbers), 16 * len(numbers), "")


def test_a_pin_that_no_engine_has_bound_or_stored_and_one_in_each_tier(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            pin_id = await pinned(r)
            found = await explained(r)
            assert (found.outcome, found.prompts[0].bindings[0].bound) == (RequestOutcome.NOT_STORED, False)
            assert "no engine has recognized" in found.reason
            await bound(r, pin_id, range(4))
            assert (await explained(r)).outcome is RequestOutcome.NOT_STORED
            r.in_host(range(2))
            assert (await explained(r)).outcome is RequestOutcome.PART
            await r.on_disk(range(2, 4))
            found = await explained(r)
            (binding,) = found.prompts[0].bindings
            assert found.outcome is RequestOutcome.HIT
            assert (binding.num_host_chunks, binding.num_disk_chunks, binding.num_missing_chunks) == (2, 2, 0)
            await r.cache.quarantines.begin(r.namespace.namespace_id, "wrong bytes")
            found = await explained(r)
            assert (found.outcome, "wrong bytes" in found.reason) == (RequestOutcome.QUARANTINED, True)
            await r.cache.quarantines.end(r.namespace.namespace_id)
            for _ in range(100):
                r.resources.disk_health.failed("read", KvtierError("broken"))  # until the breaker opens
            assert (await explained(r)).outcome is RequestOutcome.DISK_OFF

    play(scenario())


def test_what_differs_beside_the_tokens_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await bound(r, await pinned(r, cache_salt="tenant"), range(4))
            r.in_host(range(4))
            for names, differs_in in (
                ({}, ["cache_salt"]),
                ({"cache_salt": "other"}, ["cache_salt"]),
                ({"cache_salt": "tenant", "lora_name": "a"}, ["lora_name"]),
            ):
                found = await explained(r, None, **names)
                assert found.outcome is RequestOutcome.UNKNOWN
                assert (found.prompts[0].differs_in, differs_in[0] in found.reason) == (differs_in, True)
            assert (await explained(r, cache_salt="tenant")).outcome is RequestOutcome.HIT
            await bound(r, await pinned(r, "public", [*range(2000, 2064)], public=True), range(4))
            assert (await explained(r, [*range(2000, 2066)], cache_salt="any")).outcome is RequestOutcome.HIT
            assert (await explained(r, model="of no engine")).outcome is RequestOutcome.NO_SESSION

    play(scenario())


def test_the_longest_whole_pin_decides_however_many_share_more(tmp_path: Path) -> None:
    """Ten versions of a long prompt begin with the pinned one too, and share more with the request."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await bound(r, await pinned(r), range(4))
            r.in_host(range(4))
            asked = [*TOKENS, *range(64)]
            for number in range(10):
                await pinned(r, f"longer-{number}", [*asked[:100], 5000 + number, *range(40)])
            found = await explained(r, asked)
            assert found.outcome is RequestOutcome.HIT
            assert len(found.prompts) == 5
            assert [each.prompt.name for each in found.prompts if each.is_whole] == ["p"]
            assert {each.differs_at for each in found.prompts} == {100, None}

    play(scenario())


def test_what_is_held_for_engines_of_another_fingerprint_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await bound(r, await pinned(r), range(4))
            r.in_host(range(4))
            (first,) = r.cache.live_sessions
            await r.cache.attach(hello_of("second", weights="2"), ListPeer())
            r.cache.end(first)
            found = await explained(r)
            assert found.outcome is RequestOutcome.NOT_STORED
            assert "weights" in found.reason
            (held,) = [each for each in found.prompts[0].bindings if each.bound]
            assert (held.live, held.differing_fields, held.num_host_chunks) == (False, ["weights"], 4)

    play(scenario())


def test_the_nearest_is_pinned_rather_than_an_old_version(tmp_path: Path) -> None:
    """Of prompts that share as many chunks; those that share less than one are left out beside them."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.session()
            await pinned(r, "old", [*TOKENS[:40], *range(24)])
            await r.cache.pins.unpin("old")
            await pinned(r, "new", [*TOKENS[:36], *range(100, 128)])
            await pinned(r, "far", [*TOKENS[:10], *range(200, 254)])
            found = await explained(r)
            assert [each.prompt.name for each in found.prompts] == ["new", "old"]
            assert (found.outcome, "'new' and differs from token 36" in found.reason) == (RequestOutcome.DIVERGED, True)
            (near,) = (await explained(r, [*TOKENS[:4], 7, 8, *range(300, 340)])).prompts
            assert near.shared_tokens == 4

    play(scenario())


def test_a_namespace_may_end_while_what_it_holds_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose namespace ends with it stopped meanwhile: the call failed with a KeyError."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            hello = replace(hello_of("passing", weights="2"), ephemeral=True, model_names=("other",))
            session = await r.cache.attach(hello, ListPeer())
            pin_id = await pinned(r, model="other")
            await r.cache.bindings.bind(session, pin_id, keys_of(range(4)), 64, "")

            async def last(*args: Any) -> Any:
                r.cache.end(session)
                session.lock.close()
                await eventually(lambda: session.namespace_id not in r.cache.namespaces)
                return await why_missing(*args)

            monkeypatch.setattr("kvtier.outcomes.explain.why_missing", last)
            assert (await explained(r, model="other")).outcome is RequestOutcome.NOT_STORED

    play(scenario())


LONG_CHUNKS = replace(ONE_GROUP, groups=tuple(replace(group, chunk_tokens=256) for group in ONE_GROUP.groups))


def test_an_engine_with_longer_chunks_lacks_none_and_is_no_hit(tmp_path: Path) -> None:
    """It shares no whole chunk, so nothing was missing: the answer was HIT, in host memory."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            pin_id, asked = await pinned(r, tokens=[*range(1000, 1256)]), [*range(1000, 1066)]
            second = await r.cache.attach(hello_of("second", LONG_CHUNKS, weights="2"), ListPeer())
            await r.cache.bindings.bind(second, pin_id, keys_of(range(1)), 256, "")
            found = await explained(r, asked)
            assert (found.outcome, "is less than one chunk" in found.reason) == (RequestOutcome.NOT_STORED, True)
            await bound(r, pin_id, range(16))
            found = await explained(r, asked)
            assert (found.outcome, "nothing of it is stored" in found.reason) == (RequestOutcome.NOT_STORED, True)
            r.in_host(range(2))
            assert (await explained(r, asked)).outcome is RequestOutcome.PART

    play(scenario())


def test_what_engines_of_another_fingerprint_have_lost_is_not_held_for_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await bound(r, await pinned(r), range(4))
            (first,) = r.cache.live_sessions
            await r.cache.attach(hello_of("second", weights="2"), ListPeer())
            r.cache.end(first)
            found = await explained(r)
            assert found.outcome is RequestOutcome.NOT_STORED
            assert "no engine has recognized 'p' yet" in found.reason

    play(scenario())
