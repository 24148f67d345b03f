"""The parts of GPU pins that need no vLLM engine; the whole is in tests/property and tests/simulation."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.request import RequestStatus

from kvtier_connector.gpu_pins.block_queue import BlockQueue, UnknownPoolError
from kvtier_connector.gpu_pins.demand import Demand, EngineShape
from kvtier_connector.gpu_pins.guard import GpuPins
from kvtier_connector.gpu_pins.pinned import PinnedBlocks
from kvtier_connector.gpu_pins.soft import RATIO, SLICE, SoftPins
from kvtier_connector.keys import GroupShape, gpu_keys
from kvtier_connector.settings import ConnectorSettings, GpuPin
from kvtier_connector.stats import ConnectorStats

A, B, C, D = (bytes([n]) * 36 for n in range(4))
SHAPE = EngineShape(block_tokens=4, max_step_tokens=16)


class FakeCache:
    """vLLM's map, hash to block."""

    def __init__(self, blocks: list[Any]) -> None:
        self.by_key = {block.block_hash: block for block in reversed(blocks) if block.block_hash}

    def get_one_block(self, key: bytes) -> Any:
        return self.by_key.get(key)


def pool_of(keys: list[bytes | None]) -> Any:
    """Return a manager whose pool has free blocks with these hashes, the first to be evicted first."""
    blocks = [KVCacheBlock(block_id=number) for number in range(len(keys))]
    for block, key in zip(blocks, keys, strict=True):
        if key is not None:
            block.set_block_hash(key, num_tokens=4)
    queue = FreeKVCacheBlockQueue(blocks)
    pool = SimpleNamespace(
        blocks=blocks,
        cached_block_hash_to_block=FakeCache(blocks),
        enable_caching=True,
        free_block_queue=queue,
        free_blocks=None,
        get_num_free_blocks=lambda: queue.num_free_blocks,
        hash_block_size=4,
        num_gpu_blocks=len(blocks) + 1,
        reset_prefix_cache=lambda: True,
        touch=None,
    )
    return SimpleNamespace(block_pool=pool, new_step_starts=lambda: None)


def order(manager: Any) -> list[int]:
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]


def pinned_of(*pins: tuple[bytes, ...], max_blocks: int = 10**6) -> PinnedBlocks:
    pinned = PinnedBlocks()
    pinned.bound(max_blocks)
    for number, keys in enumerate(pins):
        pinned.add(str(number), keys)
    return pinned


def test_the_oldest_pin_is_the_best_and_shared_blocks_are_its_own() -> None:
    pinned = pinned_of((A, B), (A, C))
    assert pinned.ranking.keys == [A, B, C]
    pinned.add("0", (A, D))  # bound anew, and still the oldest
    assert pinned.ranking.keys == [A, D, C]
    pinned.remove("0")
    assert pinned.ranking.keys == [A, C]
    pinned.remove("unknown")
    pinned.retain({"2"})
    assert pinned.ranking.keys == []


def test_what_is_beyond_the_bound_comes_in_when_there_is_room() -> None:
    pinned = pinned_of((A, B), (C, D), max_blocks=3)
    ranking = pinned.ranking
    assert (ranking.keys, ranking.ranks) == ([A, B, C], {A: 0, B: 1, C: 2})
    pinned.retain({"0", "1"})
    pinned.add("1", (C, D))
    assert pinned.ranking is ranking, "nothing has changed"
    pinned.remove("0")
    assert pinned.ranking.keys == [C, D]


def test_keys_are_those_under_which_vllm_caches_blocks() -> None:
    group = GroupShape(group_idx=0, chunk_tokens=8, hashes_per_chunk=2, window_chunks=0)
    hashes = [bytes([n]) * 32 for n in range(7)]
    keys = gpu_keys([group], hashes, covered_tokens=24)
    assert list(keys) == [make_block_hash_with_group_id(BlockHash(block_hash), 0) for block_hash in hashes[:6]]


@pytest.mark.parametrize(
    "groups",
    [
        [GroupShape(group_idx=0, chunk_tokens=4, hashes_per_chunk=1, window_chunks=2)],
        [GroupShape(group_idx=0, chunk_tokens=4, hashes_per_chunk=1, window_chunks=0, is_recurrent=True)],
        [GroupShape(group_idx=n, chunk_tokens=4, hashes_per_chunk=1, window_chunks=0) for n in range(2)],
    ],
)
def test_no_keys_where_a_prefix_is_not_all(groups: list[GroupShape]) -> None:
    assert gpu_keys(groups, [b"h" * 32] * 4, covered_tokens=16) == ()


def test_a_shield_moves_pinned_blocks_behind_all_others_tail_first() -> None:
    manager = pool_of([None, A, B, C, None, None])
    soft = SoftPins(BlockQueue(manager, 4), pinned_of((A, B), (C,)))
    soft.shield(1)
    assert order(manager) == [0, 1, 2, 3, 4, 5]
    soft.shield(2)
    assert order(manager) == [0, 4, 5, 3, 2, 1]
    soft.shield(6)
    assert order(manager) == [0, 4, 5, 3, 2, 1]


def test_of_two_blocks_with_one_hash_the_one_that_vllm_hits_is_kept() -> None:
    manager = pool_of([A, A, None])
    SoftPins(BlockQueue(manager, 4), pinned_of((A,))).shield(1)
    assert order(manager) == [1, 2, 0]


