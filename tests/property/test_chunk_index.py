"""The chunk index against a dict: places, rows, files and bytes agree after every step, whatever befalls a change.

The ledger refuses, a file cannot be unlinked, the caller leaves, the daemon is killed between any two calls, another
change begins meanwhile.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.errors import LedgerError, TierIOError
from tests.fakes.chunks import key_of
from tests.fakes.clocks import turns
from tests.fakes.index_rig import IndexRig, ThreadResources, keys_of
from tests.fakes.memory_tier import MemoryTier

P = ParamSpec("P")
T = TypeVar("T")
Places = dict[ChunkKey, StoredChunk]
NUM_CHUNKS = 6
ALL = range(NUM_CHUNKS)


class Faults(NamedTuple):
    """What befalls a change.

    Attributes:
        gaps: Turns of the loop before and after each call, over and over.
        refused_call: Of the ledger's calls the one that fails; 0 for none.
        no_unlink: The tier refuses to unlink, or to set aside.
        leave_after: Turns after which the caller leaves; 0 for never.
        kill_at: The call that the daemon does not outlive; even: after its work; 0 for none.
    """

    gaps: Sequence[int] = (0,)
    refused_call: int = 0
    no_unlink: bool = False
    leave_after: int = 0
    kill_at: int = 0


class Killed(Exception):
    """The daemon's process is gone."""


