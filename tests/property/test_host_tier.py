"""A host tier against a model of it: whatever its callers do, every slot is in one state, and its bytes are counted."""

import asyncio
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef, SlotState
from kvtier.core.stored import checksum_of
from tests.fakes.chunks import noise
from tests.fakes.host_rig import HostRig
from tests.fakes.scripted_engine import ONE_GROUP, chunk_key

NUM_SLOTS = 6
ROW_BYTES = ONE_GROUP.row_bytes
PLENTY = 1 << 20

slots = st.integers(0, NUM_SLOTS - 1)
counts = st.integers(1, NUM_SLOTS)


class HostTierMachine(RuleBasedStateMachine):
    """The model: the owner of each owned slot, how many are free, and the bytes of what was committed."""

    rig: HostRig

    @initialize(num_affordable=counts)
    def start(self, num_affordable: int) -> None:
        self.rig = HostRig(NUM_SLOTS, num_affordable)
        self.owned: dict[int, tuple[SlotRef, SlotState]] = {}
        self.num_free = self.num_orphans = 0
        self.generations: Counter[int] = Counter()
        self.lasting: Counter[int] = Counter()  # those that a reader or writer may know
        self.chunks: dict[SlotRef, tuple[ChunkKey, bytes]] = {}  # HOST, and ORPHAN that is marked
        self.leased: set[SlotRef] = set()
        self.without_pages: set[SlotRef] = set()
        self.num_chunks = 0
        self.is_recovering, self.is_limited = False, False

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()

    # The model

    def refs(self, state: SlotState) -> list[SlotRef]:
        return [ref for ref, now in self.owned.values() if now is state]

    @property
    def num_affordable(self) -> int:
        num_unbacked = NUM_SLOTS - len(self.owned) - self.num_free - self.num_orphans
        return min(num_unbacked, max(0, self.rig.budget.free_bytes) // ROW_BYTES)

    def own(self, ref: SlotRef, state: SlotState) -> None:
        assert ref.slot not in self.owned, "a slot has one owner"
        assert ref.generation > self.generations[ref.slot], "no generation comes twice"
        self.generations[ref.slot] = ref.generation
        if state is SlotState.GRANTED:
            self.lasting[ref.slot] = ref.generation
        self.owned[ref.slot] = ref, state

    def move(self, ref: SlotRef, state: SlotState) -> None:
        self.owned[ref.slot] = ref, state

    def free(self, ref: SlotRef) -> None:
        """The slot was released."""
        del self.owned[ref.slot]
        self.chunks.pop(ref, None)
        self.num_free += ref not in self.without_pages
        self.without_pages.discard(ref)

    def offer(self) -> list[SlotRef]:
        """Say what may be evicted now: what is readable, and not leased."""
        self.rig.evictable[:] = [ref for ref in self.refs(SlotState.HOST) if ref not in self.leased]
        return list(self.rig.evictable)

    def take_evicted(self, offered: list[SlotRef]) -> None:
        for ref in offered[: len(offered) - len(self.rig.evictable)]:
            self.free(ref)

    def commit(self, ref: SlotRef, data: bytes, key: ChunkKey) -> None:
        self.rig.tier.commit(ref, key, checksum_of([memoryview(data)]))
        self.chunks[ref] = key, data
        self.move(ref, SlotState.HOST)

    def new_chunk(self) -> tuple[ChunkKey, bytes]:
        self.num_chunks += 1
        return chunk_key(self.num_chunks), noise(6000, self.num_chunks)

    # Stores

    @rule(num_slots=counts)
    def allocate(self, num_slots: int) -> None:
        offered, most = self.offer(), self.num_free + self.num_affordable
        refs = asyncio.run(self.rig.tier.allocate(num_slots))
        num_evicted = len(offered) - len(self.rig.evictable)
        self.take_evicted(offered)
        expected = min(num_slots, most + len(offered))
        assert len(refs) == expected or (self.is_limited and len(refs) <= expected)
        assert num_evicted == max(0, expected - most) or self.is_limited, "only as a last resort"
        self.num_free = self.rig.tier.usage.num_free
        for ref in refs:
            self.own(ref, SlotState.GRANTED)

    @precondition(lambda self: self.refs(SlotState.GRANTED))
    @rule(number=slots, is_stamped=st.booleans())
    def store(self, number: int, is_stamped: bool) -> None:
        refs = self.refs(SlotState.GRANTED)
        ref, (key, data) = refs[number % len(refs)], self.new_chunk()
        if is_stamped:
            self.rig.write(ref, key, data)
        assert self.rig.tier.seal(ref)
        assert not self.rig.tier.seal(ref)
        checksum = self.rig.tier.verify(ref, key)
        assert (checksum is not None) is is_stamped
        if is_stamped:
            self.commit(ref, data, key)
        else:
            self.rig.tier.release(ref)
            self.free(ref)

    @precondition(lambda self: self.refs(SlotState.GRANTED))
    @rule(number=slots)
    def lose_session(self, number: int) -> None:
        refs = self.refs(SlotState.GRANTED)
        ref = refs[number % len(refs)]
        self.rig.tier.quarantine(ref)
        self.move(ref, SlotState.QUARANTINED)

    @precondition(lambda self: self.owned)
    @rule(number=slots)
    def release(self, number: int) -> None:
        """A store or a load is aborted, a lost engine has ended, or a chunk without a lease is evicted."""
        refs = [ref for ref, _ in self.owned.values() if ref not in self.leased]
        if refs:
            ref = refs[number % len(refs)]
            self.rig.tier.release(ref)
            self.free(ref)

    # Loads

    @rule()
    def reserve(self) -> None:
        can = self.num_free + self.num_affordable
        has_free = self.num_free > 0
        ref = self.rig.tier.reserve()
        assert (ref is not None) is (can > 0)
        if ref is None:
            return
        assert self.rig.tier.lacks_pages(ref) is not has_free
        self.num_free -= has_free
        if not has_free:
            self.without_pages.add(ref)
        self.own(ref, SlotState.LOADING)

    @precondition(lambda self: self.refs(SlotState.LOADING))
    @rule(num_slots=counts)
    def load(self, num_slots: int) -> None:
        refs = self.refs(SlotState.LOADING)[:num_slots]
        lacking = [ref for ref in refs if self.rig.tier.lacks_pages(ref)]
        assert set(lacking) == set(refs) & self.without_pages
        num_backed = self.rig.tier.back(lacking)
        assert num_backed == len(lacking) or self.is_limited
        self.without_pages.difference_update(lacking[:num_backed])
        for ref in refs:
            if ref not in self.without_pages:
                key, data = self.new_chunk()
                (view,) = self.rig.tier.begin_load(ref, key)
                view[:] = data
                self.lasting[ref.slot] = ref.generation
                self.commit(ref, data, key)

    @precondition(lambda self: self.refs(SlotState.HOST))
    @rule(number=slots)
    def lease(self, number: int) -> None:
        refs = self.refs(SlotState.HOST)
        self.leased ^= {refs[number % len(refs)]}

    # Capacity

    @rule(num_bytes=st.integers(1, NUM_SLOTS * ROW_BYTES), evict=st.booleans())
    def reclaim(self, num_bytes: int, evict: bool) -> None:
        offered = self.offer()
        self.rig.tier.reclaim(num_bytes, evict=evict)
        self.take_evicted(offered)
        if self.is_recovering:
            assert len(self.rig.evictable) == len(offered)
        else:
            assert evict or len(self.rig.evictable) == len(offered)
            self.num_free -= min(self.num_free, -(-num_bytes // ROW_BYTES))

    @rule(num_rows=st.sampled_from([0, 1, 2, PLENTY]))
    def system_gives(self, num_rows: int) -> None:
        self.rig.system_gives(num_rows)
        self.is_limited = num_rows < PLENTY

    # The next daemon

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        self.rig.system_gives(PLENTY)
        self.is_limited = False
        self.rig.restart(killed=killed)
        self.num_orphans += len(self.owned) - len(self.without_pages) + self.num_free  # whatever has pages
        self.num_free = 0
        self.generations = self.lasting.copy()
        self.owned.clear()
        self.leased.clear()
        self.without_pages.clear()
        self.is_recovering = True
        self.recover()

    def recover(self) -> None:
        """Take over every second chunk of those that are there; then the engines of the last daemon end."""
        for number, (ref, (key, data)) in enumerate(list(self.chunks.items())):
            assert self.rig.tier.verify(ref, key) == checksum_of([memoryview(data)])
            if number % 2:
                del self.chunks[ref]
            else:
                self.commit(ref, data, key)
                self.num_orphans -= 1

    @precondition(lambda self: self.is_recovering)
    @rule(num_kept=st.integers(0, NUM_SLOTS))
    def free_orphans(self, num_kept: int) -> None:
        freed = asyncio.run(self.rig.tier.free_orphans(num_kept * ROW_BYTES))
        self.is_recovering = False
        self.num_free += freed.num_free
        assert freed.num_free == min(num_kept, self.num_orphans) or self.is_limited
        assert freed.num_free + freed.num_unbacked == self.num_orphans
        self.num_orphans = 0

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "rig"):
            return
        tier = self.rig.tier
        tier.check()
        counts, usage = tier.counts(), tier.usage
        assert counts.total() == NUM_SLOTS
        assert self.rig.budget.used_bytes == usage.held_bytes
        assert usage.held_bytes == usage.overhead_bytes + (NUM_SLOTS - counts[SlotState.UNBACKED]) * ROW_BYTES
        for ref, state in self.owned.values():
            assert tier.matches(ref, state)
            assert not tier.matches(SlotRef(ref.slot, ref.generation - 1), state)
        assert counts[SlotState.ORPHAN] == self.num_orphans
        assert counts[SlotState.FREE] == self.num_free
        assert usage.num_owned == len(self.owned) + self.num_orphans

    @invariant()
    def what_is_readable_is_what_was_written(self) -> None:
        if not hasattr(self, "rig"):
            return
        for ref, (key, data) in self.chunks.items():
            assert b"".join(self.rig.tier.payload(ref, key)) == data
        marks = {ref.slot: (ref.generation, checksum_of([memoryview(data)])) for ref, (_, data) in self.chunks.items()}
        found = self.rig.marks()
        assert marks.items() <= found.items()
        assert self.is_recovering or marks == found

    @rule(num_slots=counts)
    def preallocate(self, num_slots: int) -> None:
        num_affordable = self.num_affordable
        asyncio.run(self.rig.tier.preallocate(num_slots, self.rig.tier.back))
        num_made = self.rig.tier.usage.num_free - self.num_free
        assert num_made == min(num_slots, num_affordable) or (self.is_limited and num_made < num_affordable)
        self.num_free += num_made


TestArenaTier = HostTierMachine.TestCase
TestArenaTier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
