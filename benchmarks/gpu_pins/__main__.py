"""CPU time that soft GPU pins cost vLLM's scheduler per step, by how many blocks are pinned and how tight the pool is.

usage: python -m benchmarks.gpu_pins [--running 64] [--steps 400]

vLLM's KVCacheManager does what a step does with blocks: every running request gets a slot for one more token, and one
request ends for each that is admitted with a prompt of its own. Two pools do the same in turns; one has pins, called as
the connector calls them. Thread CPU time. `policy` is these calls alone; the difference of the pools includes the noise
of everything else. P pinned blocks, F free ones; vLLM takes at least 2 F blocks, so that each pinned block has come
near the head of the queue and was moved.
"""

import argparse
import itertools
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.request import Request, RequestStatus

from benchmarks.measuring.machine import machine_line
from kvtier_connector.engine.vllm_block_pool import VllmBlockPool
from kvtier_connector.gpu_pins.block_demand import Demand, EngineShape
from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.policy import Policy
from kvtier_connector.metrics.engine_stats import ConnectorStats

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 32
STEP_TOKENS = 8192
RATIOS = (0.05, 0.1, 0.25)
NUM_PINNED = (100, 1000, 10_000)


@dataclass
class StepTimes:
    """Seconds of thread CPU time per step.

    Attributes:
        whole: All of what the scheduler does with blocks.
        policy: The calls of the connector within it.
        num_taken: Blocks that left the queue.
        num_moved: Blocks that the policy moved.
    """

    whole: list[float] = field(default_factory=list)
    policy: list[float] = field(default_factory=list)
    num_taken: int = 0
    num_moved: int = 0


class BlockPool:
    """A pool of blocks, running requests, and pins or none.

    Args:
        num_pinned: Blocks that are pinned and that vLLM has; None: without the policy.
        num_free: Free blocks, the pinned ones among them.
        num_running: Requests that decode.
    """

    def __init__(self, num_pinned: int | None, num_free: int, num_running: int, pinned_tokens: list[int]) -> None:
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher: Any = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self._manager = manager_of(num_free + num_running * (PROMPT_BLOCKS + 4) + 1)
        self._ids = itertools.count(1)
        self.samples = StepTimes()
        self._pinned = PinnedBlocks()
        self._stats = ConnectorStats()
        self._policy: Policy | None = None
        if num_pinned is not None:
            queue = VllmBlockPool(self._manager, BLOCK_TOKENS)
            self._pinned.bound(queue.num_blocks)
            shape = EngineShape(block_tokens=BLOCK_TOKENS, max_step_tokens=STEP_TOKENS)
            self._policy = Policy(queue, self._pinned, Demand(shape), is_hard=False)
        if pinned_tokens:  # on both sides, so that they have the same queue
            request = self._request(pinned_tokens)
            self._admit(request)
            self._manager.free(request)
            if num_pinned:
                self._pinned.add("p", [bytes(block_hash) + bytes(4) for block_hash in request.block_hashes])
        self._running: deque[Any] = deque(self._request(self._prompt()) for _ in range(num_running))
        for request in self._running:
            self._ask(request)
            self._admit(request)

    def step(self) -> None:
        """One step, timed; hashes are computed outside, as vLLM computes them anyway."""
        new = self._request(self._prompt())
        over, policy_s = self._running.popleft(), 0.0
        num_free = self._manager.block_pool.get_num_free_blocks()
        began_s = time.thread_time()
        policy_s += self._timed(Policy.before_step)
        for request in self._running:
            self._manager.allocate_slots(request, 1)
        self._manager.get_computed_blocks(new)
        policy_s += self._ask(new)
        self._admit(new)
        num_taken = num_free - self._manager.block_pool.get_num_free_blocks()
        policy_s += self._after_step(new, over)
        self._manager.free(over)
        self.samples.whole.append(time.thread_time() - began_s)
        self.samples.policy.append(policy_s)
        self.samples.num_taken += num_taken
        self._running.append(new)
        for request in self._running:
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(7)
        if self._policy is not None:
            self.samples.num_moved = self._policy._soft.num_moved

    def _ask(self, request: Any) -> float:
        seconds = self._timed(lambda policy: policy.before_admission(request, 0, is_load=False))
        return seconds + self._timed(lambda policy: policy.allocated(request))

    def _after_step(self, new: Any, over: Any) -> float:
        scheduled = dict.fromkeys((request.request_id for request in self._running), 1)
        scheduled[new.request_id] = new.num_tokens
        output: Any = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids={over.request_id},
            preempted_req_ids=(),
        )
        return self._timed(lambda policy: policy.after_step(output, self._stats))

    def _timed(self, call: Callable[[Policy], object]) -> float:
        """Return the seconds of a call of the policy; 0 without one."""
        if self._policy is None:
            return 0.0
        began_s = time.thread_time()
        call(self._policy)
        return time.thread_time() - began_s

    def _admit(self, request: Any) -> None:
        allocated = self._manager.allocate_slots(request, request.num_tokens, full_sequence_must_fit=True)
        assert allocated is not None
        request.status = RequestStatus.RUNNING

    def _request(self, tokens: list[int]) -> Any:
        params = SamplingParams(max_tokens=10**6, ignore_eos=True)
        return Request(f"r{next(self._ids)}", tokens, params, None, block_hasher=self._hasher)

    def _prompt(self) -> list[int]:
        return [next(self._ids), *range(PROMPT_BLOCKS * BLOCK_TOKENS - 1)]


