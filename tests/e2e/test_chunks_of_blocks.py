"""Chunks of four vLLM blocks: restored from chunk borders, from inside a chunk, and after a restart of vLLM.

The tests of this file run in order, on one daemon and one engine after the other.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from tests.e2e.equality import Comparisons
from tests.e2e.harness import EVICTING, Answer, Stack, ask, flood, forget_gpu, prefix_cache_hit, running_stack, tokens

BLOCK_TOKENS, BLOCKS_PER_CHUNK = 32, 4
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
NUM_CHUNKS = 5
PREFIX = tokens(1, NUM_CHUNKS * CHUNK_TOKENS)
QUESTION, OTHER_QUESTION = tokens(4, 40), tokens(5, 60)


@dataclass
class World:
    """What the tests share.

    Attributes:
        references: Answers with the prefix computed by vLLM, before anything of it was stored.
    """

    stack: Stack
    engines: ExitStack
    engine: Engine
    references: list[Answer] = field(default_factory=list)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Prefills of 192 tokens a step: steps end inside chunks."""
    options = EngineOptions(
        model=str(cached_model("tiny", TINY)),
        block_size=BLOCK_TOKENS,
        max_batched_tokens=192,
        connector_config=EVICTING | {"blocks_per_chunk": BLOCKS_PER_CHUNK},
    )
    with running_stack(options) as stack, ExitStack() as engines:
        yield World(stack, engines, engines.enter_context(stack.engine()))


def test_stored_and_restored(world: World, compare: Comparisons) -> None:
    """Five chunks are stored, not twenty blocks, and give the logprobs of vLLM's prefix-cache hit."""
    stack, engine = world.stack, world.engine
    world.references = [prefix_cache_hit(engine, PREFIX, question) for question in (QUESTION, OTHER_QUESTION)]
    stack.wait_attached(engine)
    done = stack.pin("prefix", PREFIX, engine)
    assert f"{NUM_CHUNKS}/{NUM_CHUNKS}" in done.stdout
    flood(engine, 20_000)
    for question, reference in zip((QUESTION, OTHER_QUESTION), world.references, strict=True):
        compare.restored_equals_prefix_cache_hit(ask(engine, PREFIX + question), reference, "host")
        forget_gpu(engine)


@pytest.mark.parametrize("num_own_blocks", [1, 6])
def test_a_hit_that_ends_inside_a_chunk(world: World, compare: Comparisons, num_own_blocks: int) -> None:
    """vLLM holds the first blocks of a chunk itself; the rest of that chunk is restored, from its middle on."""
    engine = world.engine
    own_tokens = num_own_blocks * BLOCK_TOKENS
    forget_gpu(engine)
    # Of another prompt with the same beginning, too short for a chunk of its own to follow.
    ask(engine, [*PREFIX[:own_tokens], *tokens(7, BLOCK_TOKENS)], max_tokens=1)
    answer = ask(engine, PREFIX + QUESTION)
    assert answer.by_source["device"] == own_tokens
    assert answer.by_source["host"] == len(PREFIX) - own_tokens
    compare.same_logprobs(answer, world.references[0])


def test_stored_from_restored_blocks_gives_the_same_bytes(world: World, compare: Comparisons) -> None:
    """Host -> vLLM, in two pieces -> host -> disk."""
    stack, engine = world.stack, world.engine
    stack.wait_durable("prefix")
    before = stack.stored_checksums()
    assert len(before) == NUM_CHUNKS
    stack.store_again("prefix", PREFIX, engine)
    stack.wait_durable("prefix")
    compare.same_bytes(before, stack.stored_checksums())


def test_after_restarts_of_daemon_and_engine(world: World, compare: Comparisons) -> None:
    """From disk, then from host memory."""
    world.engines.close()
    world.stack.daemon.stop()
    world.stack.daemon.start()
    world.engine = world.engines.enter_context(world.stack.engine())
    world.stack.wait_attached(world.engine)
    for tier, question, reference in zip(("disk", "host"), (QUESTION, OTHER_QUESTION), world.references, strict=True):
        compare.restored_equals_prefix_cache_hit(ask(world.engine, PREFIX + question), reference, tier)
        forget_gpu(world.engine)
