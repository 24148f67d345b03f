"""vLLM's block pool, as far as kvtier looks at it and moves blocks in it: the only module that knows its internals.

Read from vLLM 0.31 to 0.33: `v1/core/block_pool.py` (`BlockPool`, `BlockHashToBlockMap`), `FreeKVCacheBlockQueue` of
`v1/core/kv_cache_utils.py`, `KVCacheManager.new_step_starts`. What is relied on:

- A block with `ref_cnt` 0 that is not the null block is in `free_block_queue`, cached or not.
- Blocks leave the queue by `get_new_blocks`, from the head, and by `touch`, from anywhere; nothing else takes them out.
- `free_blocks` puts blocks without a hash before the head and blocks with one behind the tail, in the order given.
- `Scheduler.schedule` calls `KVCacheManager.new_step_starts` before it allocates anything.
- Of several blocks with one hash, vLLM hits the one that `get_one_block` returns, until that one is evicted.

A block that is moved is taken out and put back in one call: `num_free_blocks`, which vLLM's admission, preemption
and usage metric go by, is the same before and after.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.core.layout import suffix_of
from kvtier.vllm_versions import TESTED_VERSIONS

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

GpuKey = bytes
"""vLLM's block hash with the index of the KV cache group."""

_POOL = (
    "blocks",
    "cached_block_hash_to_block",
    "enable_caching",
    "free_block_queue",
    "free_blocks",
    "get_num_free_blocks",
    "hash_block_size",
    "num_gpu_blocks",
    "reset_prefix_cache",
    "touch",
)
_MANAGER = ("block_pool", "new_step_starts")
_QUEUE = ("append_n", "fake_free_list_head", "fake_free_list_tail", "num_free_blocks", "remove")
_BLOCK = ("block_hash", "block_id", "is_null", "next_free_block", "prev_free_block", "ref_cnt")


class Ranks(Protocol):
    """A rank by key, like a dictionary."""

    def get(self, key: GpuKey, default: int, /) -> int:
        """Return the key's rank, or the default."""


class UnknownPoolError(Exception):
    """vLLM's pool does not look like the one that this module was read from."""


def index_of(pool: "BlockPool | None") -> object:
    """Return the index of vLLM's prefix cache: a new one after each reset. Any thread; None where it is not known."""
    # Source: `BlockPool.reset_prefix_cache` of vLLM 0.32, which notifies connectors only when they are reset too.
    return getattr(pool, "cached_block_hash_to_block", None)


def is_empty(pool: "BlockPool | None") -> bool:
    """Return whether no block has KV or belongs to a request; False where the pool is not known."""
    if pool is None:
        return False
    # One block is the null block, and always in use.
    return not len(pool.cached_block_hash_to_block) and pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1


