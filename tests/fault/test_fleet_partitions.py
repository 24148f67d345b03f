"""Three real daemons with three folders and wrong clocks, each behind a network of its own, change the same pins at
once while everything fails: in the end all show the same pins, no pin is lost but by someone who knew it, and no byte
of KV is wrong. The server is moto's or (`make test-fleet`) Ceph's.
"""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from kvtier.core.layout import ChunkKey
from kvtier.errors import (
    ConnectionLostError,
    DaemonUnreachableError,
    PromptExistsError,
    PromptNotFoundError,
    PromptNotPinnedError,
)
from tests.fakes.fault_proxy import Fault, Head, Link
from tests.fakes.fleet_daemons import CONVERGED_S, FleetDaemon, Pinned, eventually, fleet_daemons, wait_converged
from tests.fakes.s3_servers import S3_SERVERS, running_server
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key
from tests.fakes.shifted_clock import set_shift
from tests.fakes.waiting import wait_for

ROUNDS = int(os.environ.get("KVTIER_FLEET_ROUNDS", "1"))
CLOCKS_S = (0.0, 290.0, -240.0)
NUM_STEPS, PAUSE_S = 8, 0.3
HOUR_S = 3600.0
NUM_CHUNKS = 3

contents = itertools.count(64)
"""Each pin has another content, which is named by its number of tokens."""

pytestmark = pytest.mark.timeout(300)


def tokens_of(content: int) -> list[int]:
    return [content, *range(1, content)]


def keys_of(content: int) -> list[ChunkKey]:
    return [chunk_key((content, number)) for number in range(NUM_CHUNKS)]


