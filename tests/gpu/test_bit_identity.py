"""What is stored, evicted and loaded is the same bits, whatever the blocks, dtype, layout and chunk size."""

import random

import pytest
import torch

from tests.gpu.conftest import MakeRig
from tests.gpu.rig import LAYOUTS

ROUNDS = 5


@pytest.mark.parametrize("locks_pages", [True, False], ids=["locked", "not-locked"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_store_evict_load(
    make_rig: MakeRig, layout: str, dtype: torch.dtype, blocks_per_chunk: int, locks_pages: bool
) -> None:
    rig = make_rig(layout=layout, dtype=dtype, blocks_per_chunk=blocks_per_chunk, locks_pages=locks_pages)
    rng = random.Random(f"{layout} {dtype} {blocks_per_chunk} {locks_pages}")
    if locks_pages:
        rig.lock_all()
    for _ in range(ROUNDS):
        num_chunks = rng.randint(1, rig.num_blocks // rig.blocks_per_chunk // 2)
        slots = rng.sample(range(rig.num_slots), min(num_chunks, rig.num_slots))
        groups = sorted(rng.randrange(rig.num_groups) for _ in slots)
        source = list(zip(slots, groups, rig.distinct_blocks(rng, len(slots)), strict=True))
        expected = {slot: rig.on_device(group, ids) for slot, group, ids in source}
        rig.finish(rig.store(source))
        for slot, group, _ in source:
            assert rig.is_stored(slot, group)
            assert rig.in_arena(slot, group) == expected[slot]
        rig.scramble([block for _, _, ids in source for block in ids])
        target = list(zip(slots, groups, rig.distinct_blocks(rng, len(slots)), strict=True))
        assert rig.finish(rig.load(target)) == set()
        assert {slot: rig.on_device(group, ids) for slot, group, ids in target} == expected
        for slot in slots:
            rig.arena.set_generation(slot, rig.arena.generation(slot) + 1)


@pytest.mark.parametrize("ring_bytes", [7 * 4096 + 8, None], ids=["seven pages", "no ring"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_small_pages_keep_their_bits_whatever_the_ring(make_rig: MakeRig, layout: str, ring_bytes: int | None) -> None:
    """Rows that do not fit the ring; batch after batch through the same memory."""
    rig = make_rig(layout=layout, blocks_per_chunk=4, num_blocks=256, ring_bytes=ring_bytes)
    rig.lock_all()
    rng = random.Random(f"{layout} {ring_bytes}")
    for _ in range(ROUNDS):
        source = [(slot, 0, ids) for slot, ids in enumerate(rig.distinct_blocks(rng, rig.num_slots))]
        expected = {slot: rig.on_device(0, ids) for slot, _, ids in source}
        rig.finish(rig.store(source))
        assert {slot: rig.in_arena(slot, 0) for slot in expected} == expected
        rig.scramble(range(rig.num_blocks))
        target = [(slot, 0, ids) for slot, ids in enumerate(rig.distinct_blocks(rng, rig.num_slots))]
        assert rig.finish(rig.load(target)) == set()
        assert {slot: rig.on_device(0, ids) for slot, _, ids in target} == expected
        for slot in expected:
            rig.arena.set_generation(slot, rig.arena.generation(slot) + 1)


def test_blocks_that_are_not_loaded_keep_their_bits(make_rig: MakeRig) -> None:
    rig = make_rig(layout="padded", blocks_per_chunk=2)
    rig.finish(rig.store([(3, 0, [1, 2])]))
    others = [block for block in range(rig.num_blocks) if block not in (8, 5)]
    tensors = [each.tensor.clone() for each in rig.caches.tensors]
    assert rig.finish(rig.load([(3, 0, [8, 5])])) == set()
    for before, after in zip(tensors, rig.caches.tensors, strict=True):
        assert torch.equal(before[others], after.tensor[others])
