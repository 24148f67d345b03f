"""A request's pin that an operator has taken over is the operator's: no request changes or ends it."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.prompts.book import RequestedPin
from kvtier.prompts.by_request.request_limits import Allowance, RequestLimits
from tests.fakes.rig import Rig, keys_of
from tests.unit.service.test_request_pins import (
    LONG,
    OWNER,
    PINNED,
    REFUSED,
    SHORT,
    AskingEngine,
    digest_of,
    pins_of,
    requested,
    run,
)


async def taken_over(r: Rig, name: str, ttl_s: int = 0) -> None:
    tokens = r.cache.prompts.get(name).tokens
    await r.cache.pins.pin(RequestedPin(name=name, tokens=tokens, model="model", priority=5, ttl_s=ttl_s))


def test_no_request_changes_its_priority_or_its_end(tmp_path: Path) -> None:
    """The engine's name for the pin was remembered, and what it asked was done to the operator's pin."""

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        for name in ("mine", ""):
            await engine.ask(LONG, name=name, ttl_s=60)
            (pin,) = requested(r)
            await taken_over(r, pin.name, ttl_s=60)
            before = r.cache.prompts.get(pin.name)
            for with_tokens in (False, True):
                asked = await engine.ask(LONG, name=name, with_tokens=with_tokens, ttl_s=10**6, priority=-7)
                assert asked == [PINNED], "it is pinned, for as long as the operator says"
            await engine.pins.demote(engine.session, [], digest_of(LONG), OWNER)
            assert r.cache.prompts.get(pin.name) == before

    run(tmp_path, scenario)


@pytest.mark.parametrize("name", ["mine", ""])
def test_after_a_restart_it_is_answered_as_pinned_too(tmp_path: Path, name: str) -> None:
    """One with a name of the client's choice was refused: the name was another owner's."""

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(LONG, name=name)
        (pin,) = requested(r)
        await taken_over(r, pin.name)
        before = r.cache.prompts.get(pin.name)
        again = AskingEngine(pins_of(r), engine.session, engine.peer)
        assert await again.ask(LONG, name=name, ttl_s=60, priority=-7) == [PINNED]
        assert r.cache.prompts.get(pin.name) == before

    run(tmp_path, scenario)


def test_what_an_operator_has_unpinned_is_refused_and_says_how_to_forget_it(tmp_path: Path) -> None:
    """A client that had chosen no name was to use another name."""

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(LONG)
        (pin,) = requested(r)
        await taken_over(r, pin.name)
        await r.cache.pins.unpin(pin.name)
        assert await engine.ask(LONG) == [REFUSED]
        assert f"kvtier evict {pin.name}" in engine.problem
        await r.cache.evictions.evict(pin.name, force=False)
        assert await engine.ask(LONG) == [PINNED]

    run(tmp_path, scenario)


def test_a_longer_prompt_does_not_end_it(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(SHORT, ttl_s=0)
        (short,) = requested(r)
        await r.cache.bindings.bind(engine.session, short.pin_id, keys_of(range(2)), 32, "")
        await engine.ask(LONG, ttl_s=0)
        (long,) = [pin for pin in requested(r) if pin.name != short.name]
        await taken_over(r, short.name)
        await r.cache.bindings.bind(engine.session, long.pin_id, keys_of(range(4)), 64, "")
        await engine.ask(LONG, ttl_s=0)
        assert r.cache.prompts.get(short.name).pinned

    run(tmp_path, scenario)


def test_names_of_automatic_pins_are_not_for_requests(tmp_path: Path) -> None:
    """A client that knows a system prompt could take the name under which it would be pinned by itself."""

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        assert await engine.ask(LONG, name="auto-0123456789ab") == [REFUSED]
        assert "names that begin with auto- are those of automatic pins" in engine.problem
        assert not requested(r)

    run(tmp_path, scenario)


def test_priorities_that_alternate_count_as_new_pins(tmp_path: Path) -> None:
    """Each is a transaction, and a message with all tokens to each engine; nothing but the disk bounded them."""
    far = Allowance(num_pins=100, num_tokens=10**6, num_bytes=10**9, new_per_minute=100)
    limits = RequestLimits(owner=replace(far, new_per_minute=10), total=far)

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        outcomes, problems = [], set()
        for number in range(50):
            outcomes += await engine.ask(LONG, with_tokens=number == 0, priority=number % 2)
            problems.add(engine.problem)
        assert outcomes[:10] == [PINNED] * 10
        assert REFUSED in outcomes
        assert any("within a minute" in problem for problem in problems)
        assert r.counters.request_pins_extended <= 10

    run(tmp_path, scenario, limits)