def manager_of(num_blocks: int) -> KVCacheManager:
    """Return vLLM's manager of this many blocks; the memory they name does not exist."""
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    size = spec.page_size_bytes * num_blocks
    tensor = KVCacheTensor(size=size, layers=["layer"], layer_stride=size, block_stride=spec.page_size_bytes)
    config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(config, max_model_len=10**6, scheduler_block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS)


def measure(num_pinned: int, num_free: int, num_running: int, min_steps: int) -> tuple[StepTimes, StepTimes]:
    """Run both pools in turns; return the times without and with pins."""
    tokens = list(range(num_pinned * BLOCK_TOKENS))
    sides = (BlockPool(None, num_free, num_running, tokens), BlockPool(num_pinned, num_free, num_running, tokens))
    without, with_pins = (side.samples for side in sides)
    while len(without.whole) < min_steps or without.num_taken < 2 * num_free:
        for side in sides:
            side.step()
    return without, with_pins


def row(num_pinned: int, ratio: float, num_free: int, without: StepTimes, with_pins: StepTimes) -> str:
    """Return a row of the table."""
    difference = statistics.median(with_pins.whole) - statistics.median(without.whole)
    moves = with_pins.num_moved / with_pins.num_taken
    return (
        f"| {num_pinned:,} | {ratio:.2f} | {num_free:,} | {len(without.whole):,} | {_us(without.whole)} | "
        f"{_us(with_pins.whole)} | {difference * 1e6:+.0f} | {_us(with_pins.policy)} | "
        f"{max(with_pins.policy) * 1e6:.0f} | {moves:.3f} |"
    )


def _us(seconds: list[float]) -> str:
    tenths = statistics.quantiles(seconds, n=10)
    return f"{statistics.median(seconds) * 1e6:.0f} ({tenths[0] * 1e6:.0f}..{tenths[-1] * 1e6:.0f})"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    print(machine_line())
    print(f"{options.running} running requests, one admitted per step ({PROMPT_BLOCKS} blocks); us of thread CPU time,")
    print("medians (p10..p90)\n")
    print("| P | P/(F-P) | F | steps | without | with | difference | policy | its worst step | moves per block taken |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    cases = [(0, 0.0, 20_000)]
    cases += [(pinned, ratio, pinned + round(pinned / ratio)) for pinned in NUM_PINNED for ratio in RATIOS]
    for pinned, ratio, num_free in cases:
        print(row(pinned, ratio, num_free, *measure(pinned, num_free, options.running, options.steps)), flush=True)


if __name__ == "__main__":
    main()
