"""Times to first token under other orders of admission, simulated: vLLM's own, and kvtier's with other bounds.

usage: python -m benchmarks.admission [--users 16,64] [--seeds 25] [--answer-tokens 16]

The load is that of `benchmarks.load_turns`: conversations behind 8 system prompts of 62 blocks, of which a pool of 287
blocks holds four and a half; every prompt is in host memory, and all that users write is stored. A step takes a
constant, and something for each request that decodes or begins; the constants are those of a machine with two cores.
kvtier's order is its real code. Only the order of the variants means something: `benchmarks.load_turns` measures.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from unittest.mock import patch

from benchmarks.admission.simulated_pool import (
    BLOCK_TOKENS,
    PROMPT_BLOCKS,
    TURN_TOKENS,
    SimulatedPool,
    SimulatedRequest,
    conversations,
)
from benchmarks.measuring.tables import table
from kvtier_connector.admission import prefix_first
from kvtier_connector.admission.prefix_first import BlockNeed, PrefixFirst

STEP_S, DECODING_S, BEGINNING_S, COMPUTED_TOKEN_S = 0.013, 0.0012, 0.0026, 0.00023
LOAD_S, ANSWER_AFTER_S = 0.045, 0.01
NUM_PROMPTS, POOL_BLOCKS, TURNS = 8, 287, 5
MAX_STEPS = 200_000
FOR_EVER = 1 << 40


class AdmissionOrder(Protocol):
    """What decides whether a request lets others pass: as `PrefixFirst`."""

    step: int

    def arrived(self, req_id: str) -> None:
        """See `PrefixFirst`."""

    def is_held(self, req_id: str, need: BlockNeed, num_free: int) -> bool:
        """See `PrefixFirst`."""

    def admitted(self, req_id: str) -> None:
        """See `PrefixFirst`."""

    def ended(self, req_id: str) -> None:
        """See `PrefixFirst`."""

    def step_ends(self, num_tokens: int) -> None:
        """See `PrefixFirst`."""


class Fcfs:
    """vLLM's own order."""

    step = 0

    def arrived(self, req_id: str) -> None:
        """Nothing is remembered."""

    def is_held(self, req_id: str, need: BlockNeed, num_free: int) -> bool:
        """No request is held."""
        return False

    admitted = ended = arrived

    def step_ends(self, num_tokens: int) -> None:
        """Nothing is remembered."""


