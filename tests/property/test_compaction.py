"""Compaction over a tier in memory and a real ledger against a dict: bytes, usage, every chunk, at every step."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fakes.gates import Gate
from tests.fakes.rig import Rig, at_once, content, eventually, keys_of, rig

T = TypeVar("T")
NUM_CHUNKS = 8
DISK_BYTES = 40 * 6000
numbers = st.lists(st.integers(0, NUM_CHUNKS - 1), min_size=1, max_size=5, unique=True)


class CompactionMachine(RuleBasedStateMachine):
    """The model is the set of chunks that are on disk. A compaction may be held after its copy while others act."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.rig: Rig = self.run(
            self.stack.enter_async_context(rig(self.folder, disk_bytes=DISK_BYTES, compact_dead_ratio=0.05))
        )
        self.rig.table.pin(keys_of(range(4)))  # known while they are nowhere: what is dropped could come back
        self.model: set[int] = set()
        self.compaction: tuple[asyncio.Task[bool], Any, Gate] | None = None

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            if self.compaction is not None:
                self.finish_compaction()
            self.run(self.stack.aclose())
            self.loop.close()
            shutil.rmtree(self.folder)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    @rule(chosen=numbers)
    def store(self, chosen: list[int]) -> None:
        if self.rig.resources.disk_usage.fits(6000 * len(chosen)):
            self.run(self.rig.on_disk(chosen))
            self.model |= set(chosen)

    @rule(chosen=numbers)
    def drop(self, chosen: list[int]) -> None:
        self.run(self.rig.namespace.index.drop(keys_of(chosen)))
        self.model -= set(chosen)

    @rule(chosen=numbers)
    def promote(self, chosen: list[int]) -> None:
        async def promoted() -> None:
            session, peer = await self.rig.session()
            at_once(session.loads.acquire(1, keys_of(chosen)))
            await eventually(lambda: not any(lease.pending for lease in session.loads._leases.values()))
            assert peer.missed.get(1, []) == []
            for chunk in peer.answers[1][0]:
                assert self.rig.in_arena(chosen[chunk.index]) == content(chosen[chunk.index])
            at_once(session.loads.release(1, None))
            self.rig.cache.end(session)
            session.lock.close()

        self.run(promoted())

    @rule(num_slots=st.integers(1, NUM_CHUNKS))
    def evict(self, num_slots: int) -> None:
        self.rig.table.host.evict_cheapest(num_slots)

    @precondition(lambda self: self.compaction is None)
    @rule()
    def compact(self) -> None:
        while (job := self.run(self.rig.cache.compactor.next_job())) is not None:
            assert self.run(self.rig.cache.compactor.compact(job))

    @precondition(lambda self: self.compaction is None)
    @rule(chosen=numbers)
    def begin_compaction(self, chosen: list[int]) -> None:
        self.store(list(range(NUM_CHUNKS)))
        self.drop(chosen)
        job = self.run(self.rig.cache.compactor.next_job())
        if job is None:
            return
        holding = self.rig.tier.holding("rewrite_pack_after")
        gate = holding.__enter__()
        task = self.loop.create_task(self.rig.cache.compactor.compact(job))
        self.compaction = (task, holding, gate)
        self.run(eventually(gate.reached.is_set))

    @precondition(lambda self: self.compaction is not None)
    @rule()
    def finish_compaction(self) -> None:
        assert self.compaction is not None
        task, holding, _ = self.compaction
        holding.__exit__(None, None, None)
        self.compaction = None

        async def finished() -> bool:
            return await task

        assert self.run(finished())

    @precondition(lambda self: self.compaction is not None)
    @rule(chosen=numbers)
    def damage(self, chosen: list[int]) -> None:
        """A chunk of an old pack turns out damaged after it was copied: the copy is good, or it is dropped."""
        # With a good copy in host memory it would be written again: that has a test of its own.
        chosen = [number for number in chosen if self.rig.location(number) and not self.rig.chunk(number).readable]
        finish = self.rig.namespace.tiers.drop_damaged([self.rig.chunk(number).location for number in chosen])  # type: ignore[misc]
        if finish is not None:
            self.run(finish)
        self.model -= set(chosen)

    @invariant()
    def the_disk_holds_what_the_model_says(self) -> None:
        if not hasattr(self, "rig"):
            return
        r = self.rig
        assert {n for n in range(NUM_CHUNKS) if r.location(n) is not None} == self.model
        rows = {chunk.key: chunk for pack in r.resources.ledger.load().packs.values() for chunk in pack.chunks}
        assert set(rows) == set(keys_of(self.model))
        for number in self.model:
            assert rows[keys_of([number])[0]] == r.location(number)
            buffer = memoryview(bytearray(6000))
            r.tier.read_chunk(rows[keys_of([number])[0]], [buffer])
            assert buffer == content(number)
        assert sum(r.tier.list_packs().values()) <= DISK_BYTES
        if self.compaction is None:
            r.check()
            assert r.resources.ledger.load().packs.keys() == r.tier.packs.keys(), "no orphan"


TestCompaction = CompactionMachine.TestCase
TestCompaction.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
