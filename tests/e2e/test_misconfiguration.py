"""What cannot work ends `vllm serve` at its start, with a message that names the remedy."""

from contextlib import ExitStack
from typing import Any

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from tests.e2e.harness import running_stack

CASES: dict[str, dict[str, Any]] = {
    "--prefix-caching-hash-algo sha256": {"extra_args": ("--prefix-caching-hash-algo", "xxhash")},
    "--enable-prefix-caching": {"extra_args": ("--no-enable-prefix-caching",)},
    "unknown key; allowed are admission, blocks_per_chunk": {"connector_config": {"block_per_chunk": 2}},
}


def test_refused_at_start() -> None:
    """A hash that differs at every start, no prefix caching, an unknown key."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)))
    with running_stack(options, start_daemon=False) as stack, ExitStack() as engines:
        started = {
            remedy: engines.enter_context(stack.unstarted_engine(**changes)) for remedy, changes in CASES.items()
        }
        for engine in started.values():
            engine.launch()
        for remedy, engine in started.items():
            assert engine.wait_ended(300) != 0, remedy
            lines = [line for line in engine.log_text().splitlines() if remedy in line]
            assert lines, engine.log_tail()
            assert "ConfigError" in lines[0]