class LoopResources(ThreadResources):
    """Calls on the loop, one after the other as they come, with faults."""

    faults = Faults()
    was_refused = False
    _num_ledger_calls = _num_halves = _gap = 0

    def begin(self, faults: Faults) -> None:
        """Another step of the test."""
        self.faults, self._num_ledger_calls, self._num_halves, self._gap = faults, 0, 0, 0
        self.was_refused = False

    async def in_ledger(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """See `DiskResources`."""
        await self._half()
        self._num_ledger_calls += 1
        if self._num_ledger_calls == self.faults.refused_call:
            self.was_refused = True
            raise LedgerError("disk is full")
        result = call(*args, **kwargs)
        await self._half()
        return result

    async def in_io(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """See `DiskResources`."""
        await self._half()
        if self.faults.no_unlink:
            raise TierIOError(Path("x"), "unlink", OSError(5, "I/O"))
        result = call(*args, **kwargs)
        await self._half()
        return result

    async def _half(self) -> None:
        self._num_halves += 1
        if self.faults.kill_at and self._num_halves >= self.faults.kill_at:
            raise Killed
        self._gap += 1
        await turns(self.faults.gaps[self._gap % len(self.faults.gaps)])


class Change(NamedTuple):
    """A change to be made.

    Attributes:
        run: Makes it, and does what its caller does afterwards.
        effect: What it makes of the places; None for an eviction, which chooses.
    """

    run: Callable[[], Coroutine[Any, Any, object]]
    effect: Callable[[Places], Places] | None


numbers = st.lists(st.integers(0, NUM_CHUNKS - 1), min_size=1, max_size=4, unique=True)
seeds = st.integers(0, 1000)
gaps = st.lists(st.integers(0, 2), min_size=1, max_size=4)


def befalls(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Faults]:
    """Return a strategy for faults in which these fields vary."""
    return st.fixed_dictionaries({"gaps": gaps, **fields}).map(lambda drawn: Faults(**drawn))


faults = st.one_of(
    befalls(),
    befalls(refused_call=st.integers(1, 2), no_unlink=st.booleans()),
    befalls(no_unlink=st.just(True)),
    befalls(leave_after=st.integers(1, 8)),
    befalls(kill_at=st.integers(1, 6)),
)


class ChunkIndexMachine(RuleBasedStateMachine):
    """The model: where each chunk lies, and which are pinned."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
        self.loop = asyncio.new_event_loop()
        self.rig = IndexRig(self.folder, MemoryTier(), LoopResources)
        self.places: Places = {}
        self.pinned: set[int] = set()
        self.copies: list[tuple[PackRecord, Places]] = []
        self.keeps_files = False

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()
            self.loop.close()
            shutil.rmtree(self.folder)

    # Changes

    @rule(chosen=numbers, seed=seeds, faults=faults)
    def store(self, chosen: list[int], seed: int, faults: Faults) -> None:
        self.make(faults, self.storing(chosen, seed))

    @rule(first=numbers, second=numbers, seed=seeds, faults=faults)
    def store_in_a_block(self, first: list[int], second: list[int], seed: int, faults: Faults) -> None:
        """Two changes in one block, the second of two packs."""
        records = [self.rig.write(*chosen, seed=seed + n) for n, chosen in enumerate((first, second, first[:1]))]
        unwritten = {record.pack_id for record in records}
        self.rig.unknown |= unwritten

        async def run() -> None:
            async with self.rig.index.hold() as change:
                for part in (records[:1], records[1:]):
                    try:
                        await change.record(part)
                    finally:  # a caller that left cannot tell; the ledger can
                        self.rig.unknown -= self.rig.ledger.packs.pack_ids() | self.rig.usage.packs.keys()

        before = dict(self.places)
        self.make(faults, Change(run, None), is_eviction=False)
        for record in records:  # each is recorded or not, the parts in their order
            if record.pack_id in unwritten - self.rig.unknown:
                before |= {chunk.key: chunk for chunk in record.chunks}
            self.rig.unknown.discard(record.pack_id)
            if record.pack_id not in self.rig.usage.packs:
                self.rig.tier.delete_pack(record.pack_id)
        assert self.places == before or faults.kill_at
        self.rig.announce_again()

    @rule(chosen=numbers)
    def copy(self, chosen: list[int]) -> None:
        """The first half of a compaction; the others go on meanwhile."""
        if self.rig.places(*chosen):
            record, copied = self.rig.copy(*chosen)
            self.rig.unknown.add(record.pack_id)
            self.copies.append((record, copied))

    @precondition(lambda self: self.copies)
    @rule(faults=faults)
    def move(self, faults: Faults) -> None:
        self.make(faults, self.moving())

    @rule(chosen=numbers, where=st.sampled_from(["any", "here", "elsewhere"]), unpinned=st.booleans(), faults=faults)
    def drop(self, chosen: list[int], where: str, unpinned: bool, faults: Faults) -> None:
        self.make(faults, self.dropping(chosen, where, unpinned))

    @rule(chosen=numbers)
    def drop_and_keep_files(self, chosen: list[int]) -> None:
        self.make(Faults(), self.dropping(chosen, keep_files=True))

    @rule(num_bytes=st.integers(0, 1500), faults=faults)
    def drop_cheapest(self, num_bytes: int, faults: Faults) -> None:
        before = dict(self.places)
        unpinned = self.unpinned(before)
        self.make(faults, Change(lambda: self.rig.index.drop_cheapest(num_bytes), None))
        gone = before.keys() - self.places.keys()
        if faults == Faults(faults.gaps) or faults.leave_after:
            enough = sum(before[key].stored_bytes for key in gone) >= num_bytes
            assert enough or gone == unpinned
            assert num_bytes or not gone

    @rule(chosen=numbers, faults=faults)
    def drop_packs(self, chosen: list[int], faults: Faults) -> None:
        before = dict(self.places)
        pack_ids = {place.pack_id for place in self.rig.places(*chosen).values()}
        self.make(faults, Change(lambda: self.rig.index.drop_packs(list(pack_ids)), None))
        if faults == Faults(faults.gaps):
            wanted = {key for key in self.unpinned(before) if before[key].pack_id in pack_ids}
            assert before.keys() - self.places.keys() == wanted

    @rule(chosen=numbers, faults=faults)
    def reject(self, chosen: list[int], faults: Faults) -> None:
        self.make(faults, self.rejecting(chosen))

    @rule(lost=numbers, moved=numbers, repair=st.booleans(), faults=faults)
    def reconcile(self, lost: list[int], moved: list[int], repair: bool, faults: Faults) -> None:
        """The table was made wrong by hand."""
        wrong = set[ChunkKey]()
        for place in self.rig.places(*moved).values():
            self.rig.table.place(place.key, place._replace(offset=place.offset + 1))
            wrong.add(place.key)
        for key in self.rig.places(*lost):
            self.rig.table.unplace(key)
            wrong.add(key)
        keys = wrong | set(keys_of(*lost)) - self.rig.unrecorded

        async def run() -> None:
            assert await self.rig.index.reconcile(keys, repair=repair) == len(wrong)

        self.rig.resources.begin(Faults())  # type: ignore[attr-defined]
        if repair and not (faults.kill_at or faults.leave_after or faults.refused_call):
            self.make(faults, Change(run, lambda places: places))
            return
        self.loop.run_until_complete(run())
        assert self.loop.run_until_complete(self.rig.index.reconcile(keys, repair=True)) == (
            0 if repair else len(wrong)
        )

    @rule(chosen=numbers, seed=seeds, kinds=st.lists(st.sampled_from("smdrce"), min_size=2, max_size=3), faults=faults)
    def several_at_once(self, chosen: list[int], seed: int, kinds: list[str], faults: Faults) -> None:
        """They are made in the order of the calls."""
        made: dict[str, Callable[[], Change | None]] = {
            "s": lambda: self.storing(chosen, seed),
            "m": lambda: self.moving() if self.copies else None,
            "d": lambda: self.dropping(chosen),
            "r": lambda: self.rejecting(chosen[:1]),
            "c": lambda: Change(lambda: self.rig.index.drop_cheapest(300), None),
            "e": lambda: Change(lambda: self.rig.index.drop_packs(list(self.rig.packs)), None),
        }
        self.make(faults, *(change for kind in kinds if (change := made[kind]()) is not None))

    @rule()
    def restart(self) -> None:
        self.next_life({**self.places, **{key: self.rig.rows[key] for key in self.rig.unrecorded}})

    # Around it

    @rule(number=st.integers(0, NUM_CHUNKS - 1))
    def pin_or_unpin(self, number: int) -> None:
        (self.rig.table.unpin if number in self.pinned else self.rig.table.pin)(keys_of(number))
        self.pinned ^= {number}

    @rule(number=st.integers(0, NUM_CHUNKS - 1))
    def come_to_host_memory_or_leave_it(self, number: int) -> None:
        chunk = self.rig.table.get(key_of(number))
        if chunk is not None and chunk.readable:
            self.rig.out_of_host(number)
        elif self.rig.slots.num_takable:
            self.rig.into_host(number)

    @invariant()
    def all_agrees(self) -> None:
        if hasattr(self, "rig"):
            assert self.rig.located == self.places
            self.rig.check()

    # How a change is made

    def storing(self, chosen: Sequence[int], seed: int) -> Change:
        record = self.rig.write(*chosen, seed=seed)
        self.rig.unknown.add(record.pack_id)

        async def run() -> None:
            self.rig.unknown.discard(record.pack_id)
            await self.rig.index.record(record)
            self.rig.announce([chunk.key for chunk in record.chunks if self.rig.table.holds(chunk.key)], True)

        return Change(run, lambda places: places | {chunk.key: chunk for chunk in record.chunks})

    def moving(self) -> Change:
        record, copied = self.copies.pop()

        async def run() -> None:
            self.rig.unknown.discard(record.pack_id)
            await self.rig.index.move(record, copied)

        def effect(places: Places) -> Places:
            return places | {chunk.key: chunk for chunk in record.chunks if places.get(chunk.key) == copied[chunk.key]}

        return Change(run, effect)

    def dropping(
        self, chosen: Sequence[int], where: str = "any", unpinned: bool = False, keep_files: bool = False
    ) -> Change:
        only_at = {
            key: place if where == "here" else place._replace(pack_id="f" * 32)
            for key, place in self.rig.places(*chosen).items()
        }
        self.keeps_files |= keep_files

        async def run() -> None:
            await self.rig.index.drop(
                keys_of(*chosen),
                only_at=None if where == "any" else only_at,
                unpinned_only=unpinned,
                keep_files=keep_files,
            )
            self.rig.announce([key for key in keys_of(*chosen) if not self.rig.table.holds(key)], False)

        def effect(places: Places) -> Places:
            gone = {key for key in keys_of(*chosen) if key in places}
            if where != "any":
                gone = {key for key in gone if only_at.get(key) == places[key]}
            return without(places, gone & self.unpinned(places) if unpinned else gone)

        return Change(run, effect)

    def rejecting(self, chosen: Sequence[int]) -> Change:
        damaged = self.rig.places(*chosen)

        async def run() -> None:
            self.rig.packs.damaged |= {place.pack_id for place in damaged.values()} & self.rig.usage.packs.keys()
            await self.rig.index.reject(damaged)

        return Change(run, lambda places: without(places, {key for key in damaged if places.get(key) == damaged[key]}))

    def unpinned(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        return set(keys) - set(keys_of(*self.pinned))

    def make(self, faults: Faults, *made: Change, is_eviction: bool = True) -> None:
        """Start the changes together, and follow them in the model."""
        resources = self.rig.resources
        assert isinstance(resources, LoopResources)
        resources.begin(faults)
        before, rows = dict(self.places), self.rig.rows
        errors = self.loop.run_until_complete(self.run_all(made, faults))
        if any(isinstance(error, Killed) for error in errors):
            self.follow_kill(before | {key: rows[key] for key in self.rig.unrecorded}, made)
            return
        for error in errors:
            if error is not None and not isinstance(error, LedgerError | asyncio.CancelledError):
                raise error
        assert resources.was_refused or not any(isinstance(error, LedgerError) for error in errors)
        if any(change.effect is None for change in made):
            self.places = self.rig.located
            if is_eviction and len(made) == 1:
                assert self.places.items() <= before.items()
                assert before.keys() - self.places.keys() <= self.unpinned(before)
        else:
            for change, error in zip(made, errors, strict=True):
                if change.effect is not None and not isinstance(error, LedgerError):
                    self.places = change.effect(self.places)
        if len(made) > 1 or faults.leave_after:
            self.rig.announce_again()
        self.follow_refusals(resources)

    async def run_all(self, made: Sequence[Change], faults: Faults) -> list[BaseException | None]:
        tasks = [asyncio.create_task(change.run()) for change in made]
        if faults.leave_after:
            await turns(faults.leave_after)
            for task in tasks:
                task.cancel()
        return [
            error if isinstance(error, BaseException) else None
            for error in await asyncio.gather(*tasks, return_exceptions=True)
        ]

    def follow_refusals(self, resources: LoopResources) -> None:
        """Damaged chunks whose rows stay, and files that stay: only where something was refused."""
        rows, packs = self.rig.rows, self.rig.ledger.packs.pack_ids()
        unrecorded = rows.keys() - self.rig.located.keys()
        assert unrecorded <= self.rig.unrecorded or resources.was_refused
        self.rig.unrecorded = unrecorded
        strays = self.rig.tier.list_packs().keys() - packs - self.rig.unknown
        assert strays <= self.rig.strays or resources.faults.no_unlink or self.keeps_files
        self.rig.strays, self.keeps_files = set(strays), False

    def follow_kill(self, before: Places, made: Sequence[Change]) -> None:
        """What the next daemon finds is as before the change, or as after it."""
        rows = self.rig.rows
        if len(made) == 1 and (effect := made[0].effect) is not None:
            assert rows in (before, effect(before))
        self.next_life(rows)

    def next_life(self, expected: Places) -> None:
        self.loop.run_until_complete(self.rig.restart())
        self.rig.table.pin(keys_of(*self.pinned))
        self.places, self.copies, self.keeps_files = expected, [], False


def without(places: Places, keys: Collection[ChunkKey]) -> Places:
    """Return the other places."""
    return {key: place for key, place in places.items() if key not in keys}


TestChunkIndex = ChunkIndexMachine.TestCase
TestChunkIndex.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
