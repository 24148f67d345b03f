"""Pins that requests ask for: made once, extended by use, ended by their TTL, bounded for each owner and for all."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvtier.prompts.by_request.request_pins
import kvtier.prompts.expiry
from kvtier.core.tokens import TokenIds
from kvtier.errors import RequestLimitError
from kvtier.ledger import Ledger, PromptRow
from kvtier.ledger.promises import Promises
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.by_request.request_limits import Allowance, RequestGate, RequestLimits
from kvtier.prompts.by_request.request_pins import MAX_OPEN_ASKS, AskedPins, AskedPrefix, RequestPins
from kvtier.sessions.engine_peer import PinOutcome
from kvtier.sessions.session import Session
from tests.fakes.clocks import num_turns
from tests.fakes.gates import gated
from tests.fakes.operator import reached
from tests.fakes.rig import ListPeer, Rig, eventually, keys_of, rig

OWNER, OTHER = "a" * 16, "b" * 16
LONG, SHORT = tuple(range(64)), tuple(range(32))
PINNED, UNKNOWN, REFUSED = PinOutcome.PINNED, PinOutcome.UNKNOWN, PinOutcome.REFUSED
ids = itertools.count(1)


class AskingEngine:
    """An engine that asks for pins, as the connector does."""

    def __init__(self, pins: RequestPins, session: Session, peer: ListPeer) -> None:
        self.pins, self.session, self.peer = pins, session, peer
        self.problem = ""

    async def ask(self, *prefixes: Sequence[int], with_tokens: bool = True, **fields: Any) -> list[PinOutcome]:
        """Ask for prefixes of the last one; return what became of each."""
        results = await self.results(*prefixes, with_tokens=with_tokens, **fields)
        return [result.outcome for result in results]

    async def results(self, *prefixes: Sequence[int], with_tokens: bool = True, **fields: Any) -> Sequence[Any]:
        asked = asked_pins(*prefixes, with_tokens=with_tokens, **fields)
        self.pins.ask(self.session, asked)
        await eventually(lambda: asked.ask_id in self.peer.pin_answers)
        results, self.problem = self.peer.pin_answers.pop(asked.ask_id)
        return results


def asked_pins(
    *prefixes: Sequence[int],
    with_tokens: bool = True,
    ttl_s: int = 300,
    ttls_s: Sequence[int] = (),
    **fields: Any,
) -> AskedPins:
    ttls_s = ttls_s or [ttl_s] * len(prefixes)
    usual: dict[str, Any] = {"priority": 0, "name": "", "owner": OWNER}
    return AskedPins(
        ask_id=next(ids),
        prefixes=tuple(
            AskedPrefix(digest=digest_of(prefix), num_tokens=len(prefix), ttl_s=ttl)
            for prefix, ttl in zip(prefixes, ttls_s, strict=True)
        ),
        tokens=TokenIds(prefixes[-1] if with_tokens else ()),
        lora_name="",
        lora_path="",
        cache_salt="",
        **usual | fields,
    )


def digest_of(tokens: Sequence[int]) -> bytes:
    return hash(tuple(tokens)).to_bytes(8, "big", signed=True) * 2


Scenario = Callable[[Rig, AskingEngine], Awaitable[None]]


def run(folder: Path, scenario: Scenario, limits: RequestLimits | None = None, **settings: Any) -> None:
    async def whole() -> None:
        async with rig(folder, **settings) as r:
            session, peer = await r.session()
            r.cache._verified.set()
            await scenario(r, AskingEngine(pins_of(r, limits), session, peer))
            r.cache.prompts.check()

    asyncio.run(whole())


def pins_of(r: Rig, limits: RequestLimits | None = None) -> RequestPins:
    return RequestPins(r.cache.pins, r.cache.prompts, r.cache.namespaces, r.resources, limits)


def requested(r: Rig) -> list[PromptRow]:
    return [prompt for prompt in r.cache.prompts if prompt.origin == "request"]


def limits_of(**changes: int) -> RequestLimits:
    """Return limits that are out of reach but for these, of the owner (`own_...`) or of all."""
    far = Allowance(num_pins=10**6, num_tokens=10**9, num_bytes=10**12, new_per_minute=10**6)
    own = {name.removeprefix("own_"): value for name, value in changes.items() if name.startswith("own_")}
    total = {name: value for name, value in changes.items() if not name.startswith("own_")}
    return RequestLimits(owner=replace(far, **own), total=replace(far, **total))


# Made once, extended by use


def test_tokens_are_asked_for_once_and_never_again_while_the_pin_stands(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        assert await engine.ask(LONG, with_tokens=False) == [UNKNOWN]
        assert await engine.ask(LONG) == [PINNED]
        (pin,) = requested(r)
        assert (tuple(pin.tokens), pin.owner, pin.model) == (LONG, OWNER, "model")
        assert pin.name.startswith("request-")
        (result,) = await engine.results(LONG, with_tokens=False)
        assert result.outcome is PINNED
        assert result.ends_in_s >= 300
        assert requested(r) == [pin], "it stands for long enough: nothing is written"
        assert r.counters.request_pins_made == 1
        assert r.counters.request_pins_extended == 0

    run(tmp_path, scenario)


def test_a_use_extends_the_pin_and_never_shortens_it(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(LONG, ttl_s=300)
        ends_s = requested(r)[0].expires_unix_s
        await engine.ask(LONG, with_tokens=False, ttl_s=3600)
        extended_s = requested(r)[0].expires_unix_s
        assert extended_s > ends_s + 3000
        await engine.ask(LONG, with_tokens=False, ttl_s=10)
        assert requested(r)[0].expires_unix_s == extended_s
        await engine.ask(LONG, with_tokens=False, ttl_s=0)
        assert requested(r)[0].expires_unix_s == 0
        await engine.ask(LONG, with_tokens=False, ttl_s=300)
        assert requested(r)[0].expires_unix_s == 0
        assert (await engine.results(LONG, with_tokens=False))[0].ends_in_s == 0

    run(tmp_path, scenario)


def test_a_storm_of_ttls_writes_a_number_of_times_that_grows_with_their_logarithm(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(LONG, ttl_s=1)
        for ttl_s in range(2, 500):
            await engine.ask(LONG, with_tokens=False, ttl_s=ttl_s)
        assert r.counters.request_pins_extended < 25
        assert requested(r)[0].expires_unix_s >= time.time() + 499

    run(tmp_path, scenario)


def test_a_pin_that_ended_is_forgotten_and_its_chunks_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept as unpinned prompts, a million of them would fill the ledger."""

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(LONG)
        (pin,) = requested(r)
        keys = r.in_host(range(4))
        await r.cache.bindings.bind(engine.session, pin.pin_id, keys, 64, "")
        monkeypatch.setattr(r.cache.pins, "now_unix_s", lambda: pin.expires_unix_s + 1)
        await r.cache.expiry.look()
        assert list(r.cache.prompts) == []
        assert not r.resources.ledger.load().prompts
        assert all(r.table.holds(key) for key in keys)
        assert not any(r.chunk(number).num_pins for number in range(4))
        monkeypatch.undo()
        assert await engine.ask(LONG, with_tokens=False) == [UNKNOWN]

    run(tmp_path, scenario)


