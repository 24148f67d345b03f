"""GPU pins under vLLM's real scheduler: what they keep, and that nothing else changes."""

import random
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvtier._pb import engine_pb2 as pb
from kvtier_connector.metrics.declared import GPU_HELD_BLOCKS, GPU_PINNED_BLOCKS, GPU_RESIDENT_BLOCKS
from kvtier_connector.metrics.engine_stats import ConnectorStats
from tests.simulation.engine import BLOCK_TOKENS, SimulatedEngine

FULL = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=2 * BLOCK_TOKENS
)
NUM_BLOCKS = 20
PINNED = list(range(100, 100 + 6 * BLOCK_TOKENS))
OTHER = list(range(300, 300 + 3 * BLOCK_TOKENS))
MODES = ("off", "soft", "hard")


class Engine(SimulatedEngine):
    """Records what was scheduled, and checks that vLLM never takes more blocks than it was expected to."""

    def __init__(self, gpu_pin: str, *, num_blocks: int = NUM_BLOCKS, is_async: bool = False, specs: Any = (FULL,)):
        super().__init__(specs, num_blocks=num_blocks, num_slots=24, gpu_pin=gpu_pin, is_async=is_async)
        self.scheduled: list[SchedulerOutput] = []
        self.cached: dict[str, int] = {}
        schedule = self.scheduler.schedule
        self.scheduler.schedule = lambda: self._record(schedule())
        self.attach()
        self.num_spare: int | None = None  # blocks that vLLM may still take before it asks again
        if gpu_pin != "off" and self.connector.gpu_pins.is_on:
            self._watch()

    def _record(self, output: SchedulerOutput) -> SchedulerOutput:
        self.scheduled.append(output)
        self.cached |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        self.num_spare = None  # what follows is no allocation of the scheduler
        return output

    def _watch(self) -> None:
        policy: Any = self.connector.gpu_pins._policy
        pool: Any = self.scheduler.kv_cache_manager.block_pool
        demand = policy._demand
        before_step, before_admission, after_step = policy.before_step, policy.before_admission, policy.after_step
        get_new_blocks, touch = pool.get_new_blocks, pool.touch

        def step() -> None:
            before_step()
            self.num_spare = policy._num_next

        def admission(*args: Any, **kwargs: Any) -> None:
            before_admission(*args, **kwargs)
            self.num_spare = demand.of_admission(*args, **kwargs)

        def end(output: SchedulerOutput, stats: ConnectorStats) -> None:
            self.num_spare = None
            after_step(output, stats)

        def taken(num_blocks: int) -> None:
            if self.num_spare is not None:
                self.num_spare -= num_blocks
                assert self.num_spare >= 0, "vLLM took more blocks than the bound"

        def new(num_blocks: int) -> Any:
            taken(num_blocks)
            return get_new_blocks(num_blocks)

        def touched(blocks: Any) -> None:
            taken(sum(not block.ref_cnt and not block.is_null for block in blocks))
            touch(blocks)

        policy.before_step, policy.before_admission, policy.after_step = step, admission, end
        pool.get_new_blocks, pool.touch = new, touched

    def pin(self, pin_id: str, tokens: list[int]) -> None:
        """Pin, and let the scheduler take it in."""
        pin = pb.Pin(pin_id=pin_id, name=pin_id, tokens=tokens, pinned=True)
        self.daemon.pins[pin_id] = pin
        self.link.bind(pin)
        self.receive()

    def serve(self, req_id: str, prompt: list[int], max_tokens: int = 1) -> int:
        """Serve one request alone; return how many of its tokens vLLM itself had."""
        self.add(req_id, prompt, max_tokens=max_tokens)
        self.run()
        return self.cached[req_id]

    def run(self) -> None:
        """Step until nothing is left to do."""
        while not self.is_idle:
            self.step(num_copies=3)

    def flood(self, num_prompts: int, seed: int = 0) -> None:
        """Serve prompts that have nothing in common with any other, each of half the pool."""
        for number in range(num_prompts):
            self.serve(f"flood{seed}-{number}", [500 + number, *range(seed * 200, seed * 200 + 8 * BLOCK_TOKENS)])

    @property
    def usage(self) -> float:
        """What vLLM says of its pool."""
        return float(self.scheduler.kv_cache_manager.usage)


