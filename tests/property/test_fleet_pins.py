"""Three hosts pin, change, unpin and restart while their store fails in every way: they agree in the end, and no pin is
lost but by someone who knew it and ended or replaced it."""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from kvtier.errors import RemoteStoreError
from kvtier.prompts.book import PinUpdate
from tests.fakes.fleet_hosts import FleetHost, fleet_host
from tests.fakes.memory_store import Bucket

NAMES = ("one", "two")
HOSTS = ("a", "b", "c")

hosts = st.sampled_from(HOSTS)
steps = st.one_of(
    st.tuples(st.just("pin"), hosts, st.sampled_from(NAMES)),
    st.tuples(st.just("update"), hosts, st.sampled_from(NAMES)),
    st.tuples(st.just("unpin"), hosts, st.sampled_from(NAMES)),
    st.tuples(st.just("look"), hosts, st.just("")),
    st.tuples(st.just("looks"), hosts, hosts),
    st.tuples(st.just("down"), hosts, st.just("")),
    st.tuples(st.just("up"), hosts, st.just("")),
    st.tuples(st.just("lose"), hosts, st.sampled_from(("swap", "put_new", "put_stream", "get", "list"))),
    st.tuples(st.just("restart"), hosts, st.just("")),
)


@dataclass
class Fleet:
    """The hosts, and the model: contents that were pinned, and those that someone who knew them ended."""

    folder: Path
    bucket: Bucket = field(default_factory=Bucket)
    running: dict[str, tuple[AsyncExitStack, FleetHost]] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    number: int = 0

    async def start(self, name: str) -> None:
        stack = AsyncExitStack()
        host = await stack.enter_async_context(fleet_host(self.folder / name, self.bucket, name, seed=self.number))
        self.running[name] = stack, host

    async def stop(self, name: str) -> None:
        stack, _ = self.running.pop(name)
        await stack.aclose()

    async def step(self, what: str, on: str, of: str) -> None:
        host = self.running[on][1]
        known = {name: content for name, content in host.pinned().items() if name == of}
        if what == "pin":
            self.number += 1
            await host.pin(of, self.number, priority=self.number % 7)
            self.pinned.add(self.number)
            self.ended.update(known.values())
        elif what == "update" and known:
            self.number += 1
            await host.cache.pins.update(PinUpdate(name=of, priority=self.number % 7))
        elif what == "unpin" and known:
            await host.cache.pins.unpin(of)
            self.ended.update(known.values())
        elif what == "look":
            await self.look(on)
        elif what == "looks":
            await asyncio.gather(self.look(on), self.look(of))
        elif what in ("down", "up"):
            host.store.down = what == "down"
        elif what == "lose":
            left = [1]

            def lose(operation: str, key: str) -> bool:
                is_it = operation == of and left[0] > 0
                left[0] -= is_it
                return is_it

            host.store.lose = lose
        elif what == "restart":
            await self.stop(on)
            await self.start(on)

    async def look(self, on: str) -> None:
        try:
            await self.running[on][1].sync.look()
        except RemoteStoreError:
            return

    async def heal(self) -> None:
        for _, host in self.running.values():
            host.store.down, host.store.lose = False, lambda operation, key: False
        for _ in range(6):
            for name in HOSTS:
                await self.running[name][1].sync.look()


@given(st.lists(steps, max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_hosts_agree_and_lose_no_pin(actions: list[tuple[str, str, str]]) -> None:
    async def run(folder: Path) -> None:
        fleet = Fleet(folder)
        for name in HOSTS:
            await fleet.start(name)
        try:
            for what, on, of in actions:
                await fleet.step(what, on, of)
            await fleet.heal()
            views = [host.pinned() for _, host in fleet.running.values()]
            assert views[0] == views[1] == views[2]
            assert fleet.pinned - fleet.ended <= set(views[0].values())
            hows = [
                {prompt.name: prompt.priority for prompt in host.cache.prompts.pinned()}
                for _, host in fleet.running.values()
            ]
            assert hows[0] == hows[1] == hows[2]
        finally:
            for name in list(fleet.running):
                await fleet.stop(name)

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
