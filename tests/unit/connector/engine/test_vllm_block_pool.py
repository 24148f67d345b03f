"""What kvtier asks of vLLM's block pool, and what it does there, block by block."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.core.layout import suffix_of
from kvtier_connector.engine.vllm_block_pool import UnknownPoolError, VllmBlockPool
from tests.unit.connector.gpu_pins.test_gpu_pins import order, pool_of

A, B, C, D = (bytes([n]) * 36 for n in range(4))


def pool_and_manager(*keys: bytes | None) -> tuple[VllmBlockPool, Any]:
    manager = pool_of(list(keys))
    return VllmBlockPool(manager, 4), manager


def use(manager: Any, *block_ids: int) -> None:
    """A request takes these blocks."""
    manager.block_pool.touch([manager.block_pool.blocks[block_id] for block_id in block_ids])


def test_the_null_block_does_not_count() -> None:
    pool, manager = pool_and_manager(A, None, B)
    assert (pool.num_blocks, pool.num_free) == (3, 3)
    use(manager, 0)
    assert (pool.num_blocks, pool.num_free) == (3, 2)


@pytest.mark.parametrize(("num_ranks", "first_pinned"), [(0, 9), (1, 4), (2, 2), (3, 2)])
def test_the_queue_is_clear_up_to_the_first_block_that_ranks(num_ranks: int, first_pinned: int) -> None:
    pool, _ = pool_and_manager(None, D, B, None, A)
    for num_blocks in range(8):
        assert pool.is_clear({A: 0, B: 1}, num_ranks, num_blocks) is (num_blocks <= first_pinned)


def test_a_second_block_of_a_hash_is_not_what_vllm_hits() -> None:
    pool, _ = pool_and_manager(A, A, B)
    assert not pool.is_clear({A: 0}, 1, 1)
    pool, manager = pool_and_manager(A, A, B)
    use(manager, 0)
    assert pool.is_clear({A: 0}, 1, 3), "the one that is hit is in use"
    assert pool.move_to_tail([A]) == 0
    assert order(manager) == [1, 2]


def test_only_blocks_that_are_cached_and_free_are_moved() -> None:
    pool, manager = pool_and_manager(A, B, C, None, D)
    use(manager, 1)
    manager.block_pool.blocks[2].is_null = True
    assert pool.move_to_tail([D, C, b"n" * 36, B, A]) == 2
    assert order(manager) == [2, 3, 4, 0]
    assert pool.num_free == 4
    assert pool.move_to_tail([]) == 0
    assert order(manager) == [2, 3, 4, 0]


def test_no_block_is_lost_when_moving_fails() -> None:
    pool, manager = pool_and_manager(A, B, C)

    def keys() -> Any:
        yield A
        yield B
        raise ValueError("whatever it is")

    with pytest.raises(ValueError, match="whatever"):
        pool.move_to_tail(keys())
    assert order(manager) == [2, 0, 1]
    assert pool.num_free == 3


def test_a_cached_block_is_one_free_or_in_use() -> None:
    pool, manager = pool_and_manager(A, B, None)
    use(manager, 1)
    assert [pool.is_cached(key) for key in (A, B, C)] == [True, True, False]


@pytest.mark.parametrize("num_held", range(5))
def test_the_blocks_of_a_prefix_that_requests_hold_are_counted(num_held: int) -> None:
    hashes = [bytes([number]) * 32 for number in range(4)]
    pool, manager = pool_and_manager(*(block_hash + suffix_of(0) for block_hash in hashes[:4]))
    use(manager, *range(num_held))
    assert pool.num_in_use(hashes, 4) == num_held
    assert pool.num_in_use(hashes, 2) == min(2, num_held), "of the first two"
    assert pool.num_in_use([*hashes, b"n" * 32], 5) == num_held, "one that is not cached is not held"
    assert pool.num_in_use(hashes, 0) == 0


def test_a_hold_takes_a_block_out_of_the_queue_until_it_is_released() -> None:
    pool, manager = pool_and_manager(A, B, C, None)
    assert pool.hold(D) is None
    manager.block_pool.blocks[2].is_null = True
    assert pool.hold(C) is None
    assert [pool.hold(key) for key in (B, A)] == [1, 0]
    assert order(manager) == [2, 3]
    assert [pool.is_held_once(block) for block in (1, 0)] == [True, True]
    assert [pool.is_block_of(key, block) for key, block in ((B, 1), (A, 0))] == [True, True]
    use(manager, 0)
    assert [pool.is_held_once(block) for block in (1, 0)] == [True, False]
    pool.release([1, 0])
    assert order(manager) == [2, 3, 1]
    assert pool.is_held_once(0), "a request has it still"
    assert not pool.is_held_once(1), "it is free again"


def test_a_held_block_may_lose_its_hash() -> None:
    """VLLM takes the hash away when a load into the block fails, and may give the block another one."""
    pool, manager = pool_and_manager(A)
    assert pool.hold(A) == 0
    manager.block_pool.blocks[0].reset_hash()
    assert not pool.is_block_of(A, 0)
    manager.block_pool.blocks[0].set_block_hash(B, num_tokens=4)
    assert not pool.is_block_of(A, 0)


def test_acts_come_before_a_step_and_before_a_reset() -> None:
    done: list[str] = []
    manager = pool_of([None])
    manager.new_step_starts = lambda: done.append("step")
    answers = [True, False]

    def reset() -> bool:
        done.append("reset")
        return answers.pop(0)

    manager.block_pool.reset_prefix_cache = reset
    pool = VllmBlockPool(manager, 4)
    pool.before_step(lambda: done.append("act"))
    pool.before_reset(lambda: done.append("release"))
    manager.new_step_starts()
    assert [manager.block_pool.reset_prefix_cache() for _ in range(2)] == [True, False], "as vLLM answers"
    assert done == ["act", "step", "release", "reset", "release", "reset"]


def test_a_queue_that_is_not_doubly_linked_is_refused() -> None:
    manager = pool_of([None, None])
    head = manager.block_pool.free_block_queue.fake_free_list_head
    head.next_free_block.prev_free_block = None
    with pytest.raises(UnknownPoolError, match="no doubly linked list"):
        VllmBlockPool(manager, 4)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        ("KVCacheManager", "new_step_starts"),
        ("FreeKVCacheBlockQueue", "append_n"),
        ("KVCacheBlock", "prev_free_block"),
        ("BlockHashToBlockMap", "get_one_block"),
    ],
)
def test_what_is_missing_is_named(of: str, name: str) -> None:
    manager = pool_of([None, None])
    pool, queue = manager.block_pool, manager.block_pool.free_block_queue
    without: Any = SimpleNamespace()
    if of == "KVCacheManager":
        manager = SimpleNamespace(block_pool=pool)
    elif of == "FreeKVCacheBlockQueue":
        names: tuple[str, ...] = ("fake_free_list_head", "fake_free_list_tail", "num_free_blocks", "remove")
        pool.free_block_queue = SimpleNamespace(**{each: getattr(queue, each) for each in names})
    elif of == "KVCacheBlock":
        head, names = queue.fake_free_list_head, ("block_hash", "block_id", "is_null", "next_free_block", "ref_cnt")
        queue.fake_free_list_head = SimpleNamespace(**{each: getattr(head, each) for each in names})
    else:
        pool.cached_block_hash_to_block = without
    with pytest.raises(UnknownPoolError, match=f"^{of} has no {name}; kvtier knows that of vLLM"):
        VllmBlockPool(manager, 4)
