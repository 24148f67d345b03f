"""Pinned prompts in vLLM's prefix cache, through floods of ten times its size: soft, hard, and off for comparison.

Each test has a daemon and an engine of its own, which is asked the same.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import (
    HANG_S,
    PATIENT,
    Answer,
    Stack,
    ask,
    ask_all,
    flood,
    prefix_cache_hit,
    running_stack,
    tokens,
)

PREFIX_TOKENS = 640
PREFIXES = {mode: tokens(seed, PREFIX_TOKENS) for seed, mode in enumerate(("soft", "hard", "off"), start=4)}
QUESTION = tokens(2, 60)
# With the prefix (20 blocks), these at once (3 each) and one request of a flood (31) fit into vLLM's 63: so vLLM has no
# reason of its own to preempt.
QUESTIONS = [tokens(10 + number, 60) for number in range(4)]
POOLS = 10


@pytest.fixture
def stack() -> Iterator[Stack]:
    """A daemon. Prefills are chunked: 256 tokens a step."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)), max_batched_tokens=256, connector_config=PATIENT)
    with running_stack(options) as stack:
        yield stack


def flood_ten_pools(engine: Engine, seed: int) -> int:
    """Serve other prompts of ten times the size of vLLM's cache; return how many tokens."""
    wanted, sent = POOLS * engine.options.pool_blocks * engine.options.block_size, 0
    while sent < wanted:
        sent += flood(engine, seed + sent)
    return sent


def reset(engine: Engine) -> bool:
    """Return whether vLLM says that it has reset its prefix cache, at the first attempt."""
    answer = engine.http.post("/reset_prefix_cache")
    answer.raise_for_status()
    return bool(answer.json()["success"])


def wait_idle_usage(engine: Engine, expected: float) -> None:
    """Wait until vLLM's usage metric shows this; it is published with steps, and stores end after their request."""

    def is_there() -> bool:
        ask(engine, tokens(3, 8), max_tokens=1)
        return engine.metric("vllm:kv_cache_usage_perc") == pytest.approx(expected, abs=1e-4)

    wait_until(is_there, HANG_S, f"a usage of {expected}")


@contextmanager
def pinned(stack: Stack, mode: str) -> Iterator[tuple[Engine, Answer]]:
    """Run an engine and pin a prompt; give vLLM's own answer too, with the prompt in its cache."""
    config = PATIENT if mode == "soft" else PATIENT | {"gpu_pin": mode}
    with stack.engine(connector_config=config) as engine:
        stack.wait_attached(engine)
        reference = prefix_cache_hit(engine, PREFIXES[mode], QUESTION)
        stack.pin(mode, PREFIXES[mode], engine)
        yield engine, reference


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_a_pinned_prompt_stays_in_vllms_cache(stack: Stack, mode: str, compare: Comparisons, note: Note) -> None:
    """Through floods, beside running requests, and without a daemon; until somebody resets the cache."""
    prefix = PREFIXES[mode]
    with pinned(stack, mode) as (engine, reference):
        num_tokens = flood_ten_pools(engine, 10_000)
        answer = ask(engine, prefix + QUESTION)
        assert answer.by_source == dict.fromkeys(answer.by_source, 0) | {"device": PREFIX_TOKENS}
        compare.same_logprobs(answer, reference)
        num_blocks = PREFIX_TOKENS // engine.options.block_size
        wait_idle_usage(engine, 0 if mode == "soft" else num_blocks / (engine.options.pool_blocks - 1))
        assert engine.metric("kvtier_connector_gpu_pinned_blocks") == num_blocks
        assert engine.metric("kvtier_connector_gpu_resident_blocks") == num_blocks
        preempted = engine.metric("vllm:num_preemptions_total")
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(flood, engine, 20_000)
            answers = ask_all(engine, [prefix + question for question in QUESTIONS], max_tokens=20)
            others.result()
        assert [answer.cached_tokens for answer in answers] == [PREFIX_TOKENS] * len(QUESTIONS)
        assert engine.metric("vllm:num_preemptions_total") == preempted
        stack.daemon.kill()
        flood_ten_pools(engine, 30_000)
        assert ask(engine, prefix + QUESTIONS[0]).by_source["device"] == PREFIX_TOKENS
        moves = engine.metric("kvtier_connector_gpu_moves_total")
        note(f"{mode}: {PREFIX_TOKENS} tokens kept through 2 x {num_tokens} tokens, {moves:.0f} blocks moved")
        assert reset(engine)
        assert ask(engine, prefix + QUESTION).cached_tokens == 0


def test_without_pins_the_same_flood_evicts_it(stack: Stack, compare: Comparisons) -> None:
    """And it comes back from host memory."""
    with pinned(stack, "off") as (engine, reference):
        flood_ten_pools(engine, 40_000)
        wait_idle_usage(engine, 0)
        compare.restored_equals_prefix_cache_hit(ask(engine, PREFIXES["off"] + QUESTION), reference, "host")
        assert reset(engine)
