"""Kinds of models and of vLLM setups: each pins, restores from host memory and from disk, and compares.

What takes its time and breaks seldom is marked `models`: `make test-models` runs it, `make test-e2e` does not.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY, TINY_CONV, TINY_EXPERTS, TINY_LATENT, TINY_WINDOW, ModelSpec
from benchmarks.harness.models import cached_model
from tests.e2e.equality import Comparisons
from tests.e2e.harness import PATIENT, Stack, ask, forget_gpu, prefix_cache_hit, running_stack, tokens

PREFIX_TOKENS = 640
PREFIX, OTHER_PREFIX, QUESTION = tokens(1, PREFIX_TOKENS), tokens(3, PREFIX_TOKENS), tokens(2, 40)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to run.

    Attributes:
        model: Name of its folder under `.models/`.
        options: Further `EngineOptions`.
        omitted_tokens: See `Comparisons.restored_equals_prefix_cache_hit`.
        used_metric: Of vLLM's; not 0 when the setup was at work.
    """

    model: str
    spec: ModelSpec
    options: Mapping[str, Any] = field(default_factory=dict)
    omitted_tokens: int = 0
    used_metric: str = ""


# Single tokens match: random prompts repeat those.
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
CASES = {
    "sliding window in every layer": Case(
        model="window", spec=TINY_WINDOW, omitted_tokens=PREFIX_TOKENS - TINY_WINDOW.sliding_window
    ),
    "short convolutions": Case(model="conv", spec=TINY_CONV),
    "fp8 KV cache": Case(model="tiny", spec=TINY, options={"extra_args": ("--kv-cache-dtype", "fp8")}),
}
RARE_CASES = {
    "experts": Case(model="experts", spec=TINY_EXPERTS),
    "float16": Case(model="tiny", spec=TINY, options={"dtype": "float16"}),
    "float32": Case(model="tiny", spec=TINY, options={"dtype": "float32"}),
    "speculation by n-grams": Case(
        model="tiny",
        spec=TINY,
        options={"extra_args": ("--speculative-config", json.dumps(NGRAMS))},
        used_metric="vllm:spec_decode_num_draft_tokens_total",
    ),
}
NO_AMX = not torch.cpu._is_amx_tile_supported()
LATENT = Case(model="latent", spec=TINY_LATENT)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_restored(case: Case, compare: Comparisons) -> None:
    """In every run of the end-to-end tests."""
    _check_restored(case, compare)


@pytest.mark.models
@pytest.mark.parametrize("case", RARE_CASES.values(), ids=RARE_CASES)
def test_restored_rare(case: Case, compare: Comparisons) -> None:
    """By `make test-models` only."""
    _check_restored(case, compare)


@pytest.mark.models
@pytest.mark.skipif(NO_AMX, reason="vLLM has prefix caching for MLA on CPUs with AMX only")
def test_latent_attention(compare: Comparisons) -> None:
    """MLA, as DeepSeek's models have it."""
    _check_restored(LATENT, compare)


@pytest.mark.models
@pytest.mark.skipif(not NO_AMX, reason="vLLM has prefix caching for MLA on CPUs with AMX")
def test_latent_attention_is_refused() -> None:
    """Without prefix caching nothing can be restored; the start says so."""
    options = EngineOptions(model=str(cached_model(LATENT.model, LATENT.spec)), pool_blocks=128)
    with running_stack(options, start_daemon=False) as stack, stack.unstarted_engine() as engine:
        engine.launch()
        assert engine.wait_ended(300) != 0
        assert "MLA on a CPU without AMX" in engine.log_text(), engine.log_tail()


def _check_restored(case: Case, compare: Comparisons) -> None:
    options = EngineOptions(
        model=str(cached_model(case.model, case.spec)), pool_blocks=128, connector_config=PATIENT, **case.options
    )
    with running_stack(options) as stack, stack.engine() as engine:
        reference = prefix_cache_hit(engine, PREFIX, QUESTION)
        assert prefix_cache_hit(engine, OTHER_PREFIX, QUESTION).logprobs != reference.logprobs, (
            "the oracle sees no KV cache"
        )
        forget_gpu(engine)
        stack.pin("prompt", PREFIX, engine)
        stored = stack.stored_checksums()
        forget_gpu(engine)
        omitted_tokens = case.omitted_tokens
        compare.restored_equals_prefix_cache_hit(
            ask(engine, PREFIX + QUESTION), reference, "host", omitted_tokens=omitted_tokens
        )
        _restart_daemon_without_memory(stack)
        stack.wait_attached(engine)
        forget_gpu(engine)
        compare.restored_equals_prefix_cache_hit(
            ask(engine, PREFIX + QUESTION), reference, "disk", omitted_tokens=omitted_tokens
        )
        # Into an empty pool, and no further: what it loads is stored again. (But recurrent state, which is computed.)
        forget_gpu(engine)
        answer = ask(engine, [*PREFIX, *tokens(4, 10)], max_tokens=1)
        assert answer.restored_tokens + omitted_tokens == PREFIX_TOKENS
        stack.cli("evict", "prompt", "--force")
        stack.pin("prompt", PREFIX, engine)
        compare.same_bytes(stored, stack.stored_checksums())
        assert not case.used_metric or engine.metric(case.used_metric)


def _restart_daemon_without_memory(stack: Stack) -> None:
    stack.daemon.kill()
    stack.daemon.lose_memory()
    stack.daemon.start()
