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
"""An event is over before."""


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

    @property
    def num_pinned(self) -> int:
        """Blocks of all pins."""
        return sum(map(len, self.pins))

    def step(self, takes: int = 0) -> float:
        """Do what soft pins do in a step in which vLLM takes blocks; return its seconds of thread CPU time."""
        began_s = time.thread_time()
        self.soft.shield(STEP_BLOCKS)
        self.pinned.advance()
        self.soft.pace(takes)
        return time.thread_time() - began_s

    def hard_step(self, takes: int = 0) -> float:
        """As `step`, for what hard pins do."""
        began_s = time.thread_time()
        self.hard.reclaim(takes)
        self.pinned.advance()
        self.hard.hold(takes)
        return time.thread_time() - began_s


def timed(call: Callable[[], object]) -> float:
    """Return a call's seconds of thread CPU time."""
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s


def worst_step(step: Callable[[], float], is_over: Callable[[], bool]) -> float:
    """Step until it is over, and as often again, for what is cleaned up behind it; return the longest step."""
    seconds: list[float] = []
    while not is_over():
        assert len(seconds) < MAX_STEPS
        seconds.append(step())
    return max(seconds + [step() for _ in range(2 * len(seconds))])


def bound_pins(pool: LargePool) -> float:
    """All pins are bound between two steps."""
    worst = timed(pool.pin_all)
    return max(worst, worst_step(pool.step, lambda: len(pool.pinned.ranking) == pool.num_pinned))


def forced_moves(pool: LargePool) -> float:
    """All protected blocks lie at the head."""
    bound_pins(pool)
    return max(pool.step(takes=STEP_BLOCKS) for _ in range(200))


def ended_pin(pool: LargePool) -> float:
    """The first pin ends, and all are ranked again."""
    bound_pins(pool)
    worst = timed(lambda: pool.pinned.remove("0"))
    return max(worst, worst_step(pool.step, lambda: pool.pins[0][0] not in pool.pinned.ranking.ranks))


def rising_priorities(pool: LargePool) -> float:
    """Each pin comes before those that were there; the seconds of all, which one step takes in."""

    def add_all() -> None:
        for number, keys in enumerate(pool.pins):
            pool.pinned.add(str(number), keys, number)

    worst = timed(add_all)
    return max(worst, worst_step(pool.step, lambda: pool.pinned.ranking.keys(0, 1) == [pool.pins[-1][0]]))


def held_pins(pool: LargePool) -> float:
    """All pinned blocks come to be held."""
    pool.pin_all()
    return worst_step(pool.hard_step, lambda: pool.hard.num_held == pool.num_pinned)


def ended_held_pin(pool: LargePool) -> float:
    """As `ended_pin`, of blocks that are held."""
    held_pins(pool)
    worst = timed(lambda: pool.pinned.remove("0"))
    return max(worst, worst_step(pool.hard_step, lambda: pool.hard.num_held == pool.num_pinned - len(pool.pins[0])))


def short_of_one(pool: LargePool) -> float:
    """All pinned blocks are held, and each step vLLM is short of one."""
    held_pins(pool)
    return max(pool.hard_step(takes=pool.pool.num_free + 1) for _ in range(100))


EVENTS: dict[str, Callable[[LargePool], float]] = {
    "all pins are bound at once": bound_pins,
    "forced moves": forced_moves,
    "a pin ends": ended_pin,
    "all pins come, each before the last": rising_priorities,
    "hard pins: all come to be held": held_pins,
    "hard pins: a pin ends": ended_held_pin,
    "hard pins: short of one block in each step": short_of_one,
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
