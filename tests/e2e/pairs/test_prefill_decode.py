"""A prefill engine and a decode engine on one daemon, through kvtier alone: right answers, also when a part dies.

The tests of this file run in order. The reference is one plain vLLM, which ends before the pair starts.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest

from benchmarks.harness.daemon import wait_attached
from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import EVICTING, Answer, Stack, ask, forget_gpu, running_stack, tokens
from tests.e2e.pairs.prefill_proxy import PrefillProxy, running_proxy

PREFIX_TOKENS = 640
SYSTEM = tokens(1, PREFIX_TOKENS)
# Prompts with that prefix, and others; of 21 whole blocks and a bit.
PINNED = [SYSTEM + tokens(10 + i, 42) for i in range(4)]
OTHERS = [tokens(100 + i, 682) for i in range(16)]
WHOLE_BLOCKS = 672


@dataclass
class Pair:
    """What the tests share.

    Attributes:
        references: What one plain vLLM answers, each prompt computed.
        seeds: Of prompts that are asked once.
        num_stored: Chunks that were stored when the tests began.
    """

    stack: Stack
    references: list[Answer]
    engines: ExitStack = field(default_factory=ExitStack)
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(600))
    num_stored: int = 0

    def start(self) -> None:
        """Start both engines and the proxy."""
        self.prefill, self.decode = (
            self.engines.enter_context(self.stack.unstarted_engine(kv_role=role))
            for role in ("kv_producer", "kv_consumer")
        )
        for engine in (self.prefill, self.decode):
            engine.launch()
        for engine in (self.prefill, self.decode):
            engine.wait_started()
        wait_attached(self.stack.daemon, 2)
        self.proxy: PrefillProxy = self.engines.enter_context(running_proxy(self.prefill.url, self.decode.url))
        self.wait_paired()

    def wait_paired(self) -> None:
        """Wait until what one computes comes to the other: each learns in its own time what the daemon holds."""

        def is_paired() -> bool:
            return self.ask(tokens(next(self.seeds), 682)).by_source["host"] == WHOLE_BLOCKS

        wait_until(is_paired, 120, lambda: f"a pair\n{self.prefill.log_tail()}\n{self.decode.log_tail()}")

    def ask(self, prompt: Sequence[int]) -> Answer:
        """Ask the proxy; where tokens came from is the decode engine's report."""
        before = self.decode.cached_by_source() if self.decode.is_running else {}
        answer = ask(self.decode, prompt, url=self.proxy.url, alone=False)
        after = self.decode.cached_by_source() if self.decode.is_running else {}
        return replace(answer, by_source={source: after[source] - before[source] for source in after if before})


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Ask a plain vLLM, then run the pair."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)), pool_blocks=128, connector_config=EVICTING)
    with running_stack(options, daemon_settings={"KVTIER_CACHE_STORE": "all"}) as stack:
        stack.pin("system", SYSTEM)
        with stack.engine(kvtier_socket=None) as plain:
            references = []
            for prompt in PINNED + OTHERS:
                forget_gpu(plain)
                references.append(ask(plain, prompt))
        pair = Pair(stack, references)
        with pair.engines:
            pair.start()
            pair.num_stored = stack.counters()["stored_chunks"]
            yield pair


def _prefill_waits(pair: Pair) -> tuple[float, float, float]:
    """Return how many requests have waited for a store that came, for how long, and how many in vain."""
    waits = "kvtier_connector_prefill_waits_total"
    return (
        pair.decode.metric(waits, result="came"),
        pair.decode.metric("kvtier_connector_prefill_wait_seconds_sum"),
        pair.decode.metric(waits, result="late"),
    )


def test_the_decode_engine_computes_no_whole_block(pair: Pair, compare: Comparisons, note: Note) -> None:
    """Of each prompt it loads every whole block, though it looks before they are stored; the answers are equal."""
    before = _prefill_waits(pair)
    for prompt, reference in zip(PINNED + OTHERS, pair.references, strict=True):
        answer = pair.ask(prompt)
        assert answer.by_source["host"] + answer.by_source["device"] == WHOLE_BLOCKS, answer.by_source
        compare.same_tokens(answer, reference)
    waited, waited_s, late = (now - then for now, then in zip(_prefill_waits(pair), before, strict=True))
    assert late == 0
    mean_ms = 1000 * waited_s / max(waited, 1)
    note(f"{waited:.0f} of {len(pair.references)} requests came before the store; they waited {mean_ms:.1f} ms")
    assert pair.decode.metric("kvtier_connector_stored_chunks_total") == 0


