"""kvtier inside vLLM's MultiConnector, before and behind another connector: right bytes, pins stored once.

The other one is vLLM's ExampleConnector, which writes every whole prompt to a folder and loads it for an equal request.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.equality import Comparisons
from tests.e2e.harness import EVICTING, Answer, Stack, ask, forget_gpu, prefix_cache_hit, running_stack, tokens

PREFIX_TOKENS = 640
SYSTEM, PLAIN = tokens(1, PREFIX_TOKENS), tokens(2, PREFIX_TOKENS)
NUM_CHUNKS = PREFIX_TOKENS // 32
# Shorter than a block: whatever loads a prefix loads 640 tokens, and what is computed then is the same.
QUESTION = tokens(4, 20)
OURS, THEIRS = "host", "external_unspecified"
EVENTS = '{"enable_kv_cache_events": true, "publisher": "null"}'


@dataclass
class World:
    """What the tests of one order share.

    Attributes:
        folder: Where the other connector keeps prompts.
    """

    stack: Stack
    engine: Engine
    folder: Path
    neighbour_first: bool

    def lose_folder(self) -> None:
        """Leave the other connector nothing."""
        for each in self.folder.iterdir():
            shutil.rmtree(each)

    def ask(self, prompt: Sequence[int]) -> Answer:
        """Ask an engine whose prefix cache is empty."""
        forget_gpu(self.engine)
        return ask(self.engine, prompt)


@pytest.fixture(scope="module", params=["kvtier first", "kvtier last"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One engine with both connectors."""
    folder = tmp_path_factory.mktemp("example")
    neighbour = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    options = EngineOptions(
        model=str(cached_model("tiny", TINY)),
        pool_blocks=128,
        connector_config=EVICTING,
        neighbour=neighbour,
        neighbour_first=request.param == "kvtier last",
        extra_args=("--kv-events-config", EVENTS),
    )
    with running_stack(options) as stack, stack.engine() as engine:
        stack.wait_attached(engine)
        yield World(stack, engine, folder, options.neighbour_first)


def test_each_loads_what_it_has_and_bytes_pass_between_them(world: World, compare: Comparisons) -> None:
    """The references come from vLLM's prefix cache, with blocks that it computed."""
    stack, engine = world.stack, world.engine
    reference = prefix_cache_hit(engine, SYSTEM, QUESTION)
    plain = prefix_cache_hit(engine, PLAIN, QUESTION)
    assert reference.logprobs != plain.logprobs, "the oracle sees the prefix"
    stack.pin("system", SYSTEM, engine)
    stack.wait_durable("system")
    before = stack.stored_checksums()

    def loaded(prefix: Sequence[int], source: str, expected: Answer) -> None:
        answer = world.ask([*prefix, *QUESTION])
        assert answer.by_source[source] == answer.cached_tokens == PREFIX_TOKENS, answer.by_source
        compare.same_logprobs(answer, expected)

    loaded(SYSTEM, THEIRS if world.neighbour_first else OURS, reference)  # both have it
    loaded(PLAIN, THEIRS, plain)  # no pin
    assert engine.metric("kvtier_connector_stored_chunks_total") == NUM_CHUNKS
    world.lose_folder()
    loaded(SYSTEM, OURS, reference)  # and the other one stores what kvtier has loaded
    stack.cli("evict", "system", "--force")
    loaded(SYSTEM, THEIRS, reference)  # and kvtier stores what the other one has loaded
    stack.wait_durable("system")
    compare.same_bytes(before, stack.stored_checksums())
    world.lose_folder()
    loaded(SYSTEM, OURS, reference)


def test_pins_are_stored_once(world: World) -> None:
    """Twice by now: they were evicted by command."""
    assert world.engine.metric("kvtier_connector_stored_chunks_total") == 2 * NUM_CHUNKS
    assert world.stack.counters()["stored_chunks"] == 2 * NUM_CHUNKS
    assert len(world.stack.stored_checksums()) == NUM_CHUNKS


def test_what_vllm_asks_of_a_connector(world: World) -> None:
    """Metrics of both, the report of a request, events for routers, a reset that reaches both."""
    engine = world.engine
    world.lose_folder()
    forget_gpu(engine)
    body = {
        "model": "model",
        "prompt": [*SYSTEM, *QUESTION],
        "max_tokens": 1,
        "kv_transfer_params": {"kvtier": {"report": True}},
    }
    answer = engine.http.post("/v1/completions", json=body)
    answer.raise_for_status()
    assert answer.json()["kv_transfer_params"]["kvtier"]["cached_tokens"] == {"host": PREFIX_TOKENS}
    wait_until(
        lambda: engine.metric("kvtier_connector_lookups_total", result="whole") >= 3, 60, "the connector's stats"
    )
    assert engine.metric("vllm:kv_offload_load_bytes_total") > 0
    assert engine.metric("kvtier_connector_attached") == 1
    # The daemon reports half a second late what is in host memory.
    wait_until(
        lambda: engine.metric("kvtier_connector_announced_blocks") == NUM_CHUNKS,
        60,
        lambda: f"{NUM_CHUNKS} blocks to be announced\n{engine.log_tail()}",
    )
    reset_unix_s = time.time()
    forget_gpu(engine, reset_external=True)
    world.lose_folder()
    world.stack.wait_attached(engine, since_unix_s=reset_unix_s)
    computed = ask(engine, [*SYSTEM, *QUESTION])
    assert computed.cached_tokens == 0, "a reset engine has another namespace"


def test_without_a_daemon_the_other_one_goes_on(world: World, compare: Comparisons) -> None:
    computed = world.ask([*PLAIN, *QUESTION])
    assert computed.cached_tokens == 0
    world.stack.daemon.kill()
    answer = world.ask([*PLAIN, *QUESTION])
    assert answer.by_source[THEIRS] == answer.cached_tokens == PREFIX_TOKENS
    compare.same_tokens(answer, computed)
    world.lose_folder()
    again = world.ask([*PLAIN, *QUESTION])
    assert again.cached_tokens == 0
    compare.same_logprobs(again, computed)
