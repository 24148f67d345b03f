"""Pins end by the store's clock, which a host's clock does not move: not by being wrong, nor by being set right."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtier.config.model import RemoteConfig
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.tokens import TokenIds
from kvtier.fleet.fleet import Fleet
from kvtier.fleet.store_clock import StoreClock
from kvtier.obs.clock_steps import WAIT_S, ClockSteps
from kvtier.outcomes.recent_requests import EndedRequest
from kvtier.prompts.book import PinUpdate, RequestedPin
from kvtier.prompts.by_request.request_pins import AskedPins, AskedPrefix
from kvtier.service.cache import Cache
from kvtier.sessions.session import Session
from tests.fakes.fleet_hosts import tokens_of
from tests.fakes.memory_store import Bucket, MemoryStore
from tests.fakes.rig import ListPeer, eventually, hello_of
from tests.fakes.scripted_engine import config_in

YEAR_S, DAY_S, FIVE_MINUTES_S = 365 * 86400, 86400, 300
NOW_S = 1_800_000_000.0


@dataclass
class Clocks:
    """The store's, and that of all hosts: how far it is ahead."""

    ahead_s: float = 0.0
    passed_s: float = 0.0

    def store(self) -> float:
        """Return the right time."""
        return NOW_S + self.passed_s

    def host(self) -> float:
        """Return what hosts take for it."""
        return NOW_S + self.passed_s + self.ahead_s

    def steady(self) -> float:
        """Return seconds since some time."""
        return 1000 + self.passed_s


@dataclass
class World:
    """One host or more."""

    clocks: Clocks
    caches: list[Cache] = field(default_factory=list)
    fleets: list[Fleet] = field(default_factory=list)

    async def look(self) -> None:
        """Have every host end what is over, and tell the others."""
        for cache in self.caches:
            await cache.expiry.look()
        for _ in range(2):
            for fleet in self.fleets:
                await fleet.look()

    async def measure(self) -> None:
        """Have hosts read the store's clock."""
        for fleet in self.fleets:
            await fleet.clock.measure(fleet.host, "1", [])

    def pinned(self) -> list[list[str]]:
        """Return the names that each host has pinned."""
        return [sorted(prompt.name for prompt in cache.prompts.pinned()) for cache in self.caches]


Scenario = Callable[[World], Awaitable[None]]


def play(folder: Path, monkeypatch: pytest.MonkeyPatch, scenario: Scenario, *, hosts: str, ahead_s: float) -> None:
    """Run a scenario on hosts whose clocks are wrong; without a name of a host there is one, and no fleet."""
    clocks = Clocks(ahead_s=ahead_s)
    monkeypatch.setattr(time, "time", clocks.host)

    async def run() -> None:
        async with world(folder, clocks, hosts) as made:
            await scenario(made)

    asyncio.run(run())


@asynccontextmanager
async def world(folder: Path, clocks: Clocks, hosts: str) -> AsyncIterator[World]:
    made, bucket = World(clocks), Bucket(clock=clocks.store)
    try:
        for name in hosts or "-":
            (folder / name).mkdir()
            made.caches.append(cache := await Cache.open(config_in(folder / name)))
            cache.pins.host_clock = ClockSteps(clocks.host, clocks.steady)
            cache.pins.now_unix_s = cache.pins.host_clock.now_unix_s
            if hosts:
                fleet = Fleet(cache, RemoteConfig(url="memory://f"), MemoryStore(bucket), host=name)
                made.fleets.append(fleet)
                fleet.clock._host_clock, fleet.clock._now_s = clocks.host, clocks.steady
                fleet.start()
                await fleet._tasks.close()  # the test looks itself
        yield made
    finally:
        for fleet in made.fleets:
            await fleet.close()
        for cache in made.caches:
            await cache.close()


async def ask(cache: Cache, session: Session, peer: ListPeer, ttl_s: int) -> float:
    """Have a request ask for a pin; return in how many seconds it is said to end."""
    ask_id = len(peer.pin_answers) + 1
    prefix = AskedPrefix(digest=bytes(16), num_tokens=64, ttl_s=ttl_s)
    asked = AskedPins(
        ask_id=ask_id,
        prefixes=(prefix,),
        tokens=TokenIds(range(64)),
        priority=0,
        name="",
        owner="a" * 16,
        lora_name="",
        lora_path="",
        cache_salt="",
    )
    cache.request_pins.ask(session, asked)
    await eventually(lambda: ask_id in peer.pin_answers)
    ((answer,), problem) = peer.pin_answers[ask_id]
    assert not problem
    return answer.ends_in_s


# The clock


def test_steps_of_the_hosts_clock_change_nothing_once_the_store_has_said_its_time() -> None:
    async def run() -> None:
        clocks = Clocks(ahead_s=-2 * DAY_S)
        store = MemoryStore(Bucket(clock=clocks.store))
        clock = StoreClock(store, host_clock=clocks.host, now_s=clocks.steady)
        assert (clock.is_measured, clock.now_unix_s(), clock.offset_s) == (False, clocks.host(), 0.0)
        await clock.measure("a", "1", [])
        assert (clock.is_measured, clock.now_unix_s(), clock.offset_s) == (True, clocks.store(), 2 * DAY_S)
        clocks.passed_s += 100
        for ahead_s in (0.0, 2 * DAY_S):
            clocks.ahead_s = ahead_s
            assert (clock.now_unix_s(), clock.offset_s) == (clocks.store(), -ahead_s)

    asyncio.run(run())