@dataclass
class SimulatedScheduler:
    """One run of all users.

    Attributes:
        is_asynchronous: A prompt that is not in the pool is asked for, and the request passed until there is an answer.
        closes: Whether the order knows since when a prompt is in use.
    """

    order: AdmissionOrder
    users: list[list[tuple[int, int]]]
    answer_tokens: int
    is_asynchronous: bool
    closes: bool
    pool: SimulatedPool = field(default_factory=lambda: SimulatedPool(POOL_BLOCKS, NUM_PROMPTS))
    now_s: float = 0.0
    waiting: list[SimulatedRequest] = field(default_factory=list)
    loading: list[SimulatedRequest] = field(default_factory=list)
    running: list[SimulatedRequest] = field(default_factory=list)
    done: list[SimulatedRequest] = field(default_factory=list)

    def run(self) -> None:
        """Answer every turn."""
        num_turns = sum(map(len, self.users))
        coming = [(0.001 * user, user, 0) for user in range(len(self.users))]
        for _ in range(MAX_STEPS):
            if len(self.done) == num_turns:
                return
            for arrived_s, user, turn in sorted(each for each in coming if each[0] <= self.now_s):
                self._arrive(user, turn, arrived_s)
            coming = [each for each in coming if each[0] > self.now_s]
            ended = self._step(min((each[0] for each in coming), default=self.now_s + STEP_S))
            for request in ended:
                if request.turn + 1 < len(self.users[request.user]):
                    coming.append((self.now_s + ANSWER_AFTER_S, request.user, request.turn + 1))
        raise AssertionError(f"{num_turns - len(self.done)} turns were not answered in {MAX_STEPS} steps")

    def _arrive(self, user: int, turn: int, arrived_s: float) -> None:
        prompt, number = self.users[user][turn]
        own_blocks = 1 + (number + 1) * TURN_TOKENS // BLOCK_TOKENS
        request = SimulatedRequest(
            req_id=f"{user}.{turn}",
            user=user,
            turn=turn,
            prompt=prompt,
            own_blocks=own_blocks,
            computed_tokens=TURN_TOKENS,
            arrived_s=arrived_s,
            waits_for_answer=self.is_asynchronous and self.pool.cached_blocks(prompt) < PROMPT_BLOCKS,
        )
        self.waiting.append(request)
        self.order.arrived(request.req_id)

    def _step(self, next_s: float) -> list[SimulatedRequest]:
        """Schedule and compute a step; return the requests that it has ended."""
        beginning = [request for request in self.loading if request.ready_s <= self.now_s]
        self.loading = [request for request in self.loading if request.ready_s > self.now_s]
        beginning += self._admit()
        num_tokens = len(self.running) + sum(request.computed_tokens for request in beginning)
        self.order.step_ends(num_tokens)
        if not num_tokens:
            self.now_s = max(self.now_s + 0.001, min([next_s, *(request.ready_s for request in self.loading)]))
            return []
        self.now_s += STEP_S + DECODING_S * len(self.running)
        self.now_s += sum(BEGINNING_S + COMPUTED_TOKEN_S * request.computed_tokens for request in beginning)
        for request in beginning:
            request.first_token_s = self.now_s - request.arrived_s
        self.running += beginning
        for request in self.running:
            request.num_tokens += 1
        ended = [request for request in self.running if request.num_tokens >= self.answer_tokens]
        self.running = [request for request in self.running if request.num_tokens < self.answer_tokens]
        for request in ended:
            self.pool.end(request)
            self.order.ended(request.req_id)
        self.done += ended
        return ended

    def _admit(self) -> list[SimulatedRequest]:
        """Admit what the order lets in and the pool holds; return what need not be loaded."""
        beginning, admitted = list[SimulatedRequest](), list[SimulatedRequest]()
        for request in self.waiting:
            if request.waits_for_answer:
                request.waits_for_answer = False
                continue
            num_cached = self.pool.cached_blocks(request.prompt)
            if self.order.is_held(request.req_id, self._need(request, num_cached), self.pool.num_free):
                continue
            if self.pool.needed_blocks(request) > self.pool.num_free:
                break
            self.pool.admit(request, self.order.step)
            self.order.admitted(request.req_id)
            admitted.append(request)
            if num_cached == PROMPT_BLOCKS:
                beginning.append(request)
            else:
                request.ready_s = self.now_s + LOAD_S * (1 - num_cached / PROMPT_BLOCKS)
                self.loading.append(request)
        self.waiting = [request for request in self.waiting if request not in admitted]
        return beginning

    def _need(self, request: SimulatedRequest, num_cached: int) -> BlockNeed:
        num_loaded = PROMPT_BLOCKS - num_cached
        num_needed = self.pool.needed_blocks(request)
        is_in_use = self.closes and self.pool.users[request.prompt] > 0
        return BlockNeed(
            num_needed=num_needed,
            num_scanned=num_cached,
            is_load=num_loaded > 0 and 2 * num_loaded >= num_needed,
            prompt_since=self.pool.since[request.prompt] if is_in_use else None,
        )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An order; `bound` is both `MAX_PASSED` and `MAX_HELD`."""

    name: str
    make: Callable[[], AdmissionOrder] = PrefixFirst
    is_asynchronous: bool = True
    closes: bool = True
    bound: int = prefix_first.MAX_PASSED


VARIANTS = (
    Variant(name="vLLM's order, all in host memory known at once", make=Fcfs, is_asynchronous=False),
    Variant(name="vLLM's order", make=Fcfs),
    Variant(name="16 pass, prompts stay open", closes=False, bound=16),
    Variant(name="16 pass", bound=16),
    Variant(name="as it is"),
    Variant(name="64 pass", bound=64),
)


def measure(variant: Variant, num_users: int, num_seeds: int, answer_tokens: int) -> list[str]:
    """Return a row: turns a second, and times to first token over all seeds."""
    rates, first_tokens = list[float](), list[float]()
    bound = variant.bound
    with patch.object(prefix_first, "MAX_PASSED", bound), patch.object(prefix_first, "MAX_HELD", bound):
        for seed in range(num_seeds):
            engine = SimulatedScheduler(
                variant.make(),
                conversations(num_users, TURNS, NUM_PROMPTS, seed),
                answer_tokens,
                variant.is_asynchronous,
                variant.closes,
            )
            engine.run()
            rates.append(len(engine.done) / engine.now_s)
            first_tokens += [request.first_token_s for request in engine.done]
    first_tokens.sort()
    shares = [first_tokens[int(share * (len(first_tokens) - 1))] for share in (0.5, 0.95, 0.99)]
    return [str(num_users), variant.name, f"{statistics.mean(rates):.2f}", *(f"{each:.2f}" for each in shares)]


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", default="16,64")
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--answer-tokens", type=int, default=16)
    options = parser.parse_args()
    rows = [
        measure(variant, int(count), options.seeds, options.answer_tokens)
        for count in options.users.split(",")
        for variant in VARIANTS
    ]
    print(table(["users", "order", "turns/s", "first token after s, p50", "p95", "p99"], rows))


if __name__ == "__main__":
    main()
