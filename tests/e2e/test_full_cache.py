"""`store = "all"` on a small Llama: kvtier as a full prefix cache, with nothing pinned.

The tests of this file run in order, on one daemon and one engine. Host memory is small, so that a flood has to evict.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
    Tokens,
    ask,
    ask_until_restored,
    flood,
    forget_gpu,
    prefix_cache_hit,
    running_stack,
    tokens,
)

TURNS = [tokens(100, 320), tokens(101, 96), tokens(102, 160), tokens(103, 64)]
SHORT = tokens(110, 20)  # with its answer less than a chunk, so that nothing of it is stored
ONE_MORE = 20  # a token behind a prefix: vLLM always computes the last one of a prompt, and with it its block


@dataclass
class World:
    """What the tests share."""

    stack: Stack
    engine: Engine
    num_references: int = 0


def history(turn: int) -> Tokens:
    """Return everything said before a turn; a whole number of blocks."""
    return [token for part in TURNS[:turn] for token in part]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A daemon that stores everything in little memory, and an engine."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)), max_batched_tokens=256, connector_config=PATIENT)
    settings = {"KVTIER_CACHE_STORE": "all"}
    with running_stack(options, host_bytes="8MiB", daemon_settings=settings) as stack, stack.engine() as engine:
        stack.wait_attached(engine)
        yield World(stack, engine)


def forget_when_written(world: World, prefix: Tokens) -> None:
    """Empty vLLM's prefix cache once a prefix is on disk: it is stored and written after the answer.

    On a busy machine not all of it: what finds no slot in a request's last step is not stored, but the next request
    with that prefix offers it again.
    """
    num_chunks = len(prefix) // world.engine.options.block_size

    def all_written() -> bool:
        status = world.stack.status()
        is_written = status.host.num_chunks <= status.disk.num_chunks and not status.counters["write_back_queue_bytes"]
        return is_written and status.disk.num_chunks >= num_chunks

    for _ in range(10):
        try:
            wait_until(all_written, 5, f"{num_chunks} chunks to be written")
            break
        except TimeoutError:
            ask(world.engine, prefix, max_tokens=1)
    # Whatever else is there, all of this prefix is.
    ask_until_restored(world.engine, [*prefix, ONE_MORE], len(prefix), max_tokens=1)
    wait_until(all_written, HANG_S, f"{num_chunks} chunks to be written")
    forget_gpu(world.engine)


def reference_of(world: World, prefix: Tokens, question: Tokens) -> Answer:
    """Return the answer with `prefix` from vLLM's prefix cache.

    Under a salt of its own: what is stored of it, and reported a little later, is not found by requests without.
    """
    world.num_references += 1
    reference = prefix_cache_hit(world.engine, prefix, question, cache_salt=f"reference {world.num_references}")
    forget_gpu(world.engine)
    world.stack.cli("evict", "--all")
    return reference


def test_each_turn_of_a_chat_restores_its_history(world: World, compare: Comparisons, note: Note) -> None:
    """Nothing is pinned: turn n's history was stored by turn n-1, and gives the logprobs of vLLM's prefix-cache hit."""
    stack, engine = world.stack, world.engine
    assert stack.json("status")["store"] == "all"
    references = {turn: reference_of(world, history(turn), TURNS[turn]) for turn in range(1, len(TURNS))}
    assert ask(engine, history(1), max_tokens=1).cached_tokens == 0
    for turn, reference in references.items():
        forget_when_written(world, history(turn))
        compare.restored_equals_prefix_cache_hit(ask(engine, history(turn) + TURNS[turn]), reference, "host")
    note(f"{len(history(len(TURNS) - 1))} tokens of history restored without a pin")


def test_a_flood_stays_within_host_memory(world: World, note: Note) -> None:
    """Prompts that are not repeated evict each other; every one of them is answered."""
    stack, engine = world.stack, world.engine
    with stack.admin() as client:
        limit_bytes = client.status().host.limit_bytes
        row_bytes = client.status().namespaces[0].row_bytes
    before = stack.counters()["evicted_chunks_host"]  # by commands
    num_tokens = num_evicted = 0
    # Not all of it is stored on a busy machine: it goes on until something had to leave.
    while num_tokens // engine.options.block_size * row_bytes < 2 * limit_bytes or not num_evicted:
        num_tokens += flood(engine, 60_000 + num_tokens)
        assert stack.status().host.used_bytes <= limit_bytes
        num_evicted = stack.counters()["evicted_chunks_host"] - before
        assert num_tokens // engine.options.block_size * row_bytes < 20 * limit_bytes, stack.counters()
    note(f"{num_tokens} tokens, {stack.counters()['stored_chunks']} chunks stored, {num_evicted} evicted")


def test_after_a_kill_the_engine_learns_what_is_held(world: World, compare: Comparisons) -> None:
    """The daemon is killed, the engine stays: from disk, and nothing is stored a second time."""
    stack, engine = world.stack, world.engine
    reference = reference_of(world, history(3), SHORT)
    ask(engine, history(3), max_tokens=1)
    forget_when_written(world, history(3))
    stack.daemon.kill()
    stack.daemon.lose_memory()
    stack.daemon.start()
    stack.wait_attached(engine)
    # The first request may come before the daemon has named what it holds: it is computed, and nothing of it is stored.
    answer = ask_until_restored(engine, history(3) + SHORT, len(history(3)))
    compare.restored_equals_prefix_cache_hit(answer, reference, "disk")
    forget_gpu(engine)  # returns when vLLM stores nothing any longer
    assert stack.counters()["stored_chunks"] == 0


def test_a_pin_among_unpinned_prompts_stays(world: World, compare: Comparisons) -> None:
    """Evicting everything leaves it; out of host memory it comes back from disk."""
    stack, engine = world.stack, world.engine
    reference = reference_of(world, history(2), SHORT)
    stack.pin("chat", history(2), engine)
    stack.cli("evict", "--all")
    assert stack.json("status")["disk"]["num_chunks"] == len(history(2)) // engine.options.block_size
    forget_gpu(engine)
    compare.restored_equals_prefix_cache_hit(ask(engine, history(2) + SHORT), reference, "host")
    forget_gpu(engine)
    stack.cli("evict", "--all")
    stack.cli("evict", "chat", "--tier", "host")
    compare.restored_equals_prefix_cache_hit(ask(engine, history(2) + SHORT), reference, "disk")
