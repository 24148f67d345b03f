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


def test_blocks_that_are_not_loaded_keep_their_bits(make_rig: MakeRig) -> None:
    rig = make_rig(layout="padded", blocks_per_chunk=2)
    rig.finish(rig.store([(3, 0, [1, 2])]))
    others = [block for block in range(rig.num_blocks) if block not in (8, 5)]
    tensors = [each.tensor.clone() for each in rig.caches.tensors]
    assert rig.finish(rig.load([(3, 0, [8, 5])])) == set()
    for before, after in zip(tensors, rig.caches.tensors, strict=True):
        assert torch.equal(before[others], after.tensor[others])
