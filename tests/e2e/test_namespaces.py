"""Whatever makes KV bytes different makes another namespace: a miss, never a wrong hit. And TP=2, one of those.

The tests run in order, over one daemon, one pinned prompt and one model path whose content changes.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY, ModelSpec
from benchmarks.harness.models import make_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import EVICTING, Answer, Stack, ask, flood, forget_gpu, prefix_cache_hit, running_stack, tokens
from tests.e2e.traffic import Client

PREFIX_TOKENS = 640
PREFIX, QUESTION = tokens(1, PREFIX_TOKENS), tokens(2, 40)
OTHER_SEED = replace(TINY, seed=1)
OTHER_ROPE = replace(TINY, rope_theta=500_000.0)


@dataclass
class World:
    """What the tests share."""

    stack: Stack
    model: Path
    reference: Answer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A pinned prompt, stored by an engine that is gone."""
    model = tmp_path_factory.mktemp("model")
    make_model(model, TINY)
    with running_stack(EngineOptions(model=str(model), connector_config=EVICTING)) as stack:
        with stack.engine() as engine:
            reference = prefix_cache_hit(engine, PREFIX, QUESTION)
            stack.pin("prompt", PREFIX, engine)
            forget_gpu(engine)
            assert ask(engine, PREFIX + QUESTION).restored_tokens == PREFIX_TOKENS
        yield World(stack, model, reference)


@pytest.mark.parametrize(
    ("spec", "field"), [(OTHER_SEED, "weights"), (OTHER_ROPE, "hf_config")], ids=["weights", "rope"]
)
def test_changed_model_under_the_same_path(world: World, spec: ModelSpec, field: str) -> None:
    """Other weights, or the same weights with another rope_theta: a miss, and the log says why."""
    make_model(world.model, spec)
    with world.stack.engine() as engine:
        _check_miss(world, engine, field)


def test_dtype_and_block_size(world: World, note: Note) -> None:
    """Two engines at once, on the model that was pinned: each misses, stores its own, and restores that alone."""
    make_model(world.model, TINY)
    with ExitStack() as stack:
        engines = {
            "dtype": stack.enter_context(world.stack.unstarted_engine(dtype="float32")),
            "tokens": stack.enter_context(world.stack.unstarted_engine(block_size=64, pool_blocks=32)),
        }
        for engine in engines.values():
            engine.launch()
        for field, engine in engines.items():
            engine.wait_started()
            _check_miss(world, engine, field)
        world.stack.wait_durable("prompt")
        forgetful = {name: Client(engine, PREFIX, QUESTION) for name, engine in engines.items()}
        with forgetful["dtype"].asking() as first, forgetful["tokens"].asking() as second:
            time.sleep(1.0)
        for client, answers in zip(forgetful.values(), (first, second), strict=True):
            note(client.summary(answers))
            assert {answer.cached_tokens for answer in answers} == {PREFIX_TOKENS}


def test_tensor_parallel(world: World, compare: Comparisons, note: Note) -> None:
    """TP=2 misses what TP=1 stored, stores its own, and restores that right."""
    with world.stack.engine(tensor_parallel=2) as engine:
        _check_miss(world, engine, "parallel")
        world.stack.cli("unpin", "prompt")
        world.stack.cli("evict", "prompt")
        reference = prefix_cache_hit(engine, PREFIX, QUESTION)
        world.stack.pin("prompt", PREFIX, engine)
        stored = world.stack.stored_checksums()
        flood(engine, 10_000)
        compare.restored_equals_prefix_cache_hit(ask(engine, PREFIX + QUESTION), reference, "host")
        world.stack.store_again("prompt", PREFIX, engine)
        compare.same_bytes(stored, world.stack.stored_checksums())
        world.stack.daemon.kill()
        world.stack.daemon.lose_memory()
        world.stack.daemon.start()
        world.stack.wait_attached(engine)
        forget_gpu(engine)
        bytes_before = engine.metric("vllm:kv_offload_load_bytes_total")
        compare.restored_equals_prefix_cache_hit(ask(engine, PREFIX + QUESTION), reference, "disk")
        # Two workers loaded half of each chunk: bytes are added up over them, chunks are counted once.
        binding = world.stack.json("show", "prompt")["bindings"][-1]
        assert engine.metric("vllm:kv_offload_load_bytes_total") - bytes_before == binding["raw_bytes"]
        assert engine.metric("kvtier_connector_loaded_chunks_total", tier="disk") == binding["num_chunks"]
        note(_kill_a_worker(world, engine))


def _kill_a_worker(world: World, engine: Engine) -> str:
    """Kill -9 one of two workers: vLLM ends, as it does without kvtier; what it stored stays, nothing else."""
    start_s = time.monotonic()
    os.kill(_workers(engine)[-1], signal.SIGKILL)

    def no_session() -> bool:
        with world.stack.admin() as client:
            return not client.status().sessions

    wait_until(no_session, 60, "the session to end")
    seconds = time.monotonic() - start_s
    assert list(world.stack.daemon.arena_dir.glob("session-*")) == []
    assert world.stack.json("show", "prompt")["state"] == "DURABLE"
    return f"a TP=2 worker killed: its engine's session, leases and slots are gone {seconds:.2f} s later"


def _workers(engine: Engine) -> list[int]:
    """Return the pids of vLLM's workers, which begin their lines in the log with them."""
    return sorted({int(pid) for pid in re.findall(r"^\(Worker\S* pid=(\d+)\)", engine.log_text(), re.MULTILINE)})


def _check_miss(world: World, engine: Engine, field: str) -> None:
    """Check that the prompt is computed, and that the log names the field that differs."""
    world.stack.wait_attached(engine)
    answer = ask(engine, PREFIX + QUESTION)
    assert answer.cached_tokens == 0, answer
    reasons = [line for line in engine.log_text().splitlines() if "different are" in line]
    assert any(field in line for line in reasons), reasons or engine.log_tail()