@pytest.fixture(params=(False, True), ids=("sync", "async"))
def is_async(request: pytest.FixtureRequest) -> bool:
    """Whether a step is scheduled before the output of the last is known."""
    return bool(request.param)


def kept(mode: str, *, is_async: bool) -> tuple[int, Engine]:
    """Pin, compute, flood with ten times the pool; return what vLLM has of the prompt."""
    engine = Engine(mode, is_async=is_async)
    engine.pin("p", PINNED)
    assert engine.serve("first", [*PINNED, 1]) == 0
    engine.daemon.lose_session()  # or what vLLM has lost would come from there
    engine.receive()
    engine.flood(10 * NUM_BLOCKS // 8 + 1)
    return engine.serve("last", [*PINNED, 2]), engine


def test_a_flood_of_ten_pools_leaves_the_pinned_prompt(is_async: bool) -> None:
    assert kept("off", is_async=is_async)[0] == 0
    for mode in ("soft", "hard"):
        num_kept, engine = kept(mode, is_async=is_async)
        assert num_kept == len(PINNED), mode
        assert engine.connector.gpu_pins.is_on


def test_usage_shows_what_is_held_and_nothing_else(is_async: bool) -> None:
    usages = {mode: kept(mode, is_async=is_async)[1].usage for mode in MODES}
    assert usages["off"] == usages["soft"] == 0
    assert usages["hard"] == pytest.approx(6 / (NUM_BLOCKS - 1))


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_succeeds_and_forgets_the_prompt(mode: str) -> None:
    _, engine = kept(mode, is_async=False)
    assert engine.reset(running=False, connector=False)
    assert engine.usage == 0
    assert engine.serve("again", [*PINNED, 3]) == 0
    assert engine.reset(running=True, connector=True)


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_a_request_that_needs_the_whole_pool_gets_it(mode: str) -> None:
    """And then the pinned prompt has lost its tail, not its head."""
    engine = Engine(mode)
    engine.pin("p", PINNED)
    engine.serve("first", [*PINNED, 1])
    engine.daemon.lose_session()
    big = [900, *range(400, 400 + (NUM_BLOCKS - 4) * BLOCK_TOKENS)]
    assert engine.serve("big", big, max_tokens=2) == 0
    assert engine.num_preemptions == 0
    num_free = NUM_BLOCKS - 1 - (NUM_BLOCKS - 4 + 1)
    assert engine.serve("last", [*PINNED, 2]) == num_free * BLOCK_TOKENS
    assert engine.serve("big2", [901, *big[1:]], max_tokens=2) == 0


def test_the_newest_pin_is_left_out_when_they_are_more_than_may_be_kept() -> None:
    engine = Engine("soft")  # half of 19 blocks: 6 of the first, 3 of the second
    second = list(range(700, 700 + 5 * BLOCK_TOKENS))
    engine.pin("p", PINNED)
    engine.pin("q", second)
    engine.serve("first", [*PINNED, 1])
    engine.serve("second", [*second, 1])
    engine.daemon.lose_session()
    engine.receive()
    engine.flood(20)
    assert engine.serve("p", [*PINNED, 2]) == len(PINNED)
    assert engine.serve("q", [*second, 2]) == 3 * BLOCK_TOKENS


def test_an_unpinned_prompt_is_evicted_like_any_other() -> None:
    for mode in ("soft", "hard"):
        engine = Engine(mode)
        engine.pin("p", PINNED)
        engine.serve("first", [*PINNED, 1])
        engine.link.unbind("p")
        engine.flood(6)
        assert engine.usage == 0
        assert engine.serve("last", [*PINNED, 2]) == 0


def test_pins_stand_without_a_session_until_the_next_one_names_others() -> None:
    engine = Engine("soft")
    engine.pin("p", PINNED)
    engine.pin("q", OTHER)
    keys = list(engine.connector.gpu_pins._pinned.ranking.keys())
    assert len(keys) == 9
    engine.daemon.lose_session()
    engine.receive()
    assert engine.connector.gpu_pins._pinned.ranking.keys() == keys
    del engine.daemon.pins["q"]
    engine.attach()
    engine.receive()
    assert engine.connector.gpu_pins._pinned.ranking.keys() == keys[:6]
    ended = pb.Pin(pin_id="p", name="p", tokens=PINNED, pinned=False)  # it may be loaded, nothing of it is kept
    engine.link.bind(ended)
    engine.receive()
    assert engine.connector.gpu_pins._pinned.ranking.keys() == []


def test_a_prompt_that_vllm_holds_when_it_is_pinned_is_kept() -> None:
    engine = Engine("soft")
    engine.serve("first", [*PINNED, 1])
    engine.flood(1)
    engine.pin("p", PINNED)
    engine.daemon.lose_session()
    engine.flood(20, seed=1)
    assert engine.serve("last", [*PINNED, 2]) == len(PINNED)


def run(mode: str, *, seed: int, is_async: bool) -> list[Any]:
    """Serve a random load in a tight pool, with hits or without; return what was scheduled."""
    engine, rng = Engine(mode, num_blocks=12, is_async=is_async), random.Random(seed)
    engine.pin("p", PINNED)
    engine.pin("q", OTHER)
    for number in range(60):
        prompt = rng.choice((PINNED, OTHER, list(range(700, 700 + 40)))) + [rng.randrange(10)] * rng.randrange(1, 40)
        engine.add(f"r{number}", prompt, max_tokens=rng.randrange(1, 40), skip=True)
        for _ in range(rng.randrange(12)):
            if not engine.is_idle:
                engine.step(num_copies=2)
    engine.run()
    assert mode == "off" or engine.connector.gpu_pins.is_on
    assert engine.num_preemptions
    return [(output.num_scheduled_tokens, output.preempted_req_ids) for output in engine.scheduled]


@pytest.mark.parametrize("seed", range(4))
def test_vllm_schedules_the_same_with_pins_and_without(seed: int, is_async: bool) -> None:
    """Admissions, chunks and preemptions, step by step. Prefixes are not read, or hits would rightly change them."""
    expected = run("off", seed=seed, is_async=is_async)
    for mode in ("soft", "hard"):
        assert run(mode, seed=seed, is_async=is_async) == expected, mode


def test_several_groups_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine("soft", num_blocks=40, specs=(FULL, WINDOW))
    assert not engine.connector.gpu_pins.is_on
    assert caplog.text.count("gpu_pin is off") == 1
    engine.pin("p", PINNED)
    engine.serve("first", [*PINNED, 1])
    assert not engine.connector.gpu_pins._pinned.ranking.keys()


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_a_failure_inside_turns_pins_off_and_nothing_else(
    mode: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(mode)
    engine.pin("p", PINNED)
    engine.serve("first", [*PINNED, 1])
    policy: Any = engine.connector.gpu_pins._policy
    policy._soft.shield = _fail
    set_values: dict[str, float] = {}
    monkeypatch.setattr(engine.manager.stats, "set", lambda metric, value: set_values.update({metric.name: value}))
    engine.serve("second", [*PINNED, 2])
    assert set_values == {GPU_PINNED_BLOCKS.name: 0, GPU_RESIDENT_BLOCKS.name: 0, GPU_HELD_BLOCKS.name: 0}
    assert not engine.connector.gpu_pins.is_on
    assert "gpu_pin is off from now on" in caplog.text
    assert engine.usage == 0
    assert engine.reset(running=False, connector=False)


def _fail(num_blocks: int) -> None:
    raise RuntimeError("on purpose")
