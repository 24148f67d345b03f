"""Three hosts pin, change, unpin and restart while their store fails in every way, also while they talk to it: they
agree in the end, no pin is lost but by someone who knew it and ended or replaced it, and what was ended stays so."""

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from kvtier.errors import PromptNotPinnedError, RemoteStoreError
from kvtier.prompts.book import PinUpdate, RequestedPin
from tests.fakes.fleet_hosts import FleetHost, fleet_host, tokens_of
from tests.fakes.memory_store import Bucket, MemoryStore

NAMES = ("one", "two")
HOSTS = ("a", "b", "c")

hosts = st.sampled_from(HOSTS)
operations = st.sampled_from(("swap", "put_new", "put_stream", "get", "list"))
asked = st.sampled_from(("pin", "update", "unpin"))
steps = st.one_of(
    st.tuples(asked, hosts, st.sampled_from(NAMES)),
    st.tuples(st.just("look"), hosts, st.just("")),
    st.tuples(st.just("looks"), hosts, hosts),
    st.tuples(st.just("down"), hosts, st.just("")),
    st.tuples(st.just("up"), hosts, st.just("")),
    st.tuples(st.just("lose"), hosts, operations),
    st.tuples(st.just("cancel"), hosts, operations),
    # An operator's step, and a look in which another one follows (here or on a host), before or after such a call.
    st.tuples(
        st.just("during"),
        hosts,
        st.tuples(st.sampled_from(NAMES), asked, operations, st.booleans(), asked, st.just("") | hosts),
    ),
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

    async def operate(self, what: str, on: str, of: str) -> None:
        """Do what an operator does; what is known of the name then is ended by it."""
        host = self.running[on][1]

        def now() -> None:
            known = {content for name, content in host.pinned().items() if name == of}
            self.ended.update(known if what != "update" else ())
            self.pinned.update([number] if what == "pin" else ())

        number = self.number = self.number + 1
        if what == "pin":
            pin = RequestedPin(name=of, tokens=tokens_of(number), replace=True, priority=number % 7)
            await host.cache.pins.apply([pin], precondition=now)
        elif of in host.pinned():
            with suppress(PromptNotPinnedError):  # it has ended meanwhile
                if what == "unpin":
                    await host.cache.pins.unpin(of, precondition=now)
                else:
                    await host.cache.pins.update(PinUpdate(name=of, priority=number % 7), precondition=now)

    async def step(self, what: str, on: str, of: Any) -> None:
        host = self.running[on][1]
        if what in ("pin", "update", "unpin"):
            await self.operate(what, on, of)
        elif what == "look":
            await self.look(on)
        elif what == "looks":
            await asyncio.gather(self.look(on), self.look(of))
        elif what in ("down", "up"):
            host.store.down = what == "down"
        elif what == "lose":
            host.store.lose = once(lambda operation: operation == of)
        elif what == "cancel":
            is_it = once(lambda operation: operation == of)

            async def cancel(operation: str, key: str) -> None:
                if is_it(operation, key):
                    raise asyncio.CancelledError

            host.store.meanwhile = cancel
        elif what == "during":
            name, first, called, is_after, second, by = of
            calls = itertools.count()
            is_now = once(lambda operation: operation == called and next(calls) == (is_after and called != "list"))

            async def operate(operation: str, key: str) -> None:
                if is_now(operation, key):
                    await self.operate(second, by or on, name)

            await self.operate(first, on, name)
            host.store.meanwhile = operate
            await self.look(on)
        elif what == "restart":
            await self.stop(on)
            await self.start(on)

    async def look(self, on: str) -> None:
        try:
            await self.running[on][1].sync.look()
        except (RemoteStoreError, asyncio.CancelledError):
            return

    async def heal(self) -> None:
        for _, host in self.running.values():
            host.store.down, host.store.lose = False, lambda operation, key: False
            host.store.meanwhile = MemoryStore().meanwhile
        for _ in range(6):
            for name in HOSTS:
                await self.running[name][1].sync.look()


def once(is_it: Callable[[str], bool]) -> Callable[[str, str], bool]:
    """Return what says of one call that it is the one."""
    left = [1]

    def is_now(operation: str, key: str) -> bool:
        found = left[0] > 0 and is_it(operation)
        left[0] -= found
        return found

    return is_now


@given(st.lists(steps, max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_hosts_agree_and_lose_no_pin(actions: list[tuple[str, str, Any]]) -> None:
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
            assert set(views[0].values()) == fleet.pinned - fleet.ended
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