def test_pins_are_stored_once(pair: Pair) -> None:
    """By the prefill engine; the prefix that four prompts share has one copy on disk."""
    pair.stack.wait_durable("system")
    pair.stack.wait_attached(pair.decode)
    num_chunks = pair.num_stored + (PREFIX_TOKENS + len(PINNED) * 32 + len(OTHERS) * WHOLE_BLOCKS) // 32
    assert pair.stack.counters()["stored_chunks"] == num_chunks

    def num_counted() -> float:
        return pair.prefill.metric("kvtier_connector_stored_chunks_total")

    wait_until(lambda: num_counted() >= num_chunks, 60, "vLLM to count what was stored")  # the daemon knows it first
    assert num_counted() == num_chunks
    assert len(pair.stack.stored_checksums()) >= PREFIX_TOKENS // 32


def test_restored_equals_a_prefix_cache_hit(pair: Pair, compare: Comparisons) -> None:
    """Exactly, in every logprob: the reference is the prefill engine with the blocks that it computed itself."""
    prompt = tokens(200, 682)
    restored = pair.ask(prompt)
    assert restored.by_source["host"] == WHOLE_BLOCKS
    cached = ask(pair.prefill, prompt)
    assert cached.by_source["device"] == WHOLE_BLOCKS
    compare.same_logprobs(restored, cached)


def test_many_at_once(pair: Pair, compare: Comparisons, note: Note) -> None:
    """Prefills run together, and each is looked up before it is stored; afterwards each is compared alone."""
    for engine in (pair.prefill, pair.decode):
        forget_gpu(engine)
    before = _prefill_waits(pair)
    prompts = [tokens(300 + i, 682) for i in range(5)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        start_s = time.monotonic()
        answers = list(pool.map(lambda prompt: ask(pair.decode, prompt, url=pair.proxy.url, alone=False), prompts))
        elapsed_s = time.monotonic() - start_s
    came, came_s, _ = (now - then for now, then in zip(_prefill_waits(pair), before, strict=True))
    note(f"{len(prompts)} at once in {elapsed_s:.2f} s; {came:.0f} waited for a store, {came_s:.3f} s together")
    assert [answer.cached_tokens for answer in answers] == [WHOLE_BLOCKS] * len(prompts)
    for prompt in prompts:
        forget_gpu(pair.decode)
        restored, cached = pair.ask(prompt), ask(pair.prefill, prompt)
        assert restored.by_source["host"] == cached.by_source["device"] == WHOLE_BLOCKS
        compare.same_logprobs(restored, cached)


def test_the_daemon_is_killed_while_requests_run(pair: Pair, compare: Comparisons) -> None:
    """Both engines compute; when it is back, they are a pair again."""
    for engine in (pair.prefill, pair.decode):
        forget_gpu(engine)
    prefills = pair.prefill.metric("vllm:request_success_total")
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, pair.decode, prompt, url=pair.proxy.url, alone=False) for prompt in OTHERS]
        wait_until(lambda: pair.prefill.metric("vllm:request_success_total") > prefills, 60, "a prefill")
        pair.stack.daemon.kill()
        for future, reference in zip(answers, pair.references[len(PINNED) :], strict=True):
            compare.same_tokens(future.result(), reference, num_tokens=1)
    forget_gpu(pair.decode)
    compare.same_tokens(pair.ask(OTHERS[5]), pair.references[len(PINNED) + 5])
    pair.stack.daemon.start()
    pair.wait_paired()


def test_the_prefill_engine_is_killed(pair: Pair, compare: Comparisons, note: Note) -> None:
    """What it had stored is loaded; what it had not is computed, and only one request waits for it."""
    pair.prefill.kill()
    forget_gpu(pair.decode)
    stored = pair.ask(PINNED[1])
    assert stored.by_source["host"] == WHOLE_BLOCKS
    compare.same_tokens(stored, pair.references[1])
    late_before = pair.decode.metric("kvtier_connector_prefill_waits_total", result="late")
    unstored = [tokens(500 + i, 682) for i in range(3)]
    answers = [pair.ask(prompt) for prompt in unstored]
    note("seconds of requests without a prefill: " + ", ".join(f"{answer.seconds:.2f}" for answer in answers))
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0]
    assert pair.decode.metric("kvtier_connector_prefill_waits_total", result="late") == late_before + 1
    assert pair.proxy.num_failed_prefills == 4


def test_the_decode_engine_is_killed(pair: Pair, compare: Comparisons) -> None:
    """The proxy asks the prefill engine instead, which loads and computes like any."""
    pair.engines.close()
    pair.start()
    pair.decode.kill()
    answer = pair.ask(PINNED[2])
    assert pair.proxy.num_failed_decodes == 1
    compare.same_tokens(answer, pair.references[2])
