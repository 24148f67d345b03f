"""The parts of GPU pins that need no vLLM engine; the whole is in tests/property and tests/simulation."""

import itertools
import operator
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

from kvtier_connector.engine.chunk_keys import GroupShape, gpu_keys
from kvtier_connector.engine.vllm_block_pool import UnknownPoolError, VllmBlockPool
from kvtier_connector.gpu_pins import block_ranking
from kvtier_connector.gpu_pins import hard_pins as hard_module
from kvtier_connector.gpu_pins import soft_pins as soft_module
from kvtier_connector.gpu_pins.block_demand import Demand, EngineShape
from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.hard_pins import HardPins
from kvtier_connector.gpu_pins.hooks import GpuPins
from kvtier_connector.gpu_pins.policy import Policy
from kvtier_connector.gpu_pins.soft_pins import MIN_FORCED, RATIO, SLICE, SoftPins
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.settings import ConnectorSettings, GpuPin

A, B, C, D, E = (bytes([n]) * 36 for n in range(5))
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

    def touch(taken: list[KVCacheBlock]) -> None:
        for block in taken:
            if not block.ref_cnt:
                queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(given: list[KVCacheBlock]) -> None:
        for block in given:
            block.ref_cnt -= 1
        queue.append_n([block for block in given if not block.ref_cnt])

    pool = SimpleNamespace(
        blocks=blocks,
        cached_block_hash_to_block=FakeCache(blocks),
        enable_caching=True,
        free_block_queue=queue,
        free_blocks=free_blocks,
        get_num_free_blocks=lambda: queue.num_free_blocks,
        hash_block_size=4,
        num_gpu_blocks=len(blocks) + 1,
        reset_prefix_cache=lambda: True,
        touch=touch,
    )
    return SimpleNamespace(block_pool=pool, new_step_starts=lambda: None)


def step_of(num_tokens: int) -> Any:
    """Return what vLLM says of a step over this many tokens."""
    return SimpleNamespace(
        num_scheduled_tokens={}, total_num_scheduled_tokens=num_tokens, finished_req_ids=(), preempted_req_ids=None
    )


def request_of(num_tokens: int) -> Any:
    return SimpleNamespace(
        request_id="r", num_tokens=num_tokens, num_computed_tokens=0, resumable=False, status=RequestStatus.RUNNING
    )


def order(manager: Any) -> list[int]:
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]


def pinned_of(*pins: tuple[bytes, ...], max_blocks: int = 10**6) -> PinnedBlocks:
    pinned = PinnedBlocks()
    pinned.bound(max_blocks)
    for number, keys in enumerate(pins):
        pinned.add(str(number), keys)
    return pinned


def ranked(pinned: PinnedBlocks) -> PinnedBlocks:
    """As it is after some steps."""
    for _ in range(40):
        pinned.advance()
    return pinned


def test_the_oldest_pin_is_the_best_and_shared_blocks_are_its_own() -> None:
    pinned = pinned_of((A, B), (A, C))
    assert pinned.ranking.keys() == [A, B, C]
    pinned.add("0", (A, D))  # bound again, and still the oldest
    assert pinned.ranking.keys() == [A, D, C]
    pinned.remove("0")
    assert pinned.ranking.keys() == [A, C]
    pinned.remove("unknown")
    pinned.retain({"2"})
    assert pinned.ranking.keys() == []


def test_what_is_beyond_the_bound_comes_in_when_there_is_space() -> None:
    pinned = pinned_of((A, B), (C, D), max_blocks=3)
    ranking = pinned.ranking
    assert (ranking.keys(), [ranking.ranks.get(key) for key in (A, B, C, D)]) == ([A, B, C], [0, 1, 2, None])
    pinned.retain({"0", "1"})
    pinned.add("1", (C, D))
    assert pinned.ranking is ranking, "nothing has changed"
    pinned.remove("0")
    assert pinned.ranking.keys() == [C, D]


