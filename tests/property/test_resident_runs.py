"""Two chunk tables, of which one remembers what was acquired: leases, slots and evictions are those of the other."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core.chunks.acquire import AcquirePlanner, by_importance
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.resident_runs import ResidentRun
from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.core.slots import HostBudget, SlotRef, SlotState, SlotTable
from tests.fakes.chunks import place_of, table_over
from tests.fakes.scripted_engine import chunk_key

NUM_SLOTS, ROW_BYTES = 8, 4096
KEYS = [chunk_key(n, n % 2) for n in range(10)]
LISTS = [[0, 2, 4], [0, 2, 4, 1, 3], [6, 8], [0, 2, 4, 6], [5, 7, 9], [0], list(range(0, 10, 2))]
"""By group, as engines ask; several share chunks."""
LAYOUT = KVLayout(
    num_ranks=1,
    rank_bytes=ROW_BYTES,
    num_writers=1,
    groups=(
        GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=100),
        GroupLayout(group_idx=1, chunk_tokens=16, useful_bytes=100, window_chunks=2),
    ),
)
any_key = st.sampled_from(KEYS)


@dataclass
class Side:
    """One of the two tables, and the leases on it by acquire."""

    remembers: bool
    table: ChunkTable = field(init=False)
    leases: dict[int, ResidentRun | dict[int, Chunk]] = field(default_factory=dict)
    num_again: int = 0

    def __post_init__(self) -> None:
        slots = SlotTable(NUM_SLOTS, ROW_BYTES, HostBudget(NUM_SLOTS * ROW_BYTES))
        self.table = table_over(slots)

    def store(self, key: bytes) -> bool:
        """Take a chunk in, if a slot is free."""
        slots = self.table.host.slots
        ref = slots.take(SlotState.GRANTED)
        if ref is None:
            ref = slots.take_unbacked(SlotState.GRANTED)
            if ref is None:
                return False
            slots.mark_backed(ref)
        assert slots.seal(ref)
        return self.table.host.commit_store(key, ref, 1)

    def acquire(self, acquire_id: int, keys: list[bytes]) -> tuple[dict[int, SlotRef | None], list[bytes]]:
        """Acquire as `Loads` does; promotions end at once. Return slots by index, and what was evicted for them."""
        name = b"".join(keys)
        if self.remembers and (run := self.table.runs.get(name)) is not None:
            self.table.runs.acquire(run)
            self.leases[acquire_id] = run
            self.num_again += 1
            return {index: chunk.slot for index, chunk in run.items()}, []
        planner = AcquirePlanner(self.table, LAYOUT, keys)
        for _ in planner.steps():
            pass
        plan = planner.plan
        for key in plan.promotions:
            chunk = self.table.get(key)
            assert chunk is not None
            assert chunk.slot is not None
            self.table.host.slots.mark_backed(chunk.slot)
            self.table.host.complete_promotion(key, 1)
        if self.remembers and not plan.num_missed and not plan.promotions:
            self.table.runs.add(name, ResidentRun(plan.leased, by_importance(LAYOUT, list(plan.leased.values())), 1))
        self.leases[acquire_id] = plan.leased
        return {index: chunk.slot for index, chunk in plan.leased.items()}, plan.lost

    def release(self, acquire_id: int, indexes: list[int] | None) -> None:
        """End all leases of an acquire, or some."""
        chunks = self.leases[acquire_id]
        if isinstance(chunks, ResidentRun):
            if indexes is None:
                self.table.runs.release(chunks)
                del self.leases[acquire_id]
                return
            chunks = self.leases[acquire_id] = self.table.runs.split(chunks)
        ended = list(chunks) if indexes is None else [index for index in indexes if index in chunks]
        self.table.host.unlease([chunks.pop(index) for index in ended])
        if not chunks:
            del self.leases[acquire_id]


class ResidentRunsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sides = [Side(remembers=False), Side(remembers=True)]
        self.next_id = 0
        self.pinned: set[bytes] = set()

    @initialize(
        pinned=st.sets(any_key),
        placed=st.sets(any_key),
        numbers=st.lists(st.sampled_from(LISTS), min_size=1),
        released=st.lists(st.integers(0, 5)),
        pending=st.sets(any_key, max_size=2),
    )
    def begin(
        self, pinned: set[bytes], placed: set[bytes], numbers: list[list[int]], released: list[int], pending: set[bytes]
    ) -> None:
        """What takes a random walk long to come to: runs that are leased, used and to be evicted."""
        self.store(KEYS)
        for key in sorted(pinned):
            self.pin_or_unpin(key)
        for key in sorted(placed):
            self.place_or_unplace(key)
        for each in numbers:
            self.acquire(each, 2)
        for acquire_id in {each for each in released if each in self.sides[0].leases}:
            for side in self.sides:
                side.release(acquire_id, None)
        for key in sorted(pending):
            self.evict_when_unprotected(key)

    @rule(keys=st.lists(any_key, unique=True))
    def store(self, keys: list[bytes]) -> None:
        for key in keys:
            plain, quick = (side.store(key) for side in self.sides)
            assert plain is quick

    @rule(numbers=st.sampled_from(LISTS), times=st.integers(1, 3))
    def acquire(self, numbers: list[int], times: int) -> None:
        for _ in range(times):
            plain, quick = (side.acquire(self.next_id, [KEYS[number] for number in numbers]) for side in self.sides)
            assert plain == quick
            self.next_id += 1

    @precondition(lambda self: self.sides[0].leases)
    @rule(data=st.data(), indexes=st.none() | st.lists(st.integers(0, 4), unique=True))
    def release(self, data: st.DataObject, indexes: list[int] | None) -> None:
        acquire_id = data.draw(st.sampled_from(sorted(self.sides[0].leases)))
        for side in self.sides:
            side.release(acquire_id, indexes)

    @rule(num_slots=st.integers(1, NUM_SLOTS), unpinned_only=st.booleans())
    def evict_cheapest(self, num_slots: int, unpinned_only: bool) -> None:
        plain, quick = (side.table.host.evict_cheapest(num_slots, unpinned_only=unpinned_only) for side in self.sides)
        assert (plain.num_slots, plain.lost) == (quick.num_slots, quick.lost)

    @rule(key=any_key)
    def evict_when_unprotected(self, key: bytes) -> None:
        plain, quick = (side.table.host.evict_when_unprotected(key) for side in self.sides)
        assert plain is quick

    @rule(key=any_key)
    def pin_or_unpin(self, key: bytes) -> None:
        for side in self.sides:
            (side.table.unpin if key in self.pinned else side.table.pin)([key])
        self.pinned ^= {key}

    @rule(key=any_key)
    def place_or_unplace(self, key: bytes) -> None:
        for side in self.sides:
            chunk = side.table.get(key)
            if chunk is not None and chunk.on_disk:
                side.table.unplace(key)
            elif chunk is not None and chunk.readable:
                side.table.place(key, place_of(key))

    @rule(num_chunks=st.integers(1, 3))
    def drop_cheapest(self, num_chunks: int) -> None:
        plain, quick = (side.table.disk.take_cheapest(num_chunks) for side in self.sides)
        assert plain == quick
        for side in self.sides:
            for key in plain:
                side.table.unplace(key)

    @rule(keys=st.lists(any_key, unique=True), hit=st.booleans())
    def touch(self, keys: list[bytes], hit: bool) -> None:
        for side in self.sides:
            side.table.use(side.table.known(keys), hit=hit)

    @rule()
    def check(self) -> None:
        """Counts what was noted, so it is a rule: most steps find uses that are not counted yet."""
        for side in self.sides:
            side.table.check()
        plain, quick = (_known(side.table) for side in self.sides)
        assert plain == quick

    @invariant()
    def leased_chunks_stay(self) -> None:
        for side in self.sides:
            leased = {id(chunk) for chunks in side.leases.values() for chunk in chunks.values()}
            assert leased == {id(chunk) for chunk in side.table if chunk.num_leases}
            side.table.runs.check()

    def teardown(self) -> None:
        self.check()
        for side in self.sides:
            for acquire_id in list(side.leases):
                side.release(acquire_id, None)
        self.leased_chunks_stay()
        self.evict_cheapest(NUM_SLOTS, False)
        self.check()


def _known(table: ChunkTable) -> dict[bytes, object]:
    return {
        chunk.key: (chunk.slot, chunk.location, chunk.num_pins, chunk.eviction_pending)
        + (chunk.value, chunk.frequency)
        + (() if chunk.host is None else (chunk.host.value, chunk.host.frequency))
        for chunk in table
    }


TestResidentRuns = ResidentRunsMachine.TestCase
TestResidentRuns.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