def test_after_a_restart_the_pin_is_found_by_its_tokens(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(LONG)
        (pin,) = requested(r)
        again = AskingEngine(pins_of(r), engine.session, engine.peer)
        assert await again.ask(LONG, with_tokens=False) == [UNKNOWN]
        assert await again.ask(LONG) == [PINNED]
        assert requested(r) == [pin]
        assert r.counters.request_pins_made == 1

    run(tmp_path, scenario)
    ledger = Ledger.open(tmp_path / "disk" / "ledger.sqlite")
    (row,) = ledger.load().prompts
    assert (row.origin, row.owner) == ("request", OWNER)
    ledger.close()


def test_owners_do_not_share_pins(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(LONG)
        assert await engine.ask(LONG, with_tokens=False, owner=OTHER) == [UNKNOWN]
        assert await engine.ask(LONG, owner=OTHER) == [PINNED]
        assert {pin.owner for pin in requested(r)} == {OWNER, OTHER}

    run(tmp_path, scenario)


# Names


def test_a_request_never_changes_a_pin_of_the_operator(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await r.cache.pins.pin(RequestedPin(name="support", tokens=LONG, model="model", ttl_s=10**6, priority=5))
        before = r.cache.prompts.get("support")
        assert await engine.ask(LONG, name="support", ttl_s=1, priority=-100) == [PINNED], "it is, by the operator"
        assert await engine.ask(SHORT, name="support") == [REFUSED]
        assert "differs in owner" in engine.problem
        assert r.cache.prompts.get("support") == before

    run(tmp_path, scenario)


def test_a_name_of_a_request_is_kept_and_taken_by_no_other_prompt(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        assert await engine.ask(SHORT, name="mine") == [PINNED]
        assert await engine.ask(SHORT, name="mine", with_tokens=False) == [PINNED]
        assert await engine.ask(LONG, name="mine") == [REFUSED]
        assert "differs in tokens" in engine.problem
        assert await engine.ask(SHORT, name="mine", owner=OTHER) == [REFUSED]
        assert [pin.name for pin in requested(r)] == ["mine"]

    run(tmp_path, scenario)


def test_a_name_of_automatic_pins_is_refused(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        assert await engine.ask(SHORT, name="auto-0123456789ab") == [REFUSED]
        assert "those of automatic pins" in engine.problem
        assert requested(r) == []

    run(tmp_path, scenario)


def test_an_operator_may_take_a_requests_pin_over_by_its_name(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(LONG, name="mine")
        await r.cache.pins.pin(RequestedPin(name="mine", tokens=LONG, model="model"))
        prompt = r.cache.prompts.get("mine")
        assert (prompt.origin, prompt.owner, prompt.expires_unix_s) == ("named", "", 0)

    run(tmp_path, scenario)


def test_a_pin_that_an_operator_makes_meanwhile_stays_the_operators(tmp_path: Path) -> None:
    """It became a request's, with a TTL, at the end of which it was forgotten."""

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        async with r.cache.changes.lock:
            pinning = asyncio.create_task(r.cache.pins.pin(RequestedPin(name="mine", tokens=LONG, model="model")))
            await eventually(lambda: len(r.cache.changes.lock._waiters or ()) == 1)
            asking = asyncio.create_task(engine.ask(LONG, name="mine"))
            await eventually(lambda: len(r.cache.changes.lock._waiters or ()) == 2)
        await pinning
        assert await asking == [PINNED]
        prompt = r.cache.prompts.get("mine")
        assert (prompt.origin, prompt.owner, prompt.expires_unix_s) == ("named", "", 0)

    run(tmp_path, scenario)


# A longer prompt takes the place of the shorter one


def test_a_conversation_has_one_pin_once_the_longer_one_is_bound(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(SHORT)
        (short,) = requested(r)
        await r.cache.bindings.bind(engine.session, short.pin_id, keys_of(range(2)), 32, "")
        await engine.ask(LONG)
        assert len(requested(r)) == 2, "the longer one is not bound yet: its chunks are promised by the shorter one"
        (long,) = [pin for pin in requested(r) if pin != short]
        await r.cache.bindings.bind(engine.session, long.pin_id, keys_of(range(4)), 64, "")
        assert await engine.ask(SHORT, with_tokens=False) == [PINNED]
        assert requested(r) == [long]
        assert await engine.ask(SHORT, with_tokens=False) == [PINNED], "the longer one stands for it"

    run(tmp_path, scenario)


@pytest.mark.parametrize("ttl_s", [300, 3602])
def test_two_moving_markers_leave_a_conversation_one_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ttl_s: int
) -> None:
    """The shorter pin was extended after the longer one was made, by milliseconds beyond its end: it stayed."""

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        ticks = itertools.count()
        passed_s = 0.0
        monkeypatch.setattr(r.cache.pins, "now_unix_s", lambda: 1e9 + passed_s + next(ticks) / 1000)
        await engine.ask(SHORT, ttl_s=ttl_s)
        (short,) = requested(r)
        await r.cache.bindings.bind(engine.session, short.pin_id, keys_of(range(2)), 32, "")
        passed_s = ttl_s / 2
        assert await engine.ask(SHORT, LONG, ttl_s=ttl_s) == [PINNED, PINNED]
        (long,) = [pin for pin in requested(r) if pin.pin_id != short.pin_id]
        assert r.cache.prompts.get(short.name).expires_unix_s > short.expires_unix_s, "it was extended"
        await r.cache.bindings.bind(engine.session, long.pin_id, keys_of(range(4)), 64, "")
        await engine.ask(LONG, with_tokens=False, ttl_s=ttl_s)
        assert [pin.pin_id for pin in requested(r)] == [long.pin_id]

    run(tmp_path, scenario)


def test_a_shorter_pin_that_an_operator_has_taken_over_stays(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(SHORT)
        (short,) = requested(r)
        await engine.ask(LONG)
        await r.cache.pins.pin(RequestedPin(name=short.name, tokens=SHORT, model="model", ttl_s=60))
        (long,) = requested(r)
        await r.cache.bindings.bind(engine.session, long.pin_id, keys_of(range(4)), 64, "")
        await engine.ask(LONG, with_tokens=False)
        assert r.cache.prompts.get(short.name).pinned

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "other", [{"ttl_s": 3600}, {"name": "mine"}, {"name": "request-mine"}, {"owner": OTHER}, {"priority": 1}]
)
def test_a_pin_that_promises_more_than_the_longer_one_stays(tmp_path: Path, other: dict[str, Any]) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(SHORT, **other)
        await engine.ask(LONG)
        (long,) = [pin for pin in requested(r) if len(pin.tokens) == len(LONG)]
        await r.cache.bindings.bind(engine.session, long.pin_id, keys_of(range(4)), 64, "")
        await engine.ask(LONG, with_tokens=False)
        assert len(requested(r)) == 2

    run(tmp_path, scenario)


def test_breakpoints_of_one_request_are_covered_by_the_longest_with_their_ttl(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        assert await engine.ask(SHORT, LONG) == [PINNED, PINNED]
        assert len(requested(r)) == 1
        assert await engine.ask(SHORT, LONG, with_tokens=False) == [PINNED, PINNED]
        assert await engine.ask(SHORT, LONG, with_tokens=False, ttls_s=(3600, 300)) == [PINNED, PINNED]
        assert requested(r)[0].expires_unix_s > time.time() + 3000

    run(tmp_path, scenario)


def test_a_pin_that_covers_a_prefix_of_lower_priority_keeps_its_own(tmp_path: Path) -> None:
    """Who pinned the system prompt at -50 ranked a conversation of the same owner at -50, which asked for 0 again."""

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        for _ in range(2):
            assert await engine.ask(LONG) == [PINNED]
            assert await engine.ask(SHORT, priority=-50) == [PINNED]
            assert [pin.priority for pin in requested(r)] == [0]
        assert await engine.ask(SHORT, priority=50) == [PINNED]
        assert [pin.priority for pin in requested(r)] == [50], "it keeps what matters more, too"

    run(tmp_path, scenario)


# Limits


def prompt_number(number: int, num_tokens: int = 32) -> tuple[int, ...]:
    return (number, *range(num_tokens - 1))


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        (limits_of(own_num_pins=3), "3 of 3 pins"),
        (limits_of(num_pins=3), "all owners has 3 of 3 pins"),
        (limits_of(own_num_tokens=100), "96 of 100 pinned tokens, and asks for 32 more"),
        (limits_of(num_tokens=100), "96 of 100 pinned tokens"),
        (limits_of(own_num_bytes=40_000), "35.2 KiB of 39.1 KiB pinned, and asks for 11.7 KiB more"),
        (limits_of(own_new_per_minute=3), "made 3 new pins within a minute"),
        (limits_of(new_per_minute=3), "all owners made 3 new pins within a minute"),
    ],
)
def test_beyond_a_limit_a_pin_is_refused_with_the_numbers(tmp_path: Path, limits: RequestLimits, numbers: str) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        for number in range(3):
            assert await engine.ask(prompt_number(number)) == [PINNED]
        assert await engine.ask(prompt_number(3)) == [REFUSED]
        assert numbers in engine.problem
        assert len(requested(r)) == 3
        assert await engine.ask(prompt_number(1), with_tokens=False) == [PINNED], "what stands is extended as before"
        assert r.counters.request_pins_refused == 1

    run(tmp_path, scenario, limits)


def test_the_rate_is_refused_before_tokens_are_sent(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(prompt_number(0))
        assert await engine.ask(prompt_number(1), with_tokens=False) == [REFUSED]
        assert await engine.ask(prompt_number(1), with_tokens=False, owner=OTHER) == [UNKNOWN]

    run(tmp_path, scenario, limits_of(own_new_per_minute=1))


def test_the_rate_refills_evenly() -> None:
    gate = RequestGate(limits_of(own_new_per_minute=60))
    for _ in range(60):
        gate.check_rate(OWNER, 100.0)
        gate.count_new(OWNER, 100.0)
    with pytest.raises(RequestLimitError):
        gate.check_rate(OWNER, 100.5)
    gate.check_rate(OWNER, 101.5)
    gate.check_rate(OTHER, 100.0)


def test_the_quota_of_the_disk_holds_for_requests_too(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        assert await engine.ask(LONG) == [REFUSED]
        assert "disk.bytes" in engine.problem
        assert requested(r) == []

    run(tmp_path, scenario, limits_of(), disk_bytes=20_000)


def test_any_number_of_owners_grows_nothing() -> None:
    gate = RequestGate(limits_of())
    for number in range(100_000):
        gate.count_new(f"{number:016x}", 0.0)
    assert len(gate._owners) <= 4096


def test_a_hostile_client_grows_nothing_beyond_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, owners and breakpoints without end: what is remembered of them is bounded, pins by the limits."""
    monkeypatch.setattr(kvtier.prompts.by_request.request_pins, "_MAX_DIGESTS", 100)
    limits = limits_of(num_pins=20, own_num_pins=10)

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        for number in range(500):
            await engine.ask(prompt_number(number), owner=f"{number % 50:016x}", ttl_s=number + 1)
            await engine.ask(prompt_number(0, 33 + number), with_tokens=False, owner=f"{0:016x}", ttl_s=1)
        for end in range(1, 300):  # a breakpoint at each token of one prompt
            await engine.ask(prompt_number(0, end), prompt_number(0, 300), owner=f"{0:016x}")
        assert len(requested(r)) <= 20
        assert len(engine.pins._by_key) <= 100
        assert len(engine.pins._longer) <= 20
        assert not engine.pins._num_open
        assert r.counters.request_pins_refused > 400

    run(tmp_path, scenario, limits)


def test_asks_beyond_the_open_ones_are_refused_at_once(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        asked = [asked_pins(prompt_number(number)) for number in range(MAX_OPEN_ASKS + 1)]
        for each in asked:
            engine.pins.ask(engine.session, each)
        results, problem = engine.peer.pin_answers[asked[-1].ask_id]
        assert [result.outcome for result in results] == [REFUSED]
        assert str(MAX_OPEN_ASKS) in problem
        await eventually(lambda: len(engine.peer.pin_answers) == len(asked))
        assert len(requested(r)) == MAX_OPEN_ASKS

    run(tmp_path, scenario)


# Demote


def test_demote_moves_unpinned_chunks_out_of_memory_and_ranks_the_pin_last(tmp_path: Path) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await r.on_disk(range(4))
        keys = r.in_host(range(5))
        await engine.ask(SHORT, owner="")
        (pin,) = requested(r)
        await r.cache.bindings.bind(engine.session, pin.pin_id, keys[:2], 32, "")
        await engine.pins.demote(engine.session, keys, digest_of(SHORT), "")
        assert [r.chunk(number).slot is not None for number in range(4)] == [True, True, False, False]
        assert r.table.holds(keys[4]), "it is nowhere else"
        assert requested(r)[0].priority == -100
        assert await engine.ask(SHORT, with_tokens=False, owner="", priority=7) == [PINNED]
        assert requested(r)[0].priority == 7, "who asks for it again ranks it again"

    run(tmp_path, scenario)


def test_demote_of_a_shorter_prefix_leaves_the_pin_that_covers_it_alone(tmp_path: Path) -> None:
    """A hint for a system prompt ranked the pin of a conversation last, or a pin with a name of the client's choice."""

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await r.on_disk(range(4))
        keys = r.in_host(range(4))
        await engine.ask(LONG, owner="", name="mine")
        (pin,) = requested(r)
        await r.cache.bindings.bind(engine.session, pin.pin_id, keys, 64, "")
        assert await engine.ask(SHORT, owner="") == [PINNED]
        await engine.pins.demote(engine.session, keys[:2], digest_of(SHORT), "")
        assert [(each.name, each.priority) for each in requested(r)] == [("mine", 0)]

    run(tmp_path, scenario)


def test_demote_does_not_shorten_a_pin_that_is_extended_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(r: Rig, engine: AskingEngine) -> None:
        await engine.ask(SHORT, ttl_s=300)
        (pin,) = requested(r)
        with gated(monkeypatch, Promises, "change_prompts") as gate:
            extending = asyncio.create_task(engine.ask(SHORT, with_tokens=False, ttl_s=10**6))
            await reached(gate.reached)
            demoting = asyncio.create_task(engine.pins.demote(engine.session, [], digest_of(SHORT), OWNER))
            await eventually(lambda: bool(r.cache.changes.lock._waiters))
            gate.open()
            await asyncio.gather(extending, demoting)
        (demoted,) = requested(r)
        assert demoted.expires_unix_s > pin.expires_unix_s + 10**5
        assert demoted.priority == -100

    run(tmp_path, scenario)


def test_the_pins_of_an_owner_are_compared_with_turns_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand pins with a common beginning of 8,000 tokens took a tenth of a second, for each new pin."""
    monkeypatch.setattr("kvtier.concurrency.turns._TURN_S", 0.0)

    async def scenario(r: Rig, engine: AskingEngine) -> None:
        common = tuple(range(1000, 1032))
        for number in range(20):
            assert await engine.ask((*common, *range(100 * number, 100 * number + 16))) == [PINNED]
        own = requested(r)
        wanted = RequestedPin(name="request-1", tokens=common, model=own[0].model, origin="request", owner=OWNER)
        covering, turns = await num_turns(r.cache.request_pins._covering(own, wanted))
        assert covering == own[0]
        other = replace(wanted, tokens=(*common, 7))
        covering, turns = await num_turns(r.cache.request_pins._covering(own, other))
        assert covering is None
        assert turns >= 20
        _, turns = await num_turns(r.cache.request_pins._check_usage(engine.session, other))
        assert turns >= 20
        await r.cache.pins.forget(own[0])
        covering, _ = await num_turns(r.cache.request_pins._covering(own[:1], wanted))
        assert covering is None, "it has ended meanwhile"

    run(tmp_path, scenario)