def test_hosts_are_read_some_at_once_and_those_that_were_there_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, for as long as round trips to all that ever were take, for a viewer that asked."""
    monkeypatch.setattr("kvtier.fleet.store_clock._MAX_HOSTS", 40)

    async def run() -> None:
        clocks, reading = Clocks(), list[int]()
        store = MemoryStore(Bucket(clock=clocks.store))
        clock = StoreClock(store, host_clock=clocks.host, now_s=clocks.steady)
        for number in range(50):
            clocks.passed_s += 1
            await clock.measure(f"host-{number:02}", "1", [])

        async def meanwhile(operation: str, key: str) -> None:
            if operation == "get":
                reading.append(1 if not reading else reading[-1] + 1)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                reading.append(reading[-1] - 1)

        store.meanwhile = meanwhile
        assert [each.host for each in await clock.hosts()] == [f"host-{number:02}" for number in range(10, 50)]
        assert store.calls["get"] == 40
        assert max(reading) > 1

    asyncio.run(run())


# A clock that is set right


@pytest.mark.parametrize("ahead_s", [-2 * DAY_S, 2 * DAY_S])
def test_setting_a_hosts_clock_right_ends_no_pin_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """What was measured before was added to the right time: a pin of a day ended at once, on all hosts."""

    async def scenario(world: World) -> None:
        await world.measure()
        await world.caches[0].pins.pin(RequestedPin(name="day", tokens=tokens_of(1), ttl_s=DAY_S))
        await world.look()
        assert world.pinned() == [["day"], ["day"]]
        world.clocks.ahead_s = 0.0
        await world.look()
        assert world.pinned() == [["day"], ["day"]]
        await world.measure()
        await world.look()
        assert world.pinned() == [["day"], ["day"]]
        world.clocks.passed_s += DAY_S + 5
        await world.look()
        assert world.pinned() == [[], []]

    play(tmp_path, monkeypatch, scenario, hosts="ab", ahead_s=ahead_s)


def test_before_the_store_has_said_its_time_a_host_ends_no_shared_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that starts with a wrong clock ended the pins of the fleet. What is not shared ends by its own clock."""

    async def scenario(world: World) -> None:
        a, b = world.caches
        peer = ListPeer()
        session = await b.attach(hello_of("engine"), peer)
        await world.fleets[0].clock.measure("a", "1", [])
        await a.pins.pin(RequestedPin(name="day", tokens=tokens_of(1), ttl_s=DAY_S))
        await world.look()
        await ask(b, session, peer, FIVE_MINUTES_S)
        world.clocks.ahead_s = 2 * DAY_S
        await world.look()
        assert [len(names) for names in world.pinned()] == [1, 2], (
            "the request's pin has not ended: it may be set right"
        )
        world.clocks.passed_s += WAIT_S
        await world.look()
        assert world.pinned() == [["day"], ["day"]], "the request's pin has ended"

    play(tmp_path, monkeypatch, scenario, hosts="ab", ahead_s=0.0)


# Ends are made by the clock that judges them


@pytest.mark.parametrize("hosts", ["", "a"], ids=["alone", "fleet"])
@pytest.mark.parametrize("ahead_s", [-400.0, 0.0, 400.0])
def test_a_pin_of_five_minutes_lasts_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, ahead_s: float
) -> None:
    """Ends were of the host's clock, and judged by the store's: with that 400 s ahead they were over at once."""

    async def scenario(world: World) -> None:
        (cache,) = world.caches
        peer = ListPeer()
        session = await cache.attach(hello_of("engine"), peer)
        await world.measure()
        await cache.pins.pin(RequestedPin(name="made", tokens=tokens_of(1), ttl_s=FIVE_MINUTES_S))
        await cache.pins.pin(RequestedPin(name="changed", tokens=tokens_of(2)))
        await cache.pins.update(PinUpdate(name="changed", ttl_s=FIVE_MINUTES_S))
        await cache.pins.pin(RequestedPin(name="before", tokens=tokens_of(3)))
        taken = RequestedPin(name="taken", tokens=tokens_of(3), ttl_s=FIVE_MINUTES_S)
        await cache.renames.take_over(cache.prompts.get("before"), taken)
        assert await ask(cache, session, peer, 2 * FIVE_MINUTES_S) == pytest.approx(750, abs=1)
        (requested,) = (prompt.name for prompt in cache.prompts.pinned() if prompt.origin == "request")
        world.clocks.passed_s += FIVE_MINUTES_S - 5
        await world.look()
        assert world.pinned() == [["changed", "made", requested, "taken"]]
        assert await ask(cache, session, peer, FIVE_MINUTES_S) == pytest.approx(750 - 295, abs=1)
        world.clocks.passed_s += 10
        await world.look()
        assert world.pinned() == [[requested]]
        world.clocks.passed_s += 450
        await world.look()
        assert world.pinned() == [[]]

    play(tmp_path, monkeypatch, scenario, hosts=hosts, ahead_s=ahead_s)


