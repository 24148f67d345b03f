"""What a restart costs a hit: host and prefix-cache hits in turns, before and after restarts of vLLM and the daemon.

usage: python -m benchmarks.restarts [--rounds 3]

A vLLM that was just started answers prefix-cache hits at another speed than one that has served, and each vLLM process
has a speed of its own. So a host hit after a restart is compared with prefix-cache hits of the same process. All
answers are streamed. Each prompt is sent after vLLM's prefix cache was emptied (from host memory), and at once again
(its prefix-cache hit).
"""

import argparse
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import interrupt_on_signals
from benchmarks.measuring.chat_requests import ask, forget_device_cache, greet, question
from benchmarks.measuring.machine import fast_dtype, machine_line, spread
from benchmarks.measuring.sized_prompts import SystemPrompt, make_prompt
from benchmarks.measuring.tables import table
from benchmarks.suite.profiles import BLOCK_TOKENS, PROFILES
from benchmarks.systems.kvtier_system import OFF_DEVICE_CONFIG, KVTier

SHAPE = PROFILES["long"].matrices[0]
Samples = dict[tuple[str, str, int], list[float]]


class RestartRun:
    """The system, and what was measured."""

    def __init__(self, system: KVTier, prompts: Sequence[SystemPrompt], rounds: int) -> None:
        self._system, self._prompts, self._rounds = system, prompts, rounds
        self._questions: Iterator[str] = map(question, itertools.count())
        self.samples: Samples = defaultdict(list)

    def run(self) -> None:
        """Measure before and after two restarts of vLLM and one of the daemon."""
        with self._system.server() as servers:
            with self._system.engine() as engine:
                greet(engine)
                for prompt in self._prompts:
                    ask(engine, [], prompt.messages(next(self._questions)))
                    self._system.keep(engine, prompt.name, prompt.text)
                self._ask_all("vLLM that computed the prompts", engine)
            for number in (1, 2):
                with self._system.engine() as engine:
                    greet(engine)
                    self._ask_all(f"vLLM restarted, {number}", engine)
            with self._system.engine() as engine:
                greet(engine)
                for server in servers:
                    server.kill()
                    self._system.revive(server, engine)
                greet(engine)
                self._ask_all("vLLM restarted, then the daemon killed", engine)

    def _ask_all(self, when: str, engine: Engine) -> None:
        for _ in range(self._rounds):
            forget_device_cache(engine)
            for prompt in self._prompts:
                for source in ("host", "device"):
                    answer = ask(engine, [], prompt.messages(next(self._questions)))
                    if answer.by_source.get(source, 0) < 0.9 * prompt.tokens:
                        raise SystemExit(f"{when}: a prompt did not come from {source}: {answer.by_source}")
                    self.samples[when, source, prompt.tokens].append(1e3 * answer.ttft_s)


def rows(samples: Samples) -> Iterator[list[str]]:
    """Yield a row for each time and length."""
    for when, tokens in dict.fromkeys((when, tokens) for when, _, tokens in samples):
        host, own = samples[when, "host", tokens], samples[when, "device", tokens]
        above = [one - other for one, other in zip(host, own, strict=True)]
        first = ", ".join(f"{one:.0f} / {other:.0f}" for one, other in _first_of(host, own))
        yield [when, f"{tokens:,}", spread(host, digits=0), spread(own, digits=0), spread(above, digits=0), first]


def _first_of(host: Sequence[float], own: Sequence[float]) -> Iterator[tuple[float, float]]:
    return zip(host[: SHAPE.prompts], own[: SHAPE.prompts], strict=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    interrupt_on_signals()
    model = cached_model(f"suite-{SHAPE.name}", SHAPE.model)
    prompts = [make_prompt(model, tokens, variant) for variant, tokens in enumerate(SHAPE.lengths * SHAPE.prompts)]
    engine_options = EngineOptions(
        model=str(model),
        connector_config=OFF_DEVICE_CONFIG,
        max_model_len=max(SHAPE.lengths) + 1024,
        block_size=BLOCK_TOKENS,
        pool_blocks=SHAPE.pool_blocks,
        max_batched_tokens=4096,
        dtype=fast_dtype(),
    )
    with tempfile.TemporaryDirectory(prefix="kvtier-restarts-") as home:
        system = KVTier(Path(home) / "kvtier", engine_options, SHAPE.host_gib)
        try:
            bench = RestartRun(system, prompts, options.rounds)
            bench.run()
        finally:
            system.clean_up()
    print(machine_line())
    header = (
        "answered by",
        "tokens",
        "host hit ms",
        "prefix-cache hit ms",
        "difference ms",
        "first three, host / prefix",
    )
    print(table(header, list(rows(bench.samples))))


if __name__ == "__main__":
    main()
