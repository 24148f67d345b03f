"""LoRA adapters are distinguished by content: vLLM's own hashes know only their name and path."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model, make_lora_adapter
from kvtier_connector.engine.lora.adapter_files import stat_adapter
from tests.e2e.equality import Comparisons
from tests.e2e.harness import (
    PATIENT,
    Answer,
    Stack,
    ask,
    ask_until_restored,
    forget_gpu,
    prefix_cache_hit,
    running_stack,
    tokens,
)

PREFIX_TOKENS = 320
PREFIX, QUESTION = tokens(1, PREFIX_TOKENS), tokens(2, 40)
SHORT_QUESTION = tokens(3, 20)  # with its answer less than a chunk, so that storing everything stores the prefix


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the adapter lies."""
    return tmp_path_factory.mktemp("adapter")


def options(adapter: Path) -> EngineOptions:
    """Return how to serve the base model and the adapter."""
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={adapter}")
    model, runtime = str(cached_model("tiny", TINY)), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    return EngineOptions(model=model, connector_config=PATIENT, extra_args=lora, extra_env=runtime)


@pytest.fixture
def stack(adapter: Path) -> Iterator[Stack]:
    """A daemon that stores pinned prompts."""
    with running_stack(options(adapter)) as stack:
        yield stack


@pytest.fixture
def storing_stack(adapter: Path) -> Iterator[Stack]:
    """A daemon that stores every prompt."""
    with running_stack(options(adapter), daemon_settings={"KVTIER_CACHE_STORE": "all"}) as stack:
        yield stack


def test_adapter_content(stack: Stack, adapter: Path, compare: Comparisons) -> None:
    """Restored for the adapter; a miss for the base model and for another adapter under the same name and path.

    The prompt is public: so it is with a salt too.
    """
    make_lora_adapter(adapter, TINY, seed=1)
    with stack.engine() as engine:
        base = prefix_cache_hit(engine, PREFIX, QUESTION)
        reference = prefix_cache_hit(engine, PREFIX, QUESTION, model="adapter")
        assert reference.logprobs != base.logprobs
        stack.pin("prompt", PREFIX, engine, "--model", "adapter", "--public")
        for salt in ("", "tenant"):
            forget_gpu(engine)
            restored = ask(engine, PREFIX + QUESTION, model="adapter", cache_salt=salt)
            compare.restored_equals_prefix_cache_hit(restored, reference)
            forget_gpu(engine)
            assert ask(engine, PREFIX + QUESTION, cache_salt=salt).cached_tokens == 0
    make_lora_adapter(adapter, TINY, seed=2)
    with stack.engine() as engine:
        stack.wait_attached(engine)
        for salt in ("tenant", ""):
            other = ask(engine, PREFIX + QUESTION, model="adapter", cache_salt=salt)
            assert other.cached_tokens == 0
            assert other.logprobs != reference.logprobs
        stack.ask_until_durable("prompt", lambda: ask(engine, PREFIX + QUESTION, model="adapter"))
        assert ask(engine, PREFIX + QUESTION, model="adapter", cache_salt="later").restored_tokens == PREFIX_TOKENS


def ask_adapter(engine: Engine) -> Answer:
    """Ask what every engine below is asked."""
    return ask(engine, PREFIX + SHORT_QUESTION, model="adapter")


def wait_stored(engine: Engine) -> Answer:
    """Return the answer to the request once kvtier restores its prefix."""
    return ask_until_restored(engine, PREFIX + SHORT_QUESTION, PREFIX_TOKENS, model="adapter")


def replace_weights(adapter: Path, seed: int) -> None:
    """Write other weights into the adapter's files; names, sizes and modification times stay as they are."""
    before = {path: path.stat() for path in adapter.iterdir()}
    make_lora_adapter(adapter, TINY, seed=seed)
    for path, stat in before.items():
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        after = path.stat()
        assert (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def test_the_first_request_after_a_restart(storing_stack: Stack, adapter: Path, compare: Comparisons) -> None:
    """Without a pin, it hits if the adapter's files have not changed; if they have, it never does."""
    make_lora_adapter(adapter, TINY, seed=3)
    if not stat_adapter(adapter).is_reliable:
        pytest.skip("an overlay or a network: adapters there are read before the first hit")
    with storing_stack.engine() as engine:
        storing_stack.wait_attached(engine)
        reference = prefix_cache_hit(engine, PREFIX, SHORT_QUESTION, model="adapter")
        compare.restored_equals_prefix_cache_hit(wait_stored(engine), reference)
    with storing_stack.engine() as engine:
        storing_stack.wait_attached(engine)
        compare.restored_equals_prefix_cache_hit(ask_adapter(engine), reference)
    with storing_stack.engine() as engine:
        storing_stack.wait_attached(engine)
        replace_weights(adapter, seed=4)  # vLLM has loaded the others, and kvtier has not read them in this run
        for _ in range(3):
            assert ask_adapter(engine).cached_tokens == 0
            forget_gpu(engine)
    with storing_stack.engine() as engine:
        storing_stack.wait_attached(engine)
        changed = ask_adapter(engine)
        assert changed.cached_tokens == 0
        assert changed.logprobs != reference.logprobs
        assert wait_stored(engine).logprobs != reference.logprobs
        # Loaded in place, an adapter keeps its id: nothing tells its KV from that of the weights before.
        replace_weights(adapter, seed=5)
        load = {"lora_name": "adapter", "lora_path": str(adapter), "load_inplace": True}
        engine.http.post("/v1/load_lora_adapter", json=load).raise_for_status()
        for _ in range(3):
            forget_gpu(engine)
            assert ask_adapter(engine).cached_tokens == 0