@pytest.mark.parametrize("hosts", ["", "a"], ids=["alone", "fleet"])
@pytest.mark.parametrize("ahead_s", [-400.0, 0.0, 400.0])
def test_a_use_moves_a_sliding_end_by_the_same_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, ahead_s: float
) -> None:
    async def scenario(world: World) -> None:
        (cache,) = world.caches
        session = await cache.attach(hello_of("engine"), ListPeer())
        await world.measure()
        pin = RequestedPin(name="used", tokens=tokens_of(1), ttl_s=FIVE_MINUTES_S, sliding=True)
        pin_id = (await cache.pins.pin(pin)).prompt.pin_id
        for _ in range(3):
            world.clocks.passed_s += FIVE_MINUTES_S - 5
            await cache.outcomes.take(session, iter([use(pin_id, time.time())]), 0)
            await world.look()
            assert world.pinned() == [["used"]]
            if hosts:
                world.clocks.ahead_s -= 1000  # the clock is set back
        world.clocks.passed_s += FIVE_MINUTES_S + 5
        await world.look()
        assert world.pinned() == [[]]

    play(tmp_path, monkeypatch, scenario, hosts=hosts, ahead_s=ahead_s)


@pytest.mark.parametrize("hosts", ["", "a"], ids=["alone", "fleet that is away"])
def test_a_step_that_is_set_right_moves_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    """Pins that were made or used meanwhile stayed for as long as the clock had been ahead: a year."""

    async def scenario(world: World) -> None:
        (cache,) = world.caches
        peer = ListPeer()
        session = await cache.attach(hello_of("engine"), peer)
        pin = RequestedPin(name="used", tokens=tokens_of(1), ttl_s=FIVE_MINUTES_S, sliding=True)
        pin_id = (await cache.pins.pin(pin)).prompt.pin_id
        await ask(cache, session, peer, FIVE_MINUTES_S)
        world.clocks.passed_s += 60
        world.clocks.ahead_s += YEAR_S
        await world.look()
        await cache.pins.pin(RequestedPin(name="made", tokens=tokens_of(2), ttl_s=FIVE_MINUTES_S))
        await cache.outcomes.take(session, iter([use(pin_id, time.time())]), 0)
        assert await ask(cache, session, peer, 2 * FIVE_MINUTES_S) == pytest.approx(750, abs=1)
        await world.look()
        assert len(world.pinned()[0]) == 3
        world.clocks.ahead_s = 0.0
        await world.look()
        assert all(each.expires_unix_s < time.time() + 760 for each in cache.prompts.pinned())
        left_s = [cache.prompts.get(name).expires_unix_s - time.time() for name in ("made", "used")]
        assert left_s == pytest.approx([FIVE_MINUTES_S, FIVE_MINUTES_S], abs=1)

    play(tmp_path, monkeypatch, scenario, hosts=hosts, ahead_s=0.0)


def test_a_step_that_counts_leaves_pins_what_was_left_of_their_ttl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World) -> None:
        (cache,) = world.caches
        for number, (name, ttl_s) in enumerate([("over", 60), ("hour", 3600), ("days", 7 * DAY_S), ("always", 0)]):
            await cache.pins.pin(RequestedPin(name=name, tokens=tokens_of(number), ttl_s=ttl_s))
        days_end_s = cache.prompts.get("days").expires_unix_s
        world.clocks.passed_s += 90
        world.clocks.ahead_s += DAY_S
        await world.look()
        await cache.pins.pin(RequestedPin(name="meanwhile", tokens=tokens_of(9), ttl_s=3600))
        world.clocks.passed_s += WAIT_S
        for _ in range(2):
            await world.look()
            assert world.pinned() == [["always", "days", "hour", "meanwhile"]]
        left_s = {name: cache.prompts.get(name).expires_unix_s - time.time() for name in ("hour", "meanwhile")}
        assert left_s == pytest.approx({"hour": 3600 - 90 - WAIT_S, "meanwhile": 3600 - WAIT_S}, abs=1)
        assert cache.prompts.get("days").expires_unix_s == days_end_s
        world.clocks.passed_s += 3600
        await world.look()
        assert world.pinned() == [["always", "days"]]

    play(tmp_path, monkeypatch, scenario, hosts="", ahead_s=0.0)


def use(pin_id: str, at_unix_s: float) -> EndedRequest:
    """Return a request that began with a pin."""
    return EndedRequest(
        request_id="r",
        outcome=RequestOutcome.HIT,
        pin_id=pin_id,
        prompt_tokens=900,
        shared_tokens=800,
        device_tokens=0,
        host_tokens=800,
        disk_tokens=0,
        ended_unix_s=at_unix_s,
        namespace_id="",
    )
