"""Engines are notified of pins that begin, change and end, by command or by the clock; nothing ends twice."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvtier.obs.clock_steps
import kvtier.prompts.expiry
from kvtier.ledger import PromptRow
from kvtier.ledger.promises import Promises
from kvtier.prompts.book import RequestedPin
from tests.fakes.clocks import JumpingLoop, at_rest, run_with_jumps
from tests.fakes.gates import gated
from tests.fakes.operator import reached
from tests.fakes.rig import ListPeer, Rig, eventually, hello_of, rig

MINUTE_S = 60.0
REQUEST = RequestedPin(name="p", tokens=(1, 2, 3))


@dataclass
class PinPeer(ListPeer):
    """Keeps what it is notified of pins: whether each is pinned, by id."""

    pinned: dict[str, bool] = field(default_factory=dict)

    def pin_added(self, prompt: PromptRow) -> None:
        """See EnginePeer."""
        self.pinned[prompt.pin_id] = prompt.pinned

    def pin_removed(self, pin_id: str) -> None:
        """See EnginePeer."""
        self.pinned.pop(pin_id, None)


class WallClock:
    """Of the operators' side, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unix_s = 1e9
        clocks = SimpleNamespace(time=lambda: self.unix_s, clock_gettime=lambda _: self.unix_s, CLOCK_BOOTTIME=0)
        for module in (kvtier.obs.clock_steps, kvtier.prompts.expiry):
            monkeypatch.setattr(module, "time", clocks)


async def attached(r: Rig) -> PinPeer:
    peer = PinPeer()
    await r.cache.attach(hello_of("listens"), peer)
    r.cache._verified.set()  # there was nothing to adopt
    return peer


def true_pins(r: Rig) -> dict[str, bool]:
    return {prompt.pin_id: prompt.pinned for prompt in r.cache.prompts}


def test_engines_are_notified_of_every_pin_that_begins_changes_or_ends(tmp_path: Path) -> None:
    """The word that a pin had ended could be left out: the engine kept offering chunks that no one wanted."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            peer, pins = await attached(r), r.cache.pins
            await pins.pin(REQUEST)
            (pin_id,) = peer.pinned
            assert peer.pinned == {pin_id: True} == true_pins(r)
            await pins.unpin("p")
            assert peer.pinned == {pin_id: False} == true_pins(r)
            await pins.pin(REQUEST)
            assert peer.pinned == {pin_id: True} == true_pins(r)
            await pins.pin(RequestedPin(name="p", tokens=(4, 5), replace=True))
            assert pin_id not in peer.pinned
            assert list(peer.pinned.values()) == [True]
            assert peer.pinned == true_pins(r)
            await pins.pin(RequestedPin(name="other", tokens=(6,), model="another model"))
            assert len(peer.pinned) == 1, "not its model"
            await pins.unpin("other")
            assert len(peer.pinned) == 1
            await pins.unpin("p")
            await r.cache.evictions.evict("p", force=False)
            assert peer.pinned == {}

    asyncio.run(scenario())


def test_a_pin_expires_when_it_is_due_and_engines_are_notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(loop: JumpingLoop) -> None:
        clock = WallClock(monkeypatch)
        async with rig(tmp_path) as r:
            peer = await attached(r)
            expiring = asyncio.create_task(r.cache.expiry.run())
            await r.cache.pins.pin(RequestedPin(name="p", tokens=(1,), ttl_s=60, priority=3, public=True))
            await r.cache.pins.pin(RequestedPin(name="for-ever", tokens=(2,)))
            for seconds, is_pinned in ((0, True), (59, True), (1, False), (3600, False)):
                clock.unix_s += seconds
                loop.jump(MINUTE_S)
                await at_rest(r.resources)
                assert r.cache.prompts.get("p").pinned is is_pinned
                assert peer.pinned == true_pins(r)
            ended = r.cache.prompts.get("p")
            assert (ended.ttl_s, ended.priority, ended.public) == (0, 0, False)
            assert 0 < ended.expires_unix_s < clock.unix_s, "it says when"
            assert r.cache.prompts.get("for-ever").pinned
            assert {row.name: row.pinned for row in r.resources.ledger.load().prompts} == {"p": False, "for-ever": True}
            expiring.cancel()
            await asyncio.gather(expiring, return_exceptions=True)

    run_with_jumps(scenario)


@pytest.mark.parametrize(
    "again", [RequestedPin(name="p", tokens=(1, 2, 3), ttl_s=600), RequestedPin(name="p", tokens=(7,), replace=True)]
)
def test_a_pin_that_comes_while_an_old_one_expires_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: RequestedPin
) -> None:
    """The expiry waits for the change that goes on; what it found expired may be pinned for longer by then, or another
    prompt of that name."""

    async def scenario(loop: JumpingLoop) -> None:
        clock = WallClock(monkeypatch)
        async with rig(tmp_path) as r:
            peer = await attached(r)
            await r.cache.pins.pin(RequestedPin(name="p", tokens=(1, 2, 3), ttl_s=60))
            clock.unix_s += 100
            expiring = asyncio.create_task(r.cache.expiry.run())
            with gated(monkeypatch, Promises, "change_prompts") as gate:
                pinning = asyncio.create_task(r.cache.pins.pin(again))
                await reached(gate.reached)
                loop.jump(MINUTE_S)
                await eventually(lambda: bool(r.cache.changes.lock._waiters))
                gate.open()
                view = await pinning
            await at_rest(r.resources)
            assert r.cache.prompts.get("p") == view.prompt
            assert view.prompt.pinned
            assert [(row.pin_id, row.pinned) for row in r.resources.ledger.load().prompts] == [
                (view.prompt.pin_id, True)
            ]
            assert peer.pinned == true_pins(r)
            expiring.cancel()
            await asyncio.gather(expiring, return_exceptions=True)

    run_with_jumps(scenario)


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_pin_that_was_unpinned_while_its_end_waited_does_not_end_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_over: bool
) -> None:
    """Chunks that another pin shares were evictable then, and a pin that an operator had made of it was gone."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await attached(r)
            pins, session = r.cache.pins, r.cache.live_sessions[0]
            keys = r.in_host(range(2))
            for name, origin in (("mine", "named"), ("request-x", "request")):
                requested = RequestedPin(name=name, tokens=tuple(range(32)), origin=origin)  # type: ignore[arg-type]
                view = await pins.pin(requested)
                await r.cache.bindings.bind(session, view.prompt.pin_id, keys, 32, "")
            with gated(monkeypatch, Promises, "change_prompts") as gate:
                unpinning = asyncio.create_task(pins.unpin("request-x"))
                await reached(gate.reached)
                if taken_over:
                    again = RequestedPin(name="request-x", tokens=tuple(range(32)))
                    pinning = asyncio.create_task(pins.pin(again))
                    await eventually(lambda: len(r.cache.changes.lock._waiters or ()) == 1)
                ending = asyncio.create_task(pins.forget(view.prompt))
                await eventually(lambda: len(r.cache.changes.lock._waiters or ()) == 1 + taken_over)
                gate.open()
                await asyncio.gather(unpinning, ending, *([pinning] if taken_over else []))
            assert {r.chunk(number).num_pins for number in range(2)} == {1 + taken_over}
            left = r.cache.prompts.get("request-x")
            assert (left.pinned, left.origin) == (taken_over, "named" if taken_over else "request")
            r.table.check()

    asyncio.run(scenario())
