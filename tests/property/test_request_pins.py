"""Any sequence of requests for pins: within the limits, never shorter than promised, and no pin of others touched."""

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.ledger import PromptRow
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.by_request.request_limits import Allowance, RequestLimits
from kvtier.sessions.engine_peer import PinOutcome
from tests.fakes.rig import Rig, keys_of, rig
from tests.unit.service.test_request_pins import AskingEngine, pins_of, requested

CHUNK_TOKENS = 16
OWN = Allowance(num_pins=3, num_tokens=160, num_bytes=10**9, new_per_minute=10**6)
TOTAL = Allowance(num_pins=5, num_tokens=256, num_bytes=10**9, new_per_minute=10**6)
OPERATORS = RequestedPin(name="operator", tokens=tuple(range(32)), model="model", ttl_s=10**6)

asks = st.fixed_dictionaries(
    {
        "owner": st.sampled_from(["", "a" * 16, "b" * 16]),
        "branch": st.integers(0, 2),
        "lengths": st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True).map(sorted),
        "ttl_s": st.sampled_from([0, 1, 300, 3600]),
        "name": st.sampled_from(["", "", "", "mine", "operator"]),
        "with_tokens": st.booleans(),
        "priority": st.sampled_from([0, 5]),
        "binds": st.booleans(),
    }
)


def prompt_of(branch: int, num_chunks: int) -> tuple[int, ...]:
    """Return a prompt; those of one branch begin with one another."""
    return (branch, *range(num_chunks * CHUNK_TOKENS - 1))


def check_limits(pins: list[PromptRow]) -> None:
    for owner in {pin.owner for pin in pins}:
        own = [pin for pin in pins if pin.owner == owner]
        assert len(own) <= OWN.num_pins
        assert sum(len(pin.tokens) for pin in own) <= OWN.num_tokens
    assert len(pins) <= TOTAL.num_pins
    assert sum(len(pin.tokens) for pin in pins) <= TOTAL.num_tokens


def promise_until(pins: list[PromptRow], owner: str, tokens: tuple[int, ...]) -> float:
    """Return until when these tokens are pinned for the owner."""
    ends = [
        pin.expires_unix_s or 1e18 for pin in pins if pin.owner == owner and tuple(pin.tokens)[: len(tokens)] == tokens
    ]
    return max(ends, default=0.0)


async def play(r: Rig, steps: list[dict[str, Any]]) -> None:
    session, peer = await r.session()
    await r.cache.pins.pin(OPERATORS)
    operators = r.cache.prompts.get("operator")
    engine = AskingEngine(pins_of(r, RequestLimits(owner=OWN, total=TOTAL)), session, peer)
    promised: dict[tuple[str, tuple[int, ...]], float] = {}
    for step in steps:
        prompts = [prompt_of(step["branch"], length) for length in step["lengths"]]
        asked_s, given_s = time.time(), step["ttl_s"] or 1e17
        fields = {name: step[name] for name in ("owner", "ttl_s", "name", "with_tokens", "priority")}
        outcomes = await engine.ask(*prompts, **fields)
        for prompt, outcome in zip(prompts, outcomes, strict=True):
            if outcome is PinOutcome.PINNED:
                key = step["owner"], prompt
                promised[key] = max(promised.get(key, 0.0), asked_s + given_s)
        check_limits(requested(r))
        if step["binds"]:
            for pin in requested(r):
                await r.cache.bindings.bind(session, pin.pin_id, keys_of(range(len(pin.tokens) // CHUNK_TOKENS)), 1, "")
    for (owner, prompt), until_s in promised.items():
        assert promise_until(requested(r), owner, prompt) >= until_s - 1
    assert r.cache.prompts.get("operator") == operators
    r.cache.prompts.check()
    r.check()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(asks, max_size=15))
def test_what_was_promised_is_kept_within_the_limits(steps: list[dict[str, Any]]) -> None:
    async def scenario(folder: Path) -> None:
        async with rig(folder) as r:
            r.cache._verified.set()
            await play(r, steps)
            before = {pin.pin_id: pin for pin in requested(r)}
            kept = {row.pin_id: row for row in r.resources.ledger.load().prompts if row.origin == "request"}
            assert kept == before

    folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
    try:
        asyncio.run(scenario(folder))
    finally:
        shutil.rmtree(folder)
