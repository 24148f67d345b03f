"""ChunkTable against a dict model: slots, bytes, leases and eviction queues after every step, after a crash as well."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core.chunks.acquire import AcquirePlanner
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.core.slots import HostBudget, SlotRef, SlotState, SlotTable
from tests.fakes.chunks import place_of, table_over
from tests.fakes.scripted_engine import chunk_key

NUM_SLOTS, ROW_BYTES, BUDGET_ROWS = 6, 4096, 5
KEYS = [chunk_key(n, n % 2) for n in range(8)]
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


class ChunkTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = HostBudget(BUDGET_ROWS * ROW_BYTES)
        self.slots = SlotTable(NUM_SLOTS, ROW_BYTES, self.budget)
        self.table = table_over(self.slots)
        self.table.pin(KEYS)
        self.pinned = set(KEYS)
        self.granted: list[SlotRef] = []
        self.generations: dict[int, int] = {}
        self.leases: dict[int, list[Chunk]] = {}
        self.next_id = 0
        self.durable: set[bytes] = set()
        self.left_bytes = 0  # of a previous daemon's rows; they may exceed the limit until they are reclaimed

    def saw(self, ref: SlotRef) -> None:
        assert ref.generation == self.generations.get(ref.slot, 0) + 1, "generations grow by one each time"
        self.generations[ref.slot] = ref.generation

    @rule()
    def grant(self) -> None:
        ref = self.slots.take(SlotState.GRANTED)
        if ref is None:
            ref = self.slots.take_unbacked(SlotState.GRANTED)
            if ref is None:
                return
            self.slots.mark_backed(ref)
        self.saw(ref)
        self.granted.append(ref)

    @rule()
    def grant_without_pages(self) -> None:
        ref = self.slots.take_unbacked(SlotState.GRANTED)
        if ref is not None:
            self.saw(ref)
            self.slots.release(ref)

    @precondition(lambda self: self.granted)
    @rule(key=any_key)
    def store(self, key: bytes) -> None:
        ref = self.granted.pop()
        chunk = self.table.get(key)
        had_slot = chunk is not None and chunk.slot is not None
        assert self.slots.seal(ref)
        assert not self.slots.seal(ref), "a slot is sealed once"
        assert self.table.host.commit_store(key, ref, 1) is not had_slot

    @precondition(lambda self: self.granted)
    @rule()
    def lose_session(self) -> None:
        ref = self.granted.pop()
        self.slots.quarantine(ref)
        self.slots.release(ref)

    @rule(key=any_key)
    def make_durable(self, key: bytes) -> None:
        chunk = self.table.get(key)
        if chunk is not None and chunk.readable:
            self.table.place(key, place_of(key))
            self.durable.add(key)

    @rule(key=any_key)
    def damage(self, key: bytes) -> None:
        self.table.unplace(key)
        self.durable.discard(key)

    @rule(keys=st.lists(any_key, unique=True, max_size=6))
    def acquire(self, keys: list[bytes]) -> None:
        held_before = {key for key in keys if self.table.holds(key)}
        planner = AcquirePlanner(self.table, LAYOUT, keys)
        assert not list(planner.steps()), "so few are leased in one step"
        plan = planner.plan
        assert {chunk.key for chunk in plan.leased.values()} <= held_before
        assert len(plan.leased) + plan.num_missed == len(keys)
        assert plan.promoting == [index for index, chunk in plan.leased.items() if chunk.promoting]
        prefix = [index for index, chunk in plan.leased.items() if chunk.key[-1] == 0]
        assert prefix == [i for i, key in enumerate(keys) if key[-1] == 0][: len(prefix)], "a prefix has no holes"
        for chunk in plan.leased.values():
            assert chunk.slot is not None
            if chunk.key in plan.promotions:
                self.saw(chunk.slot)
        for key in plan.promotions:
            if key[0] % 4:
                self.slots.mark_backed(self.table.get(key).slot)  # type: ignore[union-attr,arg-type]
                self.table.host.complete_promotion(key, 1)
            else:
                dropped = self.table.host.fail_promotion(key)
                assert dropped == 1
        leased = [chunk for chunk in plan.leased.values() if chunk.slot is not None]
        if leased:
            self.leases[self.next_id] = leased
            self.next_id += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.table.host.unlease(self.leases.pop(data.draw(st.sampled_from(sorted(self.leases)))))

    @rule(num_slots=st.integers(1, 3), unpinned_only=st.booleans())
    def evict_cheapest(self, num_slots: int, unpinned_only: bool) -> None:
        evictable = [chunk.key for chunk in self.table if chunk.evictable]
        unpinned = [key for key in evictable if key not in self.pinned]
        pinned_before = len(self.table.host.pinned)
        evicted = self.table.host.evict_cheapest(num_slots, unpinned_only=unpinned_only)
        assert evicted.num_slots == min(num_slots, len(unpinned if unpinned_only else evictable))
        assert not self.pinned & set(evicted.lost), "what is pinned and not on disk is not evicted"
        assert not any(self.table.holds(key) for key in evicted.lost)
        num_pinned_gone = pinned_before - len(self.table.host.pinned)
        assert num_pinned_gone == evicted.num_slots - min(num_slots, len(unpinned)), "pinned ones go last"

    @rule(key=any_key)
    def unpin(self, key: bytes) -> None:
        if key in self.pinned:
            self.pinned.discard(key)
            self.table.unpin([key])

    @rule(key=any_key)
    def pin(self, key: bytes) -> None:
        if key not in self.pinned:
            self.pinned.add(key)
            self.table.pin([key])

    @rule(keys=st.lists(any_key, unique=True), hit=st.booleans())
    def touch(self, keys: list[bytes], hit: bool) -> None:
        self.table.use(self.table.known(keys), hit=hit)

    @rule(key=any_key)
    def begin_write_back(self, key: bytes) -> None:
        chunk = self.table.get(key)
        if chunk is not None and chunk.host is not None and chunk.readable and chunk.location is None:
            chunk.host.writing_back = True

    @rule(key=any_key)
    def end_write_back(self, key: bytes) -> None:
        chunk = self.table.get(key)
        if chunk is not None and chunk.host is not None and chunk.writing_back:
            self.table.place(key, place_of(key))
            self.durable.add(key)
            chunk.host.writing_back = False
            self.table.host.protection_ended([key])

    @rule(num_chunks=st.integers(1, 3))
    def drop_cheapest(self, num_chunks: int) -> None:
        num_unpinned = len(self.durable - self.pinned)
        unused = {key for key in self.durable - self.pinned if self.table.get(key).slot is None}  # type: ignore[union-attr]
        dropped = self.table.disk.take_cheapest(num_chunks)
        assert len(dropped) == min(num_chunks, num_unpinned), "pinned ones never leave the disk"
        assert len(set(dropped) & unused) == min(num_chunks, len(unused)), "what is in use goes last"
        for key in dropped:
            self.table.unplace(key)
            self.durable.discard(key)

    @rule(key=any_key)
    def evict_when_unprotected(self, key: bytes) -> None:
        self.table.host.evict_when_unprotected(key)

    @rule(num_slots=st.integers(1, 3))
    def reclaim(self, num_slots: int) -> None:
        self.slots.unback_free(num_slots, lambda slot: None)

    @invariant()
    def conserved(self) -> None:
        self.table.check()
        backed_bytes = (self.slots.num_slots - self.slots.num_unbacked) * ROW_BYTES
        assert self.budget.used_bytes == backed_bytes <= max(self.budget.limit_bytes, self.left_bytes)
        leased = [chunk for chunks in self.leases.values() for chunk in chunks]
        assert sum(chunk.num_leases for chunk in self.table) == len(leased)
        for chunk in leased:
            assert self.table.get(chunk.key) is chunk, "a leased chunk is not forgotten"
            assert chunk.slot is not None, "a leased chunk keeps its slot"
        assert {chunk.key for chunk in self.table if chunk.location is not None} == self.durable
        assert {chunk.key for chunk in self.table if chunk.num_pins} == self.pinned


TestChunkTable = ChunkTableMachine.TestCase
TestChunkTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class AfterCrashMachine(ChunkTableMachine):
    """The same, over the slots that a previous daemon left."""

    @initialize(
        generations=st.lists(st.integers(0, 5), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
        backed=st.sets(st.integers(0, NUM_SLOTS - 1)),
    )
    def resume(self, generations: list[int], backed: set[int]) -> None:
        self.slots.resume(generations, backed)
        self.generations = dict(enumerate(generations))
        self.left = set(backed)
        self.left_bytes = self.budget.used_bytes

    @precondition(lambda self: self.left)
    @rule(key=any_key, data=st.data(), right_generation=st.booleans())
    def recover_row(self, key: bytes, data: st.DataObject, right_generation: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.left)))
        chunk = self.table.get(key)
        wanted = chunk is not None and chunk.slot is None and right_generation
        ref = SlotRef(slot, self.slots.generation(slot) + (not right_generation))
        assert self.table.host.commit_orphan(key, ref, 1) is wanted
        if wanted:
            self.left.discard(slot)

    @precondition(lambda self: self.left)
    @rule()
    def reclaim_orphans(self) -> None:
        for slot in self.left:
            assert self.slots.state(slot) is SlotState.ORPHAN, "no other owner got it meanwhile"
            self.slots.release(SlotRef(slot, self.slots.generation(slot)), without_pages=True)
        self.left.clear()

    @invariant()
    def orphan_rows_have_no_owner(self) -> None:
        used = {chunk.slot.slot for chunk in self.table if chunk.slot is not None} | {ref.slot for ref in self.granted}
        assert used.isdisjoint(getattr(self, "left", ()))


TestAfterCrash = AfterCrashMachine.TestCase
TestAfterCrash.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
