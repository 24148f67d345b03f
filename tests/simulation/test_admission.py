"""The order of admission under vLLM's real scheduler: who passes whom, that no one starves, and what stays as it was.

Prompt A is in the pool and used by a request that decodes for long; a request for B needs more blocks than are free;
further requests for A need one each. The engine checks in every step that each request reads its own KV.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvtier._pb import engine_pb2 as pb
from kvtier_connector.admission import admission_hooks
from kvtier_connector.admission.prefix_first import MAX_PASSED, BlockNeed
from tests.simulation.engine import BLOCK_TOKENS, STEP_S, SimulatedEngine

FULL = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=2 * BLOCK_TOKENS
)
PROMPT_BLOCKS = 6
A = list(range(100, 100 + PROMPT_BLOCKS * BLOCK_TOKENS))
B = list(range(400, 400 + PROMPT_BLOCKS * BLOCK_TOKENS))
NUM_BLOCKS = 13  # the null block, one prompt, and six more
LONG = 2 * BLOCK_TOKENS
MAX_STEPS = 2000


class Engine(SimulatedEngine):
    """Both prompts are pinned and in host memory; `admitted` has requests in the order in which they got blocks."""

    def __init__(self, *, is_async: bool = False, specs: Any = (FULL,), num_blocks: int = NUM_BLOCKS, **options: Any):
        super().__init__(specs, num_blocks=num_blocks, num_slots=24, is_async=is_async, **options)
        self.admitted: list[str] = []
        self.computed: dict[str, int] = {}
        schedule, allocated = self.scheduler.schedule, self.connector.update_state_after_alloc
        self.scheduler.schedule = lambda: self._record(schedule())

        def admit(request: Any, *args: Any) -> None:
            if request.request_id not in self.admitted:  # one with a load comes twice
                self.admitted.append(request.request_id)
            allocated(request, *args)

        connector: Any = self.connector
        connector.update_state_after_alloc = admit
        self.attach()
        for name, tokens in (("A", A), ("B", B)):
            pin = pb.Pin(pin_id=name, name=name, tokens=tokens, pinned=True)
            self.daemon.pins[name] = pin
            self.link.bind(pin)
            self.receive()
            self.add(f"store {name}", [*tokens, 1], max_tokens=LONG)  # so long requests run, on average
            self.run()
        self.reset(running=False, connector=False)
        self.admitted.clear()

    def _record(self, output: SchedulerOutput) -> SchedulerOutput:
        for new in output.scheduled_new_reqs:
            self.computed[new.req_id] = len(new.prompt_token_ids or ()) - new.num_computed_tokens
        return output

    def step(self, num_copies: int = 3) -> None:
        """The daemon answers what it was asked, and tops up credits; then one turn of vLLM's loop."""
        for number, acquire in list(self.daemon.acquires.items()):
            if not acquire.is_answered:
                self.daemon.answer(number)
        self.daemon.top_up()
        super().step(num_copies)

    def ask(self, req_id: str, prompt: list[int], max_tokens: int = 1) -> None:
        """Send a question behind a prompt."""
        self.add(req_id, [*prompt, len(self.computed)], max_tokens=max_tokens)

    def steps_until(self, req_id: str) -> None:
        """Step until the request has begun."""
        for _ in range(MAX_STEPS):
            if req_id in self.admitted:
                return
            self.step()
        raise AssertionError(f"{req_id} was not admitted in {MAX_STEPS} steps: {self.admitted}")

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if self.is_idle:
                return
            self.step()
        raise AssertionError(f"after {MAX_STEPS} steps {self.unfinished} have not ended")


@pytest.fixture(params=(False, True), ids=("sync", "async"))
def is_async(request: pytest.FixtureRequest) -> bool:
    """Whether a step is scheduled before the output of the last is known."""
    return bool(request.param)


def b_waits(engine: Engine) -> Engine:
    """Let a request for A decode, and one for B wait for blocks.

    The daemon has answered for B: while a request waits for that, vLLM goes on to others anyway.
    """
    engine.ask("a0", A, max_tokens=LONG)
    engine.steps_until("a0")
    engine.ask("b", B)
    for _ in range(4):
        engine.step()
    return engine


def crowd(engine: Engine) -> list[str]:
    """A decodes; then come one request for B and two for A. Return the order in which they got blocks."""
    b_waits(engine)
    engine.ask("a1", A)
    engine.ask("a2", A)
    engine.run()
    return engine.admitted