def test_many_blocks_move_in_slices_before_they_have_to() -> None:
    """A pass is over when vLLM has taken the blocks before the pinned ones, and no step moves more than a slice."""
    num_pinned, num_taken = 8 * SLICE, 0
    keys = [number.to_bytes(4, "big") * 9 for number in range(num_pinned)]
    manager = pool_of([*keys, *[None] * num_pinned * (RATIO - 1)])
    queue = manager.block_pool.free_block_queue
    soft = SoftPins(BlockQueue(manager, 4), pinned_of(tuple(keys)))
    soft.shield(500)
    assert soft.num_moved == num_pinned, "all at once: they were at the head"
    while num_taken < 4 * num_pinned * (RATIO - 1):
        moved_before = soft.num_moved
        soft.shield(500)
        assert soft.num_moved == moved_before, "no move was forced"
        taken = queue.popleft_n(400)
        assert not any(block.block_hash for block in taken)
        queue.append_n(taken)
        soft.pace(400)
        assert soft.num_moved - moved_before <= min(SLICE, 1 + 1.1 * 400 / (RATIO - 1))
        num_taken += 400
    assert soft.num_moved - num_pinned == pytest.approx(num_taken / (RATIO - 1), rel=0.1)


def test_a_step_is_bound_by_prompts_left_and_requests() -> None:
    demand = Demand(SHAPE)
    long: Any = SimpleNamespace(
        request_id="long", num_tokens=40, num_computed_tokens=0, resumable=False, status=RequestStatus.RUNNING
    )
    short: Any = SimpleNamespace(
        request_id="short", num_tokens=5, num_computed_tokens=0, resumable=False, status=RequestStatus.RUNNING
    )
    demand.allocated(long)
    demand.allocated(short)
    assert demand.stepped({"long": 16, "short": 0}, (), ()) == 2 + 16 // 4
    long.num_computed_tokens = 32
    assert demand.stepped({"long": 4, "short": 5}, (), ()) == 2 + 4 // 4
    long.num_computed_tokens = 36
    assert demand.stepped({"long": 4}, {"short"}, ()) == 1
    assert demand.stepped({"long": 1}, (), {"long"}) == 1, "it has blocks again"
    long.status = RequestStatus.PREEMPTED
    assert demand.stepped({}, (), {"long", "unknown"}) == 0


def test_a_streaming_session_may_get_any_number_of_tokens() -> None:
    demand = Demand(SHAPE)
    session: Any = SimpleNamespace(
        request_id="s", num_tokens=5, num_computed_tokens=5, resumable=True, status=RequestStatus.RUNNING
    )
    demand.allocated(session)
    assert demand.stepped({}, (), ()) == 1 + 4


def test_pools_of_another_shape_are_refused_by_name() -> None:
    manager = pool_of([None, None])
    del manager.block_pool.touch
    with pytest.raises(UnknownPoolError, match=r"BlockPool has no touch; kvtier knows that of vLLM 0\."):
        BlockQueue(manager, 4)
    manager = pool_of([None, None])
    with pytest.raises(UnknownPoolError, match="it hashes 4 tokens, a block has 8"):
        BlockQueue(manager, 8)
    manager.block_pool.enable_caching = False
    with pytest.raises(UnknownPoolError, match="prefix cache is off"):
        BlockQueue(manager, 4)
    manager = pool_of([None, None])
    manager.block_pool.free_block_queue.fake_free_list_head.next_free_block = None
    with pytest.raises(UnknownPoolError, match="no doubly linked list"):
        BlockQueue(manager, 4)


@pytest.mark.parametrize(
    ("mode", "shape", "warning"),
    [
        (GpuPin.SOFT, SHAPE, "not the one kvtier knows (KVCacheManager has no block_pool"),
        (GpuPin.HARD, None, "several groups of blocks, a window or a state"),
        (GpuPin.OFF, SHAPE, ""),
    ],
)
def test_what_rules_pins_out_is_said_once(
    mode: GpuPin, shape: EngineShape | None, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    pinned, unknown = PinnedBlocks(), SimpleNamespace(new_step_starts=lambda: None)
    pins = GpuPins(ConnectorSettings(socket="/s", gpu_pin=mode), shape, pinned, ConnectorStats())  # type: ignore[arg-type]
    pins.bind(unknown)
    assert not pins.is_on
    assert [warning in record.getMessage() for record in caplog.records] == [True] * bool(warning)
    pins.before_step()
    pins.allocated(SimpleNamespace())


def test_a_failing_move_loses_no_block() -> None:
    manager = pool_of([A, B, None])
    queue = BlockQueue(manager, 4)

    def keys() -> Any:
        yield A
        raise RuntimeError

    with pytest.raises(RuntimeError):
        queue.move_to_tail(keys())
    assert order(manager) == [1, 2, 0]
    assert manager.block_pool.free_block_queue.num_free_blocks == 3


def test_a_pin_of_higher_priority_goes_before_older_ones() -> None:
    pinned = PinnedBlocks()
    pinned.bound(10)
    pinned.add("old", (A, B))
    pinned.add("dear", (C, A), priority=5)
    pinned.add("cheap", (D,), priority=-1)
    assert pinned.ranking.keys == [C, A, B, D]
    pinned.add("cheap", (D,), priority=9)  # pinned again, with another priority
    assert pinned.ranking.keys == [D, C, A, B]
    pinned.remove("dear")
    pinned.add("cheap", (D,), priority=-1)
    assert pinned.ranking.keys == [A, B, D]
    pinned.bound(1)
    pinned.add("dear", (C,), priority=1)
    assert pinned.ranking.keys == [C], "the bound keeps the best"