@dataclass
class World:
    """The hosts, their store, and what was asked of them.

    Attributes:
        clock: The store's; None: it cannot be set.
        begun: Name under which a content was pinned, or may have been.
        pinned: Contents whose pin was acknowledged.
        ended: Contents that a host ended or replaced, and had; at worst, may have had.
        ops: What was done, in order, for a failure's message.
    """

    hosts: list[FleetDaemon]
    clock: Path | None
    begun: dict[int, str] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    ops: list[str] = field(default_factory=list)
    passed_s: float = 0.0

    def work(self, names: Sequence[str], seed: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Have all hosts change these names at once, until something else that happens is over."""
        over = threading.Event()
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            done = [pool.submit(self._work_on, host, names, Random(seed + host.name), over) for host in self.hosts]
            try:
                meanwhile()
            finally:
                over.set()
            for each in done:
                each.result()

    def _work_on(self, host: FleetDaemon, names: Sequence[str], random: Random, over: threading.Event) -> None:
        num_steps = 0
        while num_steps < NUM_STEPS or not over.is_set():
            num_steps += 1
            time.sleep(random.random() * PAUSE_S)
            what = random.choice((self.pin, self.pin, self.replace, self.unpin, self.set, self.set, self.pin_same))
            name = random.choice(names)
            result = "refused"
            with suppress(PromptExistsError, PromptNotFoundError, PromptNotPinnedError):
                result = what(host, name, random)
            self.ops.append(f"{time.time():.2f} {host.name} {what.__name__} {name}: {result}")

    def begun_as(self, name: str) -> set[int]:
        """Return the contents that were pinned under a name, or may have been; other threads add some meanwhile."""
        return {content for content, other in list(self.begun.items()) if other == name}

    def pin(self, host: FleetDaemon, name: str, random: Random, *, replace: bool = False) -> str:
        content = next(contents)
        self.begun[content] = name
        before = self.begun_as(name) - {content}
        try:
            host.client.pin(name, tokens=tokens_of(content), priority=random.randint(0, 9), replace=replace, warm=False)
        except (DaemonUnreachableError, ConnectionLostError):
            self.ended |= before if replace else set()
            return f"{content} unknown"
        if replace:  # it may have had any that was pinned somewhere before it was done
            self.ended |= self.begun_as(name) - {content} | before
        self.pinned.add(content)
        return str(content)

    def replace(self, host: FleetDaemon, name: str, random: Random) -> str:
        return self.pin(host, name, random, replace=True)

    def pin_same(self, host: FleetDaemon, name: str, random: Random) -> str:
        """Pin what other hosts pin too, under the same name: that is one pin, and never a conflict."""
        with suppress(DaemonUnreachableError, ConnectionLostError):
            host.client.pin(f"{name}-same", tokens=range(40), warm=False)
        return ""

    def unpin(self, host: FleetDaemon, name: str, random: Random) -> str:
        begun = self.begun_as(name)
        try:
            known = host.client.get(name)
            if not known.pinned:
                return "not pinned"
            ended = host.client.unpin(name)
        except (DaemonUnreachableError, ConnectionLostError):
            self.ended |= begun
            return "unknown"
        if ended.pinned:  # it was pinned again at once
            self.ended |= self.begun_as(name)
            return "any"
        self.ended.add(ended.num_tokens)
        return str(ended.num_tokens)

    def set(self, host: FleetDaemon, name: str, random: Random) -> str:
        with suppress(DaemonUnreachableError, ConnectionLostError):
            host.client.set(name, priority=random.randint(0, 9), labels={"by": host.name})
        return ""

    def heal(self) -> None:
        for host in self.hosts:
            host.proxy.heal()
            if not host.daemon.is_running:
                host.start()

    def check(self) -> dict[str, Pinned]:
        """All hosts agree, and no pin is lost; returns the pins."""
        view = wait_converged(self.hosts)
        lost = self.pinned - self.ended - {each.num_tokens for each in view.values()}
        assert not lost, "\n".join([f"lost {lost}, {view}", *self.ops, *(h.daemon.log_tail(60) for h in self.hosts)])
        return view

    def pass_time(self, seconds: float) -> None:
        """Have all clocks go on, the store's too."""
        assert self.clock is not None
        self.passed_s += seconds
        set_shift(self.clock, self.passed_s)
        for host, ahead_s in zip(self.hosts, CLOCKS_S, strict=True):
            host.set_clock(ahead_s + self.passed_s)

    async def compute(self, host: FleetDaemon, name: str) -> int:
        """Pin a prompt on a host and have an engine compute it there; returns its content."""
        content = next(contents)
        async with ScriptedEngine(host.config) as engine:
            prompt = host.client.pin(name, tokens=tokens_of(content), warm=False)
            self.begun[content] = name
            self.pinned.add(content)
            await engine.bind(prompt.pin_id, keys_of(content))
            await engine.store(keys_of(content))
            await asyncio.to_thread(eventually, lambda: host.client.get(name).state.value == "durable")
        return content

    async def verify(self, computed: dict[str, int]) -> None:
        """Every host has the KV of these prompts, or gets it from the store, and every byte is right."""
        for host in self.hosts:
            async with ScriptedEngine(host.config) as engine, asyncio.timeout(90):
                for name, content in computed.items():
                    prompt = host.client.get(name)
                    if not prompt.bindings:
                        await engine.bind(prompt.pin_id, keys_of(content))
                for number, content in enumerate(computed.values()):
                    for again in itertools.count():
                        if len(await engine.verify(1 + number + 100 * again, keys_of(content))) == NUM_CHUNKS:
                            break
                        await asyncio.sleep(0.2)


@pytest.fixture(scope="module", params=S3_SERVERS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fleet")
    clock = folder / "clock"
    set_shift(clock, 0.0)
    with running_server(request.param, clock) as url, fleet_daemons(folder, url, CLOCKS_S) as hosts:
        yield World(hosts, clock if request.param == "moto" else None)


def sometimes(random: Random, share: float, which: Callable[[Head], bool]) -> Callable[[Head], bool]:
    return lambda head: which(head) and random.random() < share


def harm(
    *faults: Fault, share: float, which: Callable[[Head], bool] = lambda head: True
) -> Callable[[World, Random], None]:
    """Harm a share of the requests; what follows comes after each of the faults has met one."""

    def begin(world: World, random: Random) -> None:
        proxies = [host.proxy for host in world.hosts]
        for proxy in proxies:
            proxy.num_faults.clear()
            for fault in faults:
                proxy.harm(fault, 10**6, sometimes(random, share, which))
        eventually(lambda: all(any(proxy.num_faults[fault] for proxy in proxies) for fault in faults))

    return begin


def part(link: Link) -> Callable[[World, Random], None]:
    def begin(world: World, random: Random) -> None:
        cut_off([random.choice(world.hosts)], link)

    return begin


def part_all(world: World, random: Random) -> None:
    cut_off(world.hosts, Link.REFUSES)


def cut_off(hosts: Sequence[FleetDaemon], link: Link) -> None:
    """Part hosts from the store, and wait until each has met that."""
    for host in hosts:
        host.proxy.num_parted = 0
        host.proxy.cut_off(link)
    eventually(lambda: all(host.proxy.num_parted for host in hosts))


def kill_some(world: World, random: Random) -> None:
    """Kill and start each host once, just when a write of it is on its way."""
    for host in random.sample(world.hosts, 3):
        requests = host.proxy.num_requests
        num_writes = requests["PUT"]
        wait_for(lambda came=requests, num=num_writes: came["PUT"] > num, CONVERGED_S)  # type: ignore[misc]
        host.kill()
        host.start()


def is_read(head: Head) -> bool:
    return head.words[0] == "GET"


TROUBLES: dict[str, Callable[[World, Random], None]] = {
    "races": lambda world, random: None,
    "lost answers": harm(Fault.LOST_ANSWER, share=0.4, which=lambda head: head.is_conditional_write),
    "late answers": harm(Fault.LATE_ANSWER, share=0.1, which=lambda head: head.is_conditional_write),
    "errors": harm(
        *(Fault.UNAVAILABLE, Fault.ERROR, Fault.CUT_REQUEST, Fault.LOST_ANSWER, Fault.CUT_ANSWER), share=0.08
    ),
    "wrong bytes": harm(Fault.SPOIL_ANSWER, share=0.2, which=is_read),
    "partition": part(Link.REFUSES),
    "silent partition": part(Link.SILENT),
    "no store": part_all,
    "kill -9": kill_some,
}


@pytest.mark.parametrize("number", range(ROUNDS))
@pytest.mark.parametrize("trouble", TROUBLES)
def test_hosts_agree_and_lose_no_pin(trouble: str, number: int, world: World) -> None:
    random = Random(f"{trouble} {number}")
    names = [f"{trouble.replace(' ', '-')}-{number}-{each}" for each in range(3)]
    world.work(names, f"{trouble} {number} before")
    try:
        world.work(names, f"{trouble} {number}", lambda: TROUBLES[trouble](world, random))
    finally:
        world.heal()
    world.check()


def test_pins_and_kv_of_hosts_that_are_killed_together_are_there_again(world: World) -> None:
    """Each host computes a prompt; one host loses all that it had. Every byte is verified on each of them."""

    async def compute() -> dict[str, int]:
        names = [f"computed-by-{host.name}" for host in world.hosts]
        return {name: await world.compute(host, name) for host, name in zip(world.hosts, names, strict=True)}

    computed = asyncio.run(compute())
    eventually(lambda: all(host.client.remote().num_kv_objects >= len(computed) for host in world.hosts))
    before = world.check()
    for host in world.hosts:
        host.kill()
    world.hosts[0].lose_everything()
    world.heal()
    assert world.check() == before
    asyncio.run(world.verify(computed))
    # It is counted after the last byte is here.
    eventually(lambda: world.hosts[0].client.remote().num_restored == len(computed))


def test_a_partition_of_an_hour_and_two_collectors_at_once(world: World) -> None:
    """The pins that a host could not see for an hour change on both sides; then all hosts collect garbage at once.

    What no manifest names goes, what one names stays, also what came from the host that was away.
    """
    if world.clock is None:
        pytest.skip("the clock of this store cannot be set")
    alone, others = world.hosts[2], world.hosts[:2]
    names = [f"hour-{number}" for number in range(3)]
    num_before = alone.client.remote().num_kv_objects
    computed = {"hour-kept": asyncio.run(world.compute(others[0], "hour-kept"))}
    ended = asyncio.run(world.compute(others[1], "hour-ended"))
    eventually(lambda: {"hour-kept", "hour-ended"} <= alone.pins().keys())
    eventually(lambda: alone.client.remote().num_kv_objects >= num_before + 2)
    world.work(names, "hour before")
    alone.proxy.cut_off()
    try:
        world.work(names, "hour")
        others[0].client.unpin("hour-ended")
        world.ended.add(ended)
        computed["hour-alone"] = asyncio.run(world.compute(alone, "hour-alone"))
        wait_converged(others)
        num_objects = others[0].client.remote().num_kv_objects
        world.pass_time(HOUR_S)
        for host in others:  # at its start a host collects, if no host has for a while
            host.kill()
        for host in others:
            host.start()
        eventually(lambda: any("garbage_deleted" in host.daemon.new_log_text() for host in others))
        wait_converged(others)
    finally:
        world.heal()
    view = world.check()
    assert "hour-ended" not in view
    assert {"hour-kept", "hour-alone"} <= view.keys()
    eventually(lambda: alone.client.remote().num_kv_objects >= num_objects)
    asyncio.run(world.verify(computed))