@pytest.fixture
def slow_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than two blocks are ranked two at a time."""
    monkeypatch.setattr(block_ranking, "RANKED_AT_ONCE", 2)
    monkeypatch.setattr(block_ranking, "_SLICE", 2)


@pytest.mark.usefixtures("slow_ranking")
def test_many_blocks_are_ranked_again_in_slices() -> None:
    """The end of one pin of many took 113 ms of one step, with 250,000 blocks; of 100 new ones each took that."""
    pinned = ranked(pinned_of((A, B, C), (D,)))
    pinned.add("2", (E,), priority=1)
    before = pinned.ranking
    assert before.keys() == [A, B, C, D], "the new one comes in later"
    num_steps = 0
    while pinned.ranking is before:
        pinned.advance()
        num_steps += 1
    assert pinned.ranking.keys() == [E, A, B, C, D]
    assert num_steps == 3
    num_left = [len(before)]
    while num_left[-1]:
        pinned.advance()
        num_left.append(len(before))
    assert all(0 < gone <= 3 for gone in map(operator.sub, num_left, num_left[1:])), "forgotten in slices, too"
    ranking = pinned.ranking
    pinned.advance()
    assert pinned.ranking is ranking, "nothing is left to do"


@pytest.mark.usefixtures("slow_ranking")
def test_many_blocks_of_new_pins_are_added_in_slices() -> None:
    pinned = pinned_of((A, B, C), (A, D), (E,))
    seen = [pinned.ranking.keys()]
    for _ in range(8):
        pinned.advance()
        seen.append(pinned.ranking.keys())
    assert seen[0] == []
    assert [keys for keys, _ in itertools.groupby(seen)] == [[], [A, B], [A, B, C], [A, B, C, D], [A, B, C, D, E]]
    assert pinned.ranking.keys(1, 4) == [B, C, D]
    assert pinned.ranking.keys(4, 9) == [E]


@pytest.mark.usefixtures("slow_ranking")
def test_what_changes_while_blocks_are_ranked_again_is_in_the_ranking_after_that() -> None:
    pinned = ranked(pinned_of((A, B, C), (D,)))
    pinned.add("0", (A, B, C), priority=1)
    pinned.advance()
    pinned.add("3", (E,), priority=2)  # while the first ranking is made
    pinned.remove("1")
    seen, last = [pinned.ranking.keys()], pinned.ranking
    for _ in range(12):
        pinned.advance()
        if pinned.ranking is not last:
            last = pinned.ranking
            seen.append(last.keys())
    assert seen == [[A, B, C, D], [A, B, C, D], [E, A, B, C]]
    pinned.add("4", (D,))
    pinned.advance()
    assert pinned.ranking is last, "a new pin that is the worst needs none of this"
    assert last.keys() == [E, A, B, C, D]


@pytest.mark.usefixtures("slow_ranking")
def test_few_blocks_are_ranked_again_at_once_also_while_many_were_under_way() -> None:
    pinned = pinned_of((A, B, C), (D,))
    pinned.add("2", (E,), priority=1)
    pinned.advance()
    pinned.retain({"1", "2"})
    assert pinned.ranking.keys() == [E, D]


def test_of_many_blocks_only_those_within_reach_are_forced_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """All protected ones moved: 110 ms of one step with 100,000."""
    monkeypatch.setattr(soft_module, "SLICE", 2)
    monkeypatch.setattr(soft_module, "MIN_FORCED", 1)
    monkeypatch.setattr(soft_module, "RATIO", 1)
    manager = pool_of([A, None, B, C, None, None, D, None])
    soft = SoftPins(VllmBlockPool(manager, 4), pinned_of((A, B, C, D)))
    soft.shield(1)
    assert order(manager) == [1, 2, 3, 4, 5, 6, 7, 0]
    soft.shield(3)
    assert order(manager) == [1, 4, 5, 6, 7, 0, 3, 2], "the worst of those that moved first"
    soft.shield(3)
    assert soft.num_moved == 3, "none is within reach"


@pytest.mark.usefixtures("slow_ranking")
def test_many_held_blocks_follow_a_new_ranking_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was short of one block sorted all that were held, 62 ms in each step with 250,000."""
    monkeypatch.setattr(hard_module, "_FOLLOWED_AT_ONCE", 2)
    monkeypatch.setattr(hard_module, "_FOLLOWED", 2)
    manager = pool_of([A, B, C, D, E, None])
    pool, pinned = VllmBlockPool(manager, 4), ranked(pinned_of((A, B), (C, D), (E,)))
    hard = HardPins(pool, pinned)
    hard.hold(0)
    assert hard.num_held == 5
    pinned.remove("1")
    pinned.add("3", (E,), priority=1)
    ranked(pinned)
    assert pinned.ranking.keys() == [E, A, B]
    num_held = [hard.num_held]
    while len(num_held) < 5:
        hard.hold(10)
        num_held.append(hard.num_held)
    assert num_held[-1] == 3, "what is pinned no longer was released"
    assert all(gone <= 2 for gone in map(operator.sub, num_held, num_held[1:])), "a few in each step"
    hard.reclaim(pool.num_free + 2)
    assert order(manager)[-2:] == [1, 0], "the worst went first"


