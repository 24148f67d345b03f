"""Whatever becomes of chunks, once all is quiet every engine's mirror says what the daemon holds: no more, no less.

A chunk that an engine takes for held is never stored again; one that it takes for lost is never asked for.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.prompts.book import RequestedPin
from kvtier.tiering.command_eviction import EvictTier
from tests.fakes.rig import Rig, at_once, eventually, keys_of, rig
from tests.fakes.scripted_engine import ONE_GROUP, host_bytes_for
from tests.property.test_compaction import NUM_CHUNKS, numbers

T = TypeVar("T")
ROW_BYTES = 8192


class EnginesKnowMachine(RuleBasedStateMachine):
    """Two engines, one of which comes and goes, over a small arena and a small disk."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        opened = rig(self.folder, store="all", host_bytes=host_bytes_for(6), disk_bytes=60_000)
        self.rig: Rig = self.run(self.stack.enter_async_context(opened))
        self.rig.cache._verified.set()  # there was nothing to adopt
        self.session, self.peer = self.run(self.rig.session())
        self.late, self.late_peer = self.run(self.attached())
        self.num_acquires = 0

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.run(self.stack.aclose())
            self.loop.close()
            shutil.rmtree(self.folder)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    async def attached(self) -> Any:
        session, peer = await self.rig.session()
        session.start_task("held", session.send_inventory())
        return session, peer

    async def quiet(self) -> None:
        write_back, promoter = self.rig.namespace.write_back, self.rig.namespace.promoter
        await eventually(lambda: not write_back.queue.num_bytes and not promoter._batches and not promoter._queue)
        await self.rig.namespace.tasks.join()

    @rule(chosen=numbers)
    def store(self, chosen: list[int]) -> None:
        """As the end of a store does it, without the engine's half."""

        async def stored() -> None:
            for number in chosen:
                if not self.rig.namespace.host.num_takable:
                    self.rig.namespace.tiers.evict_rows(1, unpinned_only=True)
                if self.rig.namespace.host.num_takable and not self.rig.table.holds(keys_of([number])[0]):
                    for ref in await self.rig.namespace.host.allocate(1):
                        assert self.rig.namespace.host.seal(ref)
                        key = keys_of([number])[0]
                        if self.session.stores._commit(key, ref, 0):
                            self.rig.namespace.inventory.announce([key], held=True)

        self.run(stored())

    @rule(chosen=numbers)
    def write(self, chosen: list[int]) -> None:
        """Chunks come to lie on disk, as an import has it."""
        if self.rig.resources.disk_usage.fits(6000 * len(chosen)):
            self.run(self.rig.on_disk(chosen))
            self.rig.namespace.inventory.announce(keys_of(chosen), held=True)

    @rule(meanwhile=st.sampled_from(["nothing", "evict", "disk", "cheapest", "cheapest"]))
    def acquire(self, meanwhile: str) -> None:
        """What lies on disk is asked for, and dropped from there while it is read."""
        keys = [key for key in keys_of(range(NUM_CHUNKS)) if (chunk := self.rig.table.get(key)) and chunk.location]
        self.num_acquires += 1
        number = self.num_acquires

        cache, tier, namespace = self.rig.cache, self.rig.tier, self.rig.namespace
        drops: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "nothing": lambda: asyncio.sleep(0),
            "evict": lambda: cache.evictions.evict_all(force=True),
            "disk": lambda: cache.evictions.evict_all(force=True, tier=EvictTier.DISK),
            "cheapest": lambda: namespace.index.drop_cheapest(12_000),
        }

        async def acquired() -> None:
            with tier.holding("delete_pack") as gate:  # a file that is open is read to its end
                with tier.stepping():
                    at_once(self.session.loads.acquire(number, keys))
                    dropping = asyncio.create_task(drops[meanwhile]())
                    await eventually(lambda: dropping.done() or gate.reached.is_set())
                await eventually(lambda: not namespace.promoter._batches)
            await dropping
            await self.quiet()
            at_once(self.session.loads.release(number, None))

        self.run(acquired())

    @rule(num_slots=st.integers(1, NUM_CHUNKS))
    def evict_from_memory(self, num_slots: int) -> None:
        self.rig.namespace.tiers.evict_rows(num_slots, unpinned_only=True)

    @rule(force=st.booleans(), tier=st.sampled_from(EvictTier))
    def evict_by_command(self, force: bool, tier: EvictTier) -> None:
        self.run(self.rig.cache.evictions.evict_all(force=force, tier=tier))

    @rule(num_bytes=st.integers(1, 70_000))
    def free_disk_space(self, num_bytes: int) -> None:
        self.run(self.rig.cache.capacity.find_disk_capacity(num_bytes))

    @rule(chosen=numbers)
    def pin(self, chosen: list[int]) -> None:
        async def pinned() -> None:
            tokens = tuple(range(len(chosen) * ONE_GROUP.groups[0].chunk_tokens))
            view = await self.rig.cache.pins.pin(
                RequestedPin(name="p", tokens=tokens, cache_salt=str(chosen), replace=True)
            )
            await self.rig.cache.bindings.bind(self.session, view.prompt.pin_id, keys_of(chosen), len(tokens), "")

        self.run(pinned())

    @rule()
    def unpin(self) -> None:
        async def unpinned() -> None:
            for prompt in list(self.rig.cache.prompts):
                if self.rig.cache.prompts.find(prompt.name) is not None:  # a replacement ends with its pin
                    await self.rig.cache.pins.unpin(prompt.name)

        self.run(unpinned())

    @rule(number=st.integers(0, NUM_CHUNKS - 1))
    def damage(self, number: int) -> None:
        location = self.rig.location(number)
        if location is not None and (finish := self.rig.namespace.tiers.drop_damaged([location])) is not None:
            self.run(finish)

    @rule()
    def another_session(self) -> None:
        async def renewed() -> None:
            self.rig.cache.end(self.late)
            self.late.lock.close()
            self.late, self.late_peer = await self.attached()

        self.run(renewed())

    @invariant()
    def engines_know_what_is_held(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.run(self.quiet())
        held = {key for key in keys_of(range(NUM_CHUNKS)) if self.rig.table.holds(key)}
        for peer in (self.peer, self.late_peer):
            assert {key for key, is_held in peer.held.items() if is_held} == held
        self.rig.check()


TestEnginesKnow = EnginesKnowMachine.TestCase
TestEnginesKnow.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
