"""Kinds of models and of vLLM setups: each pins, restores from host memory and from disk, and compares.

What takes its time and breaks seldom is marked `models`: `make test-models` runs it, `make test-e2e` does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.models import (
    TINY,
    TINY_CONV,
    TINY_EXPERTS,
    TINY_MAMBA,
    TINY_WINDOW,
    ModelSpec,
    cached_model,
)
from benchmarks.processes import EngineOptions
from tests.e2e.equality import Comparisons
from tests.e2e.harness import PATIENT, Stack, ask, forget_gpu, own_hit, running_stack, tokens

PREFIX_TOKENS = 640
PREFIX, OTHER_PREFIX, QUESTION = tokens(1, PREFIX_TOKENS), tokens(3, PREFIX_TOKENS), tokens(2, 40)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What to run.

    Attributes:
        model: Name of its folder under `.models/`.
        options: Further `EngineOptions`.
    """

    model: str
    spec: ModelSpec
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "sliding window in every layer": Case(model="window", spec=TINY_WINDOW),
    "short convolutions": Case(model="conv", spec=TINY_CONV),
    "fp8 KV cache": Case(model="tiny", spec=TINY, options={"extra_args": ("--kv-cache-dtype", "fp8")}),
}
RARE_CASES = {
    "experts": Case(model="experts", spec=TINY_EXPERTS),
    "float16": Case(model="tiny", spec=TINY, options={"dtype": "float16"}),
    "float32": Case(model="tiny", spec=TINY, options={"dtype": "float32"}),
    "Mamba 2": Case(model="mamba", spec=TINY_MAMBA),
    "pipeline of two stages": Case(
        model="tiny",
        spec=TINY,
        options={"extra_args": ("--pipeline-parallel-size", "2"), "extra_env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_restored(case: Case, compare: Comparisons) -> None:
    """In every run of the end-to-end tests."""
    _check_restored(case, compare)


@pytest.mark.models
@pytest.mark.parametrize("case", RARE_CASES.values(), ids=RARE_CASES)
def test_restored_rare(case: Case, compare: Comparisons) -> None:
    """By `make test-models` only."""
    _check_restored(case, compare)


def _check_restored(case: Case, compare: Comparisons) -> None:
    options = EngineOptions(
        model=str(cached_model(case.model, case.spec)), pool_blocks=128, connector_config=PATIENT, **case.options
    )
    with running_stack(options) as stack, stack.engine() as engine:
        reference = own_hit(engine, PREFIX, QUESTION)
        assert own_hit(engine, OTHER_PREFIX, QUESTION).logprobs != reference.logprobs, "the oracle sees no KV cache"
        forget_gpu(engine)
        stack.pin("prompt", PREFIX, engine)
        stored = stack.stored_checksums()
        forget_gpu(engine)
        compare.restored_equals_own_hit(ask(engine, PREFIX + QUESTION), reference, "host")
        _restart_daemon_without_memory(stack)
        stack.wait_attached(engine)
        forget_gpu(engine)
        compare.restored_equals_own_hit(ask(engine, PREFIX + QUESTION), reference, "disk")
        # Into an empty pool, and no further: what it loads is what is stored again.
        forget_gpu(engine)
        assert ask(engine, [*PREFIX, *tokens(4, 10)], max_tokens=1).restored_tokens == PREFIX_TOKENS
        stack.cli("evict", "prompt", "--force")
        stack.pin("prompt", PREFIX, engine)
        compare.same_bytes(stored, stack.stored_checksums())


def _restart_daemon_without_memory(stack: Stack) -> None:
    stack.daemon.kill()
    stack.daemon.lose_memory()
    stack.daemon.start()
