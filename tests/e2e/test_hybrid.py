"""A model that mixes sliding-window and full attention: two KV cache groups, and a hit needs both."""

import itertools
from collections.abc import Iterator

import pytest

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY_HYBRID
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from kvtier.verification import ComparisonVerdict
from tests.e2e.equality import Comparisons
from tests.e2e.harness import (
    HANG_S,
    PATIENT,
    Stack,
    ask,
    ask_all,
    flood,
    forget_gpu,
    prefix_cache_hit,
    proven,
    running_stack,
    tokens,
)

PREFIX_TOKENS = 640
PREFIX, SHORT, LONG = tokens(1, PREFIX_TOKENS), tokens(2, 40), tokens(3, 300)
QUESTIONS = [tokens(30 + i, 20) for i in range(4)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A daemon; the engine finds the connector by its name alone, through vLLM's plugins."""
    model = str(cached_model("hybrid", TINY_HYBRID))
    with running_stack(
        EngineOptions(model=model, pool_blocks=128, connector_config=PATIENT, by_plugin_name=True)
    ) as stack:
        yield stack


def test_two_groups_after_flood_and_kill(stack: Stack, compare: Comparisons) -> None:
    """From host memory after a flood, from disk after a kill -9 of the daemon."""
    with stack.engine() as engine:
        references = {"short": prefix_cache_hit(engine, PREFIX, SHORT), "long": prefix_cache_hit(engine, PREFIX, LONG)}
        stack.pin("hybrid", PREFIX, engine)
        binding = stack.json("show", "hybrid")["bindings"][0]
        # Whole prefix in the full-attention group; of the sliding group only what reaches into the window.
        num_blocks = PREFIX_TOKENS // engine.options.block_size
        assert num_blocks < binding["num_chunks"] < 2 * num_blocks
        assert binding["num_durable_chunks"] == binding["num_chunks"]
        stored = stack.stored_checksums()
        flood(engine, 10_000)
        compare.restored_equals_prefix_cache_hit(ask(engine, PREFIX + SHORT), references["short"], "host")
        flood(engine, 20_000)
        answers = ask_all(engine, [PREFIX + question for question in QUESTIONS])
        assert [answer.cached_tokens for answer in answers] == [PREFIX_TOKENS] * len(QUESTIONS)
        stack.daemon.kill()
        stack.daemon.lose_memory()
        stack.daemon.start()
        stack.wait_attached(engine)
        forget_gpu(engine)
        compare.restored_equals_prefix_cache_hit(ask(engine, PREFIX + LONG), references["long"], "disk")
        forget_gpu(engine)
        compare.restored_equals_prefix_cache_hit(ask(engine, PREFIX + SHORT), references["short"], "host")
        forget_gpu(engine)
        # Short: a longer request moves the window on, and vLLM gives away blocks that a hit on the prefix needs.
        assert ask(engine, PREFIX + QUESTIONS[0], max_tokens=1).restored_tokens == PREFIX_TOKENS
        stack.store_again("hybrid", PREFIX, engine)
        compare.same_bytes(stored, stack.stored_checksums())
        found = proven(engine, PREFIX)
        assert found.verdict is ComparisonVerdict.EQUAL, found
        assert (found.restored_tokens, found.max_difference) == (PREFIX_TOKENS, 0)
        # The prefix of one group and the window of the other, for requests with a salt.
        assert ask(engine, PREFIX + SHORT, cache_salt="before").cached_tokens == 0
        stack.pin("hybrid", PREFIX, engine, "--public")
        salts = itertools.count()
        wait_until(lambda: ask(engine, PREFIX, cache_salt=f"salt {next(salts)}").restored_tokens > 0, HANG_S, "sharing")
        forget_gpu(engine)
        salted = ask(engine, PREFIX + SHORT, cache_salt="tenant")
        compare.restored_equals_prefix_cache_hit(salted, references["short"], "host")
        compare.same_bytes(stored, stack.stored_checksums())