def test_requests_whose_prompt_is_in_the_pool_pass_one_whose_prompt_is_not(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    assert crowd(engine) == ["a0", "a1", "a2", "b"]
    assert {engine.computed[req_id] for req_id in ("b", "a1", "a2")} == {1}, "only the question is computed"


@pytest.mark.parametrize(
    "options",
    [{"admission": "fcfs"}, {"scheduling_policy": "priority"}, {"specs": (FULL, WINDOW), "num_blocks": 2 * NUM_BLOCKS}],
    ids=["fcfs", "priorities", "windows"],
)
def test_otherwise_they_come_in_their_order(is_async: bool, options: dict[str, Any]) -> None:
    engine = Engine(is_async=is_async, **options)
    assert not engine.connector.admission.is_on
    assert crowd(engine) == ["a0", "b", "a1", "a2"]


def test_with_blocks_for_all_nothing_passes(is_async: bool) -> None:
    assert crowd(Engine(is_async=is_async, num_blocks=3 * NUM_BLOCKS)) == ["a0", "b", "a1", "a2"]


def test_a_request_waits_while_a_bounded_number_pass(is_async: bool) -> None:
    """However many come for the prompt that is in the pool."""
    engine = b_waits(Engine(is_async=is_async))
    for number in range(1, 20 * MAX_PASSED):
        if "b" in engine.admitted:
            break
        engine.ask(f"a{number}", A, max_tokens=4)
        engine.step()
    num_passed = engine.admitted.index("b") - 1
    assert 1 <= num_passed <= MAX_PASSED
    engine.run()


def test_a_prompt_that_is_in_use_for_longer_than_a_request_runs_takes_no_more(is_async: bool) -> None:
    """However few have passed: with one more each time its blocks would never be free."""
    engine = b_waits(Engine(is_async=is_async))
    ran_before = engine.admitted.copy()
    for number in range(1, MAX_PASSED):
        engine.ask(f"a{number}", A, max_tokens=LONG)
        for _ in range(LONG // 4):
            engine.step()
        if "b" in engine.admitted:
            break
    num_passed = engine.admitted.index("b") - len(ran_before)
    assert 1 <= num_passed < MAX_PASSED // 2
    engine.run()
    assert engine.computed["b"] == 1


def test_what_needs_much_does_not_pass(is_async: bool) -> None:
    """A prompt that no cache has: it would take the blocks that the request before it waits for."""
    engine = b_waits(Engine(is_async=is_async))
    engine.ask("unique", list(range(800, 800 + 3 * BLOCK_TOKENS)))
    engine.ask("a1", A)
    engine.run()
    assert engine.admitted == ["a0", "a1", "b", "unique"]


@pytest.mark.parametrize("gpu_pin", ["soft", "hard"])
def test_no_request_waits_because_of_a_pin(is_async: bool, gpu_pin: str) -> None:
    """Blocks that pins hold are released for it, as in vLLM's own order."""
    steps = {}
    for admission in ("fcfs", "prefix_first"):
        engine = Engine(is_async=is_async, num_blocks=14, gpu_pin=gpu_pin, admission=admission)
        engine.ask("a0", A)
        engine.run()
        engine.ask("u", list(range(900, 900 + BLOCK_TOKENS)), max_tokens=LONG)
        engine.steps_until("u")
        engine.ask("b", B)
        began_s = engine.clock()
        engine.steps_until("b")
        steps[admission] = round((engine.clock() - began_s) / STEP_S)
        engine.run()
    assert steps["prefix_first"] == steps["fcfs"]


def test_a_request_that_lost_its_session_is_computed_in_its_place(is_async: bool) -> None:
    engine = b_waits(Engine(is_async=is_async))
    engine.daemon.lose_session()
    engine.daemon.sweep()
    engine.attach()
    for pin in engine.daemon.pins.values():
        engine.link.bind(pin)
    engine.receive()
    engine.run()
    assert engine.admitted == ["a0", "b"]


def test_while_a_request_is_held_its_chunks_are_not_looked_up_again(is_async: bool) -> None:
    engine = b_waits(Engine(is_async=is_async))
    looked_up: list[object] = []
    manager: Any = engine.manager
    lookup = manager.lookup

    def counted(*args: Any) -> Any:
        looked_up.append(args)
        return lookup(*args)

    manager.lookup = counted
    for _ in range(5):
        engine.step()
    assert "b" not in engine.admitted
    assert looked_up == []
    engine.run()
    assert engine.computed["b"] == 1


@pytest.mark.parametrize("num_too_many", [3, 1000])
def test_a_need_that_is_estimated_too_high_stops_no_request(
    is_async: bool, num_too_many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = admission_hooks._block_need

    def too_many(*args: Any) -> BlockNeed:
        need = estimate(*args)
        return replace(need, num_needed=need.num_needed + num_too_many)

    monkeypatch.setattr(admission_hooks, "_block_need", too_many)
    engine = Engine(is_async=is_async)
    engine.ask("b", B)
    for _ in range(8):  # nothing else is computed meanwhile
        engine.step()
    assert engine.admitted == ["b"]
    engine.run()


def test_one_that_waits_alone_is_tried(is_async: bool) -> None:
    """With none behind it a request is admitted as soon as it fits, as without an order."""
    engine = Engine(is_async=is_async)
    engine.ask("a0", A, max_tokens=LONG)
    engine.steps_until("a0")
    engine.ask("b", B)
    engine.run()
    assert engine.admitted == ["a0", "b"]


def test_aborted_requests_are_forgotten(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.ask("a0", A, max_tokens=LONG)
    engine.steps_until("a0")
    engine.ask("b", B)
    engine.ask("a1", A)
    engine.steps_until("a1")
    engine.abort("b")
    engine.run()
    admission = engine.connector.admission
    assert (admission._matches, admission._order._waiting, admission._order._stopped) == ({}, {}, {})


@pytest.mark.parametrize("seed", range(6))
def test_in_random_crowds_every_request_ends_and_reads_its_own_kv(is_async: bool, seed: int) -> None:
    chance = random.Random(seed)
    engine = Engine(is_async=is_async, num_blocks=NUM_BLOCKS + chance.randrange(6))
    prompts = [A, B, A[: 3 * BLOCK_TOKENS], list(range(700, 700 + 4 * BLOCK_TOKENS))]
    for number in range(60):
        engine.ask(f"r{number}", chance.choice(prompts), max_tokens=chance.randrange(1, LONG))
        for _ in range(chance.randrange(4)):
            engine.step(num_copies=chance.randrange(3))
        if chance.random() < 0.1 and engine.unfinished:
            engine.abort(chance.choice(engine.unfinished))
    engine.run()
    assert not engine.unfinished
    order = engine.connector.admission._order
    assert (order._waiting, order._stopped) == ({}, {})
