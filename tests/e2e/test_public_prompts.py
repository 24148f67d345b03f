"""One public prompt for all tenants, on a small Llama: right answers under every salt, and nothing else is shared.

The tests of this file run in order, on one daemon and one engine; once with pinned prompts only, once with every prompt
stored.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import (
    EVICTING,
    Answer,
    Stack,
    ask,
    forget_gpu,
    prefix_cache_hit,
    running_stack,
    tokens,
)

PREFIX_TOKENS = 640
PUBLIC, PRIVATE = tokens(1, PREFIX_TOKENS), tokens(2, PREFIX_TOKENS)
QUESTION = tokens(3, 40)
TENANTS = ("one", "two", "three")


@dataclass
class World:
    """What the tests share.

    Attributes:
        stores_all: Unpinned prompts are stored too.
        reference: The answer with the prefix computed by vLLM, under a salt that is used for nothing else.
    """

    stack: Stack
    engine: Engine
    stores_all: bool
    reference: Answer

    @property
    def block_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.engine.options.block_size

    def computed_tokens(self) -> float:
        """Return how many prompt tokens vLLM has computed."""
        return self.engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute")

    def public_chunks(self) -> float:
        """Return how many chunks of public prompts requests with a salt have loaded."""
        return self.engine.metric("kvtier_connector_public_chunks_total")

    def all_written(self) -> bool:
        """Return whether all that was stored is on disk."""
        status = self.stack.status()
        return status.host.num_chunks <= status.disk.num_chunks and not status.counters["write_back_queue_bytes"]

    def num_chunks(self) -> int:
        """Return how many chunks are on disk, once all are."""
        wait_until(self.all_written, 60, "all chunks to be written")
        return self.stack.status().disk.num_chunks


@pytest.fixture(scope="module", params=["pinned", "all"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An engine that has answered once, with nothing pinned."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)), max_batched_tokens=256, connector_config=EVICTING)
    settings = {"KVTIER_CACHE_STORE": request.param}
    with running_stack(options, daemon_settings=settings) as stack, stack.engine() as engine:
        stack.wait_attached(engine)
        reference = prefix_cache_hit(engine, PUBLIC, QUESTION, cache_salt="reference")
        if request.param == "all":  # engines report stores up to a quarter of a second late
            num_stored = len(PUBLIC + QUESTION) // options.block_size

            def is_stored() -> bool:
                # Asked again: an engine that has just attached may not know yet what is held, and then stores nothing.
                ask(engine, PUBLIC + QUESTION, cache_salt="reference", max_tokens=1)
                return stack.status().host.num_chunks >= num_stored

            wait_until(is_stored, 60, "the reference to be stored")
        yield World(stack, engine, request.param == "all", reference)


def test_a_tenant_does_not_store_what_is_public(world: World) -> None:
    """It comes first, and computes the prompt: that is its own, whatever is pinned."""
    stack, engine = world.stack, world.engine
    num_before = world.num_chunks()
    stack.pin("public", PUBLIC, engine, "--public", "--no-warm")
    stack.wait_attached(engine)
    forget_gpu(engine)
    assert ask(engine, PUBLIC, cache_salt="first", max_tokens=1).cached_tokens == 0
    assert world.num_chunks() == num_before
    assert stack.json("show", "public")["bindings"][0]["num_durable_chunks"] == 0


def test_every_tenant_gets_the_public_prompt(world: World, compare: Comparisons, note: Note) -> None:
    """It was computed once, by the request without a salt that `kvtier pin` sends."""
    stack, engine = world.stack, world.engine
    stack.pin("public", PUBLIC, engine, "--public")
    assert stack.json("show", "public")["public"] is True
    num_before, computed, loaded = world.num_chunks(), world.computed_tokens(), world.public_chunks()
    for salt in TENANTS:
        forget_gpu(engine)
        compare.restored_equals_prefix_cache_hit(ask(engine, PUBLIC + QUESTION, cache_salt=salt), world.reference)
    num_computed = world.computed_tokens() - computed
    assert num_computed == len(TENANTS) * len(QUESTION)
    assert world.public_chunks() - loaded == len(TENANTS) * PREFIX_TOKENS / world.block_tokens
    # Behind it each tenant stores what is its own, if unpinned prompts are stored.
    num_own = len(TENANTS) * (len(QUESTION) // world.block_tokens) if world.stores_all else 0
    wait_until(lambda: world.num_chunks() >= num_before + num_own, 60, "the stores of the last one to be reported")
    assert world.num_chunks() == num_before + num_own
    note(f"{len(TENANTS)} salts, {len(TENANTS) * PREFIX_TOKENS} tokens restored, {num_computed:.0f} computed")


def test_tenants_at_once(world: World, compare: Comparisons) -> None:
    """They load the same rows at the same time, each into blocks of its own."""
    forget_gpu(world.engine)
    computed = world.computed_tokens()
    with ThreadPoolExecutor(len(TENANTS)) as pool:
        answers = list(
            pool.map(lambda salt: ask(world.engine, PUBLIC + QUESTION, cache_salt=salt + "!", alone=False), TENANTS)
        )
    assert [answer.cached_tokens for answer in answers] == [PREFIX_TOKENS] * len(TENANTS)
    assert world.computed_tokens() - computed == len(TENANTS) * len(QUESTION)
    for answer in answers:
        compare.same_tokens(answer, world.reference, num_tokens=1)
    forget_gpu(world.engine)
    compare.same_logprobs(ask(world.engine, PUBLIC + QUESTION, cache_salt="one!"), world.reference)


def test_what_a_tenant_pins_is_its_own(world: World, compare: Comparisons) -> None:
    """The same prompt under another salt, or under none, is computed."""
    stack, engine = world.stack, world.engine
    reference = prefix_cache_hit(engine, PRIVATE, QUESTION, cache_salt="another reference")
    stack.pin("private", PRIVATE, engine, "--cache-salt", "one")
    for salt in ("two", ""):
        forget_gpu(engine)
        assert ask(engine, PRIVATE + QUESTION, cache_salt=salt).cached_tokens == 0
    forget_gpu(engine)
    compare.restored_equals_prefix_cache_hit(ask(engine, PRIVATE + QUESTION, cache_salt="one"), reference)


def test_a_prompt_that_is_no_longer_public_is_not_shared(world: World) -> None:
    """Nor is one that is unpinned."""
    stack, engine, salts = world.stack, world.engine, itertools.count()

    def cached_tokens() -> int:
        return ask(engine, PUBLIC + QUESTION, cache_salt=f"salt {next(salts)}").cached_tokens

    ends = (lambda: stack.pin("public", PUBLIC, engine, "--no-public"), lambda: stack.cli("unpin", "public"))
    for end in ends:
        stack.pin("public", PUBLIC, engine, "--public")
        wait_until(lambda: cached_tokens() == PREFIX_TOKENS, 60, "the engine to share it")
        end()
        wait_until(lambda: cached_tokens() == 0, 60, "the engine to share it no longer")
        forget_gpu(engine)
        assert ask(engine, PUBLIC + QUESTION).cached_tokens >= PREFIX_TOKENS, "what has no salt is still held"
