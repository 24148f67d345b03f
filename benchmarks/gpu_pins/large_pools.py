"""The longest calls of GPU pins in a large pool: when pins end or change, when moves are forced, when vLLM is short.

usage: python -m benchmarks.gpu_pins.large_pools [--blocks 1000000] [--pins 100]

vLLM's own block pool, half of its blocks pinned by pins of one length, all cached and free, those of pins at the head
of the queue. Each event is followed by steps until all that it began is over. Thread CPU time of one step, its worst.
"""

import argparse
import gc
import time
from collections.abc import Callable

from vllm.v1.core.kv_cache_manager import KVCacheManager

from benchmarks.gpu_pins.__main__ import BLOCK_TOKENS, manager_of
from benchmarks.measuring.machine import machine_line
from kvtier_connector.engine.vllm_block_pool import VllmBlockPool
from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.hard_pins import HardPins
from kvtier_connector.gpu_pins.soft_pins import SoftPins

STEP_BLOCKS = 512
"""What vLLM may take in a step of 8,192 tokens."""
MAX_STEPS = 20_000


class LargePool:
    """A pool whose first half is pinned; `pins` are the keys of each."""

    def __init__(self, num_blocks: int, num_pins: int) -> None:
        self.manager: KVCacheManager = manager_of(num_blocks + 1)
        blocks = self.manager.block_pool.blocks[1:]
        keys = [number.to_bytes(32, "big") + bytes(4) for number in range(num_blocks // 2)]
        for block, key in zip(blocks, keys, strict=False):
            block.set_block_hash(key)
            self.manager.block_pool.cached_block_hash_to_block.insert(key, block)
        length = len(keys) // num_pins
        self.pins = [tuple(keys[start : start + length]) for start in range(0, length * num_pins, length)]
        self.pool = VllmBlockPool(self.manager, BLOCK_TOKENS)
        self.pinned = PinnedBlocks()
        self.pinned.bound(num_blocks // 2)
        self.soft, self.hard = SoftPins(self.pool, self.pinned), HardPins(self.pool, self.pinned)

    def pin_all(self) -> None:
        """Bind every pin, with one priority."""
        for number, keys in enumerate(self.pins):
            self.pinned.add(str(number), keys)

    def step(self, *, takes: int = 0, is_hard: bool = False) -> float:
        """Do what the policy does in a step in which vLLM takes blocks; return its seconds of thread CPU time."""
        began_s = time.thread_time()
        if is_hard:
            self.hard.reclaim(takes)
        else:
            self.soft.shield(STEP_BLOCKS)
        self.pinned.advance()
        if is_hard:
            self.hard.hold(takes)
        else:
            self.soft.pace(takes)
        return time.thread_time() - began_s


def timed(call: Callable[[], object]) -> float:
    """Return a call's seconds of thread CPU time."""
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s


def forced_moves(pool: LargePool) -> float:
    """All protected blocks lie at the head."""
    pool.pin_all()
    return max(pool.step(takes=STEP_BLOCKS) for _ in range(200))


def ended_pin(pool: LargePool) -> float:
    """The first pin ends, and all are ranked again."""
    pool.pin_all()
    before = pool.pinned.ranking
    worst = timed(lambda: pool.pinned.remove("0"))
    num_steps = 0
    while pool.pinned.ranking is before and num_steps < MAX_STEPS:
        worst, num_steps = max(worst, pool.step()), num_steps + 1
    assert pool.pins[0][0] not in pool.pinned.ranking.ranks
    return worst


def rising_priorities(pool: LargePool) -> float:
    """Each pin comes before those that were there; the seconds of all, which one step takes in."""

    def add_all() -> None:
        for number, keys in enumerate(pool.pins):
            pool.pinned.add(str(number), keys, number)

    worst = timed(add_all)
    num_steps = 0
    while next(iter(pool.pinned.ranking.ranks), b"") != pool.pins[-1][0] and num_steps < MAX_STEPS:
        worst, num_steps = max(worst, pool.step()), num_steps + 1
    assert pool.pinned.ranking.keys[0] == pool.pins[-1][0]
    return worst


def short_of_one(pool: LargePool) -> float:
    """All pinned blocks are held, and each step vLLM is short of one."""
    pool.pin_all()
    while pool.hard.num_held < len(pool.pins) * len(pool.pins[0]):
        pool.step(takes=0, is_hard=True)
    return max(pool.step(takes=pool.pool.num_free + 1, is_hard=True) for _ in range(100))


EVENTS: dict[str, Callable[[LargePool], float]] = {
    "a forced move": forced_moves,
    "a pin ends": ended_pin,
    "pins of rising priority, all in one step": rising_priorities,
    "hard pins, short of one block in each step": short_of_one,
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--pins", type=int, default=100)
    options = parser.parse_args()
    print(f"{machine_line()}\n{options.blocks:,} blocks, half of them of {options.pins} pins\n")
    print("| event | worst step, ms of CPU |\n|---|---|")
    for name, measure in EVENTS.items():
        pool = LargePool(options.blocks, options.pins)
        gc.collect()
        gc.freeze()  # as vLLM does once it has started
        print(f"| {name} | {measure(pool) * 1e3:.2f} |", flush=True)


if __name__ == "__main__":
    main()