@pytest.mark.usefixtures("slow_ranking")
def test_short_of_blocks_the_rest_of_a_new_ranking_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hard_module, "_FOLLOWED_AT_ONCE", 0)
    monkeypatch.setattr(hard_module, "_FOLLOWED", 1)
    manager = pool_of([A, B, C, D, E, None])
    pool, pinned = VllmBlockPool(manager, 4), ranked(pinned_of((A, B), (C, D), (E,)))
    hard = HardPins(pool, pinned)
    hard.hold(0)
    pinned.remove("0")
    ranked(pinned)
    hard.reclaim(6)
    assert (hard.num_held, pool.num_free) == (0, 6)


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
    soft = SoftPins(VllmBlockPool(manager, 4), pinned_of((A, B), (C,)))
    soft.shield(1)
    assert order(manager) == [0, 1, 2, 3, 4, 5]
    soft.shield(2)
    assert order(manager) == [0, 4, 5, 3, 2, 1]
    soft.shield(6)
    assert order(manager) == [0, 4, 5, 3, 2, 1]


def test_of_two_blocks_with_one_hash_the_one_that_vllm_hits_is_kept() -> None:
    manager = pool_of([A, A, None])
    SoftPins(VllmBlockPool(manager, 4), pinned_of((A,))).shield(1)
    assert order(manager) == [1, 2, 0]


def test_many_blocks_move_in_slices_before_they_have_to() -> None:
    """A pass is over when vLLM has taken the blocks before the pinned ones, and no step moves more than a slice."""
    num_pinned, num_taken = 8 * SLICE, 0  # each forced move takes `MIN_FORCED`, since vLLM takes fewer
    keys = [number.to_bytes(4, "big") * 9 for number in range(num_pinned)]
    manager = pool_of([*keys, *[None] * num_pinned * (RATIO - 1)])
    queue = manager.block_pool.free_block_queue
    soft = SoftPins(VllmBlockPool(manager, 4), ranked(pinned_of(tuple(keys))))
    for number in range(1, num_pinned // MIN_FORCED + 1):
        soft.shield(500)
        assert soft.num_moved == number * MIN_FORCED, "they were at the head, and no step may take long"
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


def test_a_pass_goes_from_the_worst_to_the_best_and_goes_on_after_a_forced_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soft_module, "SLICE", 2)
    keys = [bytes([number]) * 36 for number in range(5)]
    manager = pool_of([*keys, *[None] * 20])
    soft, moved = SoftPins(VllmBlockPool(manager, 4), pinned_of(tuple(keys))), list[int]()
    soft.shield(1)
    assert order(manager)[-5:] == [4, 3, 2, 1, 0]
    for _ in range(8):
        before = soft.num_moved
        soft.pace(3)  # of 25 blocks 5 are pinned, 17 are others, but for a margin and a slice: 15 / 17 of a move is due
        moved += order(manager)[-1:] * (soft.num_moved - before)
    assert moved == [4, 3, 2, 1, 0, 4]
    manager.block_pool.free_block_queue.append_n(manager.block_pool.free_block_queue.popleft_n(20))
    soft.shield(1)
    assert order(manager)[-5:] == [4, 3, 2, 1, 0]
    while soft.num_moved < 5 + 6 + 5 + 1:
        soft.pace(3)
    assert order(manager)[-1] == 3


