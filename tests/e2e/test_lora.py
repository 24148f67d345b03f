"""LoRA adapters are distinguished by content: vLLM's own hashes know only their name and path."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model, make_lora_adapter
from tests.e2e.equality import Comparisons
from tests.e2e.harness import PATIENT, Stack, ask, forget_gpu, prefix_cache_hit, running_stack, tokens

PREFIX_TOKENS = 320
PREFIX, QUESTION = tokens(1, PREFIX_TOKENS), tokens(2, 40)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the adapter lies."""
    return tmp_path_factory.mktemp("adapter")


@pytest.fixture(scope="module")
def stack(adapter: Path) -> Iterator[Stack]:
    """A daemon; engines serve the base model and the adapter."""
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={adapter}")
    with running_stack(
        EngineOptions(model=str(cached_model("tiny", TINY)), connector_config=PATIENT, extra_args=lora)
    ) as stack:
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
        for salt in ("tenant", ""):  # the one without a salt stores the prompt for this adapter
            other = ask(engine, PREFIX + QUESTION, model="adapter", cache_salt=salt)
            assert other.cached_tokens == 0
            assert other.logprobs != reference.logprobs
        stack.wait_durable("prompt")
        assert ask(engine, PREFIX + QUESTION, model="adapter", cache_salt="later").restored_tokens == PREFIX_TOKENS
