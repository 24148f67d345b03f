"""Which chunks may leave host memory."""

from kvtier.core.slots import HostBudget, SlotState, SlotTable
from tests.fakes.chunks import place_of, table_over

KEY = b"k" * 36


def test_a_chunk_in_host_memory_only_that_no_prompt_pins_is_evictable() -> None:
    """Dropped from disk for somebody else's pin, it was in no lower tier and so could never be evicted: a lost slot."""
    slots = SlotTable(1, 4096, HostBudget(4096))
    table = table_over(slots)
    table.pin([KEY])
    ref = slots.take_unbacked(SlotState.GRANTED)
    assert ref is not None
    slots.mark_backed(ref)
    assert slots.seal(ref)
    assert table.host.commit_store(KEY, ref, checksum=1)
    table.place(KEY, place_of(KEY))
    table.unpin([KEY])
    table.unplace(KEY)
    assert table.host.evict_cheapest(1).lost == [KEY]
    assert slots.num_free == 1