def test_what_vllm_takes_is_counted_in_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of three tokens take a block after two of them; what was cached of a request is taken, too."""
    paced: list[int] = []
    policy = Policy(VllmBlockPool(pool_of([A, None]), 4), pinned_of((A,)), Demand(SHAPE), is_hard=False)
    monkeypatch.setattr(policy._soft, "pace", paced.append)
    for _ in range(4):
        policy.after_step(step_of(3), ConnectorStats())
    assert paced == [0, 1, 1, 1]
    policy.before_admission(request_of(20), 9, is_load=True)
    policy.allocated(request_of(20))
    policy.after_step(step_of(0), ConnectorStats())
    assert paced[4:] == [2]
    unpinned = Policy(VllmBlockPool(pool_of([A, None]), 4), PinnedBlocks(), Demand(SHAPE), is_hard=False)
    monkeypatch.setattr(unpinned._soft, "pace", paced.append)
    unpinned.after_step(step_of(8), ConnectorStats())
    assert len(paced) == 5


def test_more_blocks_than_one_step_looks_at_are_held_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """And looked at again: one that vLLM has forgotten, since a load into it failed, is released."""
    monkeypatch.setattr(hard_module, "_SLICE", 2)
    keys = [bytes([number]) * 36 for number in range(5)]
    manager = pool_of([*keys[:3], None, *keys[3:], None, None])
    pinned = pinned_of(tuple(keys))
    hard = HardPins(VllmBlockPool(manager, 4), pinned)
    held = []
    for _ in range(3):
        hard.hold(num_keep_free=1)
        held.append(hard.num_held)
    assert held == [2, 4, 5]
    manager.block_pool.blocks[0].reset_hash()
    del manager.block_pool.cached_block_hash_to_block.by_key[keys[0]]
    hard.hold(num_keep_free=1)
    assert hard.num_held == 4
    pinned.remove("0")
    hard.hold(num_keep_free=1)
    assert (hard.num_held, len(order(manager))) == (0, 8)


def test_blocks_are_held_while_enough_stay_free(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = pool_of([A, B, C, None, None])
    hard = HardPins(VllmBlockPool(manager, 4), pinned_of((A, B, C)))
    hard.hold(num_keep_free=3)
    assert (hard.num_held, len(order(manager))) == (2, 3)
    hard.reclaim(3)
    assert (hard.num_held, hard.num_released) == (2, 0), "vLLM has them"
    hard.reclaim(4)
    assert (order(manager), hard.num_released) == ([2, 3, 4, 1], 1), "the worst goes first"
    hard.reclaim(9)
    assert (hard.num_held, hard.num_released) == (0, 2)


def test_pinned_blocks_leave_the_way_of_a_request_before_it_is_admitted() -> None:
    manager = pool_of([A, None, None, None])
    settings = ConnectorSettings(socket="/s", gpu_pin=GpuPin.SOFT)  # type: ignore[arg-type]
    pins = GpuPins(settings, SHAPE, pinned_of((A,)), ConnectorStats())
    pins.bind(manager)
    assert order(manager)[0] == 0
    pins.before_admission(request_of(4), 0, is_load=False)
    assert order(manager)[-1] == 0


def test_the_pinned_blocks_that_vllm_has_are_counted_in_turn() -> None:
    """A slice of them in each step; the result is reported when it differs from the last."""
    keys = [bytes([number]) * 36 for number in range(20)]
    manager = pool_of([*keys[:12], *[None] * 40])
    pinned, stats = PinnedBlocks(), ConnectorStats()
    pins = GpuPins(ConnectorSettings(socket="/s", gpu_pin=GpuPin.SOFT), SHAPE, pinned, stats)  # type: ignore[arg-type]
    pins.bind(manager)

    def reported() -> tuple[Any, Any] | None:
        pins.after_step(step_of(0))
        taken = stats.take()
        found = taken.reduce() if taken is not None else {}
        names = ("kvtier_connector_gpu_pinned_blocks", "kvtier_connector_gpu_resident_blocks")
        return (found[names[0]], found[names[1]]) if names[0] in found else None

    assert reported() is None, "nothing is pinned"
    pinned.add("p", keys)
    assert [reported() for _ in range(4)] == [None, (20, 12), None, None]
    del manager.block_pool.cached_block_hash_to_block.by_key[keys[0]]
    assert [reported() for _ in range(3)] == [None, (20, 11), None]
    pinned.add("q", [A + b"q"])
    pinned.remove("q")  # in the middle of a round
    assert [reported() for _ in range(3)] == [None, None, None]
    pinned.remove("p")
    assert reported() == (0, 0)


def test_a_request_takes_and_needs_what_its_shape_says() -> None:
    """Blocks of 4 tokens, steps of 16. What vLLM takes for one is a part of what it looks whether it has."""
    plain, drafts = SHAPE, EngineShape(block_tokens=4, max_step_tokens=16, num_spec_tokens=2, num_lookahead_tokens=3)
    for shape, num_tokens, num_cached, is_load, taken, needed in [
        (plain, 20, 0, False, 4, 5),  # a chunk of it, and space for all
        (plain, 20, 8, False, 5, 5),
        (plain, 100, 8, False, 6, 25),
        (plain, 20, 8, True, 2, 5 + 1),  # the loaded ones; a token more is computed before it is asked for again
        (drafts, 20, 0, False, 5, 5),  # 16 and 3
        (drafts, 20, 20, False, 7, 7),  # all are cached: one token, two drafts and 3
        (drafts, 20, 8, True, 2, 5 + 3),
    ]:
        demand, request = Demand(shape), request_of(num_tokens)
        assert demand.of_admission(request, num_cached, is_load=is_load) == taken
        assert demand.to_admit(request, num_cached, 100, is_load=is_load) == needed
    reserved = EngineShape(block_tokens=4, max_step_tokens=16, watermark_ratio=0.1, reserves_whole_prompt=False)
    demand = Demand(reserved)
    assert demand.to_admit(request_of(100), 8, 99, is_load=False) == 6 + 10
    demand.allocated(request_of(12))
    assert demand.to_admit(request_of(100), 8, 99, is_load=True) == 2 + 10 + 1 + (3 + 1), "others have yet to compute"


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
    assert demand.of_next_step({"long": 16, "short": 0}) == demand.max_next_step() == 2 + 16 // 4
    long.num_computed_tokens = 32
    assert demand.of_next_step({"long": 4, "short": 5}) == 2 + 4 // 4
    long.num_computed_tokens = 36
    demand.ended({"short"}, ())
    assert demand.of_next_step({"long": 4}) == 1
    demand.ended((), {"long"})
    assert demand.of_next_step({"long": 1}) == 1, "it has blocks again"
    long.status = RequestStatus.PREEMPTED
    demand.ended((), {"long", "unknown"})
    assert demand.of_next_step({}) == 0


def test_a_streaming_session_may_get_any_number_of_tokens() -> None:
    demand = Demand(SHAPE)
    session: Any = SimpleNamespace(
        request_id="s", num_tokens=5, num_computed_tokens=5, resumable=True, status=RequestStatus.RUNNING
    )
    demand.allocated(session)
    assert demand.of_next_step({}) == 1 + 4


def test_pools_of_another_shape_are_refused_by_name() -> None:
    manager = pool_of([None, None])
    del manager.block_pool.touch
    with pytest.raises(UnknownPoolError, match=r"BlockPool has no touch; kvtier knows that of vLLM 0\."):
        VllmBlockPool(manager, 4)
    manager = pool_of([None, None])
    with pytest.raises(UnknownPoolError, match="it hashes 4 tokens, a block has 8"):
        VllmBlockPool(manager, 8)
    manager.block_pool.enable_caching = False
    with pytest.raises(UnknownPoolError, match="prefix cache is off"):
        VllmBlockPool(manager, 4)
    manager = pool_of([None, None])
    manager.block_pool.free_block_queue.fake_free_list_head.next_free_block = None
    with pytest.raises(UnknownPoolError, match="no doubly linked list"):
        VllmBlockPool(manager, 4)


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
    queue = VllmBlockPool(manager, 4)

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
    assert pinned.ranking.keys() == [C, A, B, D]
    pinned.add("cheap", (D,), priority=9)  # pinned again, with another priority
    assert pinned.ranking.keys() == [D, C, A, B]
    pinned.remove("dear")
    pinned.add("cheap", (D,), priority=-1)
    assert pinned.ranking.keys() == [A, B, D]
    pinned.bound(1)
    pinned.add("dear", (C,), priority=1)
    assert pinned.ranking.keys() == [C], "the bound keeps the best"
