"""A pair whose KV goes by NIXL, with kvtier beside it for pins: `make test-nixl` installs NIXL into .nixl."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from benchmarks.harness.daemon import wait_attached
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import free_port
from tests.e2e.equality import Comparisons
from tests.e2e.harness import EVICTING, Answer, Stack, ask, forget_gpu, running_stack, tokens
from tests.e2e.pairs.prefill_proxy import PrefillProxy, running_proxy

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no NIXL here; make test-nixl has it")

PREFIX_TOKENS = 640
NUM_CHUNKS = PREFIX_TOKENS // 32
SYSTEM = tokens(1, PREFIX_TOKENS)
QUESTIONS = [tokens(10 + i, 42) for i in range(3)]
PLAIN = tokens(2, 682)
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


@dataclass
class NixlPair:
    """What the tests of one order share; the order is that of the decode engine's connectors."""

    stack: Stack
    prefill: Engine
    decode: Engine
    proxy: PrefillProxy
    nixl_first: bool

    def ask(self, prompt: list[int]) -> tuple[Answer, dict[str, int]]:
        """Ask the proxy with empty caches; return also where the decode engine had the tokens from."""
        for engine in (self.prefill, self.decode):
            if engine.is_running:
                forget_gpu(engine)
        before = self.decode.cached_by_source()
        answer = ask(self.decode, prompt, url=self.proxy.url, alone=False)
        after = self.decode.cached_by_source()
        return answer, {source: after[source] - before[source] for source in after}


@pytest.fixture(scope="module", params=["nixl first", "kvtier first"])
def pair(request: pytest.FixtureRequest) -> Iterator[NixlPair]:
    """Both engines have both connectors."""
    nixl_first = request.param == "nixl first"
    options = EngineOptions(
        model=str(cached_model("tiny", TINY)),
        pool_blocks=128,
        connector_config=EVICTING,
        neighbour=NIXL,
        neighbour_first=nixl_first,
    )
    with running_stack(options) as stack, ExitStack() as parts:
        prefill, decode = (
            parts.enter_context(stack.unstarted_engine(extra_env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}))
            for _ in range(2)
        )
        for engine in (prefill, decode):
            engine.launch()
        for engine in (prefill, decode):
            engine.wait_started()
        wait_attached(stack.daemon, 2)
        stack.pin("system", SYSTEM, prefill)
        stack.wait_durable("system")
        proxy = parts.enter_context(running_proxy(prefill.url, decode.url, passes_params=True))
        yield NixlPair(stack, prefill, decode, proxy, nixl_first)


def test_pins_come_from_kvtier_or_by_nixl_and_the_rest_by_nixl(pair: NixlPair, compare: Comparisons) -> None:
    """Whichever is first loads what both have."""
    for question in QUESTIONS:
        answer, by_source = pair.ask(SYSTEM + question)
        expected = ask(pair.prefill, SYSTEM + question)
        loaded = {"p2p": len(PLAIN)} if pair.nixl_first else {"host": PREFIX_TOKENS}
        assert {source: num for source, num in by_source.items() if num} == loaded
        compare.same_tokens(answer, expected)
    answer, by_source = pair.ask(PLAIN)
    assert {source: num for source, num in by_source.items() if num} == {"p2p": len(PLAIN)}
    compare.same_tokens(answer, ask(pair.prefill, PLAIN))


def test_pins_are_stored_once(pair: NixlPair) -> None:
    """Not again by the decode engine, and nothing that only NIXL passes on."""
    assert pair.stack.counters()["stored_chunks"] == NUM_CHUNKS
    assert len(pair.stack.stored_checksums()) == NUM_CHUNKS


def test_the_prefill_engine_is_killed(pair: NixlPair, compare: Comparisons) -> None:
    """NIXL has nothing then; the pin comes from kvtier all the same."""
    expected = ask(pair.prefill, SYSTEM + QUESTIONS[0])
    pair.prefill.kill()
    answer, by_source = pair.ask(SYSTEM + QUESTIONS[0])
    assert by_source["host"] == answer.cached_tokens == PREFIX_TOKENS
    compare.same_tokens(answer, expected)