class VllmBlockPool:
    """The pool's free blocks in eviction order, and the blocks that it has cached. Scheduler thread only.

    Raises:
        UnknownPoolError: Something that is relied on is not there; the message names it.
    """

    def __init__(self, manager: "KVCacheManager", block_tokens: int) -> None:
        self._manager: Any = manager
        _check_names("KVCacheManager", manager, _MANAGER)
        self._pool: Any = manager.block_pool
        _check(self._pool, block_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, but for the null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that vLLM may give out."""
        return int(self._pool.get_num_free_blocks())

    def is_clear(self, ranks: Ranks, num_ranks: int, num_blocks: int) -> bool:
        """Return whether the first `num_blocks` of the queue hold no block that ranks among the first `num_ranks`.

        A second block of the same hash does not count: vLLM hits the other one.
        """
        cached = self._pool.cached_block_hash_to_block
        tail = self._pool.free_block_queue.fake_free_list_tail
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(num_blocks):
            if block is tail:
                break
            key = block.block_hash
            if key is not None and ranks.get(key, num_ranks) < num_ranks and cached.get_one_block(key) is block:
                return False
            block = block.next_free_block
        return True

    def move_to_tail(self, keys: Iterable[GpuKey]) -> int:
        """Make the cached and free blocks among these the last to be evicted, in order; return how many were moved."""
        queue, cached = self._pool.free_block_queue, self._pool.cached_block_hash_to_block
        moved: list[Any] = []
        try:
            for key in keys:
                block = cached.get_one_block(key)
                if block is not None and not block.ref_cnt and not block.is_null:
                    queue.remove(block)
                    moved.append(block)
        finally:
            queue.append_n(moved)  # whatever happens, no block is lost
        return len(moved)

    def move_reached_to_tail(self, ranks: Ranks, num_ranks: int, num_blocks: int, max_moves: int) -> int:
        """Make blocks that rank among the first `num_ranks` the last to be evicted, the worst of them first.

        Only those that vLLM would reach while it takes `num_blocks` others, and at most `max_moves`; return how many.
        """
        cached = self._pool.cached_block_hash_to_block
        tail = self._pool.free_block_queue.fake_free_list_tail
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        num_others, reached = 0, list[tuple[int, GpuKey]]()
        while block is not tail and num_others < num_blocks and len(reached) < max_moves:
            key = block.block_hash
            rank = num_ranks if key is None else ranks.get(key, num_ranks)
            if rank < num_ranks and cached.get_one_block(key) is block:
                reached.append((rank, key))
            else:
                num_others += 1
            block = block.next_free_block
        return self.move_to_tail(key for _, key in sorted(reached, reverse=True))

    def is_cached(self, key: GpuKey) -> bool:
        """Return whether vLLM has the block, free or in use."""
        return self._pool.cached_block_hash_to_block.get_one_block(key) is not None

    def num_in_use(self, block_hashes: Sequence[bytes], num_blocks: int) -> int:
        """Return how many of a prefix's first blocks requests hold: to hit those takes no free block.

        Who holds a block of a prefix holds those before it, so a bisection finds the last. (Where vLLM has a block
        twice it may be off by some.)
        """
        suffix = suffix_of(0)
        return bisect_left(range(num_blocks), True, key=lambda idx: not self._is_in_use(block_hashes[idx] + suffix))

    def block_of(self, block_hash: bytes) -> int | None:
        """Return the number of the block that vLLM hits for this hash."""
        block = self._pool.cached_block_hash_to_block.get_one_block(block_hash + suffix_of(0))
        return None if block is None else int(block.block_id)

    def _is_in_use(self, key: GpuKey) -> bool:
        block = self._pool.cached_block_hash_to_block.get_one_block(key)
        return block is not None and bool(block.ref_cnt)

    def hold(self, key: GpuKey) -> int | None:
        """Take a reference to the block, if vLLM has it; return its number."""
        block = self._pool.cached_block_hash_to_block.get_one_block(key)
        if block is None or block.is_null:
            return None
        self._pool.touch([block])
        return int(block.block_id)

    def is_held_once(self, block: int) -> bool:
        """Return whether a held block is free once it is released."""
        return bool(self._pool.blocks[block].ref_cnt == 1)

    def is_block_of(self, key: GpuKey, block: int) -> bool:
        """Return whether a held block still has this key; vLLM forgets its hash when a load into it has failed."""
        return bool(self._pool.blocks[block].block_hash == key)

    def release(self, blocks: Iterable[int]) -> None:
        """Release references; blocks without another user are free again, the last of them evicted last."""
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])

    def before_step(self, act: Callable[[], None]) -> None:
        """Have `act` called before vLLM's scheduler looks at its running requests.

        vLLM 0.32 has no call for this in the connector's API: between one step's metadata and the next step, requests
        end and put blocks behind the pinned ones.
        """
        start = self._manager.new_step_starts

        def act_and_start() -> None:
            act()
            start()

        self._manager.new_step_starts = act_and_start

    def before_reset(self, act: Callable[[], None]) -> None:
        """Have `act` called before vLLM looks whether its prefix cache may be reset.

        vLLM 0.32 asks the connector only after that, and refuses while a block is held.
        """
        reset = self._pool.reset_prefix_cache

        def release_and_reset() -> bool:
            act()
            return bool(reset())

        self._pool.reset_prefix_cache = release_and_reset


def _check(pool: Any, block_tokens: int) -> None:
    _check_names("BlockPool", pool, _POOL)
    _check_names("FreeKVCacheBlockQueue", pool.free_block_queue, _QUEUE)
    _check_names("KVCacheBlock", pool.free_block_queue.fake_free_list_head, _BLOCK)
    _check_names("BlockHashToBlockMap", pool.cached_block_hash_to_block, ("get_one_block",))
    if not pool.enable_caching:
        raise UnknownPoolError("its prefix cache is off")
    if pool.hash_block_size != block_tokens:
        raise UnknownPoolError(f"it hashes {pool.hash_block_size} tokens, a block has {block_tokens}")
    head = pool.free_block_queue.fake_free_list_head
    if head.next_free_block is None or head.next_free_block.prev_free_block is not head:
        raise UnknownPoolError("its free blocks are no doubly linked list")


def _check_names(kind: str, thing: object, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise UnknownPoolError(f"{kind} has no {', '.join(missing)}; kvtier knows that of vLLM {TESTED_VERSIONS}")
