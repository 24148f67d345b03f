"""Every kind of request that reaches a prefix over HTTP, on one engine: right answers, and no lease left.

The tests run in order. Prefills are chunked, 96 tokens a step, and requests are scheduled by priority.
"""

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import make_model
from benchmarks.harness.process import wait_until
from tests.e2e.equality import Comparisons
from tests.e2e.harness import (
    ANSWER_S,
    ANSWER_TOKENS,
    PATIENT,
    Answer,
    Stack,
    ask,
    forget_gpu,
    prefix_cache_hit,
    running_stack,
    tokens,
)

BLOCK_TOKENS, NUM_BLOCKS = 32, 20
PREFIX_TOKENS = NUM_BLOCKS * BLOCK_TOKENS
PREFIX, QUESTION = tokens(1, PREFIX_TOKENS), tokens(2, 40)
OTHER_WEIGHTS = replace(TINY, seed=1)
NUM_CHOICES = 3
NUM_LONG_ANSWER = 300
NUM_DISCONNECTS = 24


@dataclass
class World:
    """What the tests share.

    Attributes:
        model: The model's folder, of this file alone: its weights change.
        references: By length of the prefix, the answer with that prefix from vLLM's prefix cache.
        computed: By kind of request, what was answered before anything was stored.
    """

    stack: Stack
    engine: Engine
    model: Path
    references: dict[int, Answer]
    computed: dict[str, Completion]

    def wait_attached(self, since_unix_s: float) -> None:
        """Wait until a session since then is up and has slots for all of the prompt: one request stores it whole."""
        self.stack.wait_attached(self.engine, since_unix_s=since_unix_s)
        wait_until(lambda: self._num_credits() > NUM_BLOCKS, 60, "the session's store credits")

    def _num_credits(self) -> int:
        return sum(row.num_store_grants for row in self.stack.status().sessions if not row.quarantined)

    def restored(self, num_tokens: int = PREFIX_TOKENS) -> Answer:
        """Ask after a prefix that vLLM has forgotten."""
        forget_gpu(self.engine)
        return ask(self.engine, PREFIX[:num_tokens] + QUESTION)

    def complete(self, **params: Any) -> Completion:
        """Complete prefix and question with other parameters."""
        params = {"max_tokens": ANSWER_TOKENS, "temperature": 0} | params
        with openai.OpenAI(base_url=f"{self.engine.url}/v1", api_key="none", max_retries=0) as client:
            completion = client.completions.create(model="model", prompt=PREFIX + QUESTION, **params)
        assert isinstance(completion, Completion)
        return completion

    def restore_and_complete(self, **params: Any) -> tuple[Completion, dict[str, int]]:
        """Do the same after vLLM has forgotten the prefix; return also the cached tokens by source."""
        forget_gpu(self.engine)
        before = self.engine.cached_by_source()
        completion = self.complete(**params)
        after = self.engine.cached_by_source()
        return completion, {source: after[source] - before[source] for source in after}

    def num_leases(self) -> int:
        """Return the leases that `kvtier status` shows."""
        return sum(session["num_leases"] for session in self.stack.json("status")["sessions"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """An engine with a pinned prompt, and what it answered before."""
    model = tmp_path_factory.mktemp("model")
    make_model(model, TINY)
    options = EngineOptions(
        model=str(model),
        block_size=BLOCK_TOKENS,
        max_batched_tokens=96,
        # A request waits for a stopped daemon until its client has gone, however long that takes.
        connector_config=PATIENT | {"lookup_timeout_ms": 300_000},
        extra_args=("--scheduling-policy", "priority"),
    )
    with running_stack(options) as stack, stack.engine() as engine:
        lengths = range(BLOCK_TOKENS, PREFIX_TOKENS + 1, BLOCK_TOKENS)
        references = {length: prefix_cache_hit(engine, PREFIX[:length], QUESTION) for length in lengths}
        world = World(stack, engine, model, references, {})
        for kind, params in COMPUTED_KINDS.items():
            world.computed[kind] = world.complete(**params)
        stack.wait_attached(engine)
        stack.pin("prompt", PREFIX, engine)
        yield world


COMPUTED_KINDS: dict[str, dict[str, Any]] = {
    "prompt logprobs": {"extra_body": {"prompt_logprobs": 1}},
    "echo with logprobs": {"echo": True, "logprobs": 2},
}


def test_hits_that_end_at_every_block(world: World, compare: Comparisons) -> None:
    """Also where a step of a chunked prefill would not have ended."""
    for length, reference in world.references.items():
        compare.restored_equals_prefix_cache_hit(world.restored(length), reference, "host")


def test_one_token(world: World, compare: Comparisons) -> None:
    """The request is over when its first step is."""
    forget_gpu(world.engine)
    answer = ask(world.engine, PREFIX + QUESTION, max_tokens=1)
    assert answer.restored_tokens == PREFIX_TOKENS
    assert answer.logprobs == world.references[PREFIX_TOKENS].logprobs[:1]


def test_streaming(world: World) -> None:
    """Token by token the same text."""
    forget_gpu(world.engine)
    with openai.OpenAI(base_url=f"{world.engine.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(
            client.completions.create(
                model="model",
                prompt=PREFIX + QUESTION,
                max_tokens=ANSWER_TOKENS,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == world.references[PREFIX_TOKENS].text
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == PREFIX_TOKENS


def test_several_choices(world: World, compare: Comparisons) -> None:
    """Each choice is a request of its own for vLLM: all of them hit, and nothing wrong is in what they loaded."""
    stored = world.stack.stored_checksums()
    completion, cached = world.restore_and_complete(n=NUM_CHOICES, temperature=1, seed=0)
    assert [choice.index for choice in completion.choices] == list(range(NUM_CHOICES))
    # The first to be computed gives the others the question's whole block too.
    assert sum(cached.values()) >= NUM_CHOICES * PREFIX_TOKENS
    assert cached["host"] >= PREFIX_TOKENS
    world.stack.store_again("prompt", PREFIX, world.engine)
    compare.same_bytes(stored, world.stack.stored_checksums())


@pytest.mark.parametrize("kind", COMPUTED_KINDS)
def test_logprobs_of_the_prompt(world: World, kind: str) -> None:
    """They need every token computed, so vLLM reads no cache and kvtier is not asked; what they are does not change."""
    completion, cached = world.restore_and_complete(**COMPUTED_KINDS[kind])
    assert sum(cached.values()) == 0
    assert completion.choices[0].model_dump() == world.computed[kind].choices[0].model_dump()


def test_echo(world: World) -> None:
    """The prompt comes back with the answer, and was restored."""
    completion, cached = world.restore_and_complete(echo=True, extra_body={"ignore_eos": True})
    assert cached["host"] == PREFIX_TOKENS
    assert completion.choices[0].text.endswith(world.references[PREFIX_TOKENS].text)
    assert len(completion.choices[0].text) > PREFIX_TOKENS


def test_structured_output(world: World) -> None:
    """A restored request keeps to its grammar, and to what vLLM answers with its prefix-cache hit."""
    params = {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}
    completion, cached = world.restore_and_complete(logprobs=5, **params)
    assert cached["host"] == PREFIX_TOKENS
    assert completion.choices[0].text in ("yes", "no")
    again = world.complete(logprobs=5, **params)
    assert again.choices[0].model_dump() == completion.choices[0].model_dump()


def test_priorities(world: World) -> None:
    """Requests of several priorities at once are all restored."""
    forget_gpu(world.engine)
    body = {
        "model": "model",
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "prompt": [PREFIX + tokens(seed, 40) for seed in (60, 61)],
    }
    with httpx.Client(base_url=world.engine.url, timeout=ANSWER_S) as client, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(client.post, "/v1/completions", json=body | {"priority": each}) for each in (5, -5)]
        answers = [each.result().json() for each in asked]
    for answer in answers:
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= PREFIX_TOKENS, answer


def test_client_gone_while_the_daemon_is_asked(world: World, compare: Comparisons) -> None:
    """The daemon does not answer, the client hangs up, the daemon goes on: no lease is left."""
    forget_gpu(world.engine)
    world.stack.daemon.signal(signal.SIGSTOP)
    try:
        connection = _send(world.engine, PREFIX + QUESTION)
        wait_until(lambda: _num_requests(world.engine) == 1, 60, "the request to wait")
        connection.close()
        wait_until(lambda: _num_requests(world.engine) == 0, 60, "vLLM to drop the request")
    finally:
        world.stack.daemon.signal(signal.SIGCONT)
    _check_nothing_left(world, compare)


def test_client_gone_at_any_time(world: World, compare: Comparisons) -> None:
    """Before, while and after the prefix is loaded, and while the rest is computed."""
    for number in range(NUM_DISCONNECTS):
        forget_gpu(world.engine)
        connection = _send(world.engine, PREFIX + tokens(200 + number, 300))
        time.sleep(number * 0.002)  # the moment is what is tried out here, nothing waits for it
        connection.close()
        wait_until(lambda: _num_requests(world.engine) == 0, 60, "vLLM to drop the request")
    _check_nothing_left(world, compare)


def test_reset_of_vllms_prefix_cache(world: World, compare: Comparisons) -> None:
    """Twice in a row: kvtier keeps what it has."""
    for _ in range(2):
        forget_gpu(world.engine)
    compare.restored_equals_prefix_cache_hit(world.restored(), world.references[PREFIX_TOKENS], "host")


def test_reset_under_a_running_request(world: World, compare: Comparisons) -> None:
    """vLLM takes its blocks, and in the next step it is loaded again: that ended an engine of vLLM before 0.33."""

    def wait_grown(name: str, num_more: int, **labels: str) -> None:
        wanted = world.engine.metric(name, **labels) + num_more
        wait_until(lambda: world.engine.metric(name, **labels) >= wanted, 60, f"{num_more} more of {name}")

    forget_gpu(world.engine)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, world.engine, PREFIX + QUESTION, max_tokens=NUM_LONG_ANSWER)
        wait_grown("vllm:generation_tokens_total", 5)
        for _ in range(3):
            loaded = _num_loaded(world.engine)
            world.engine.http.post("/reset_prefix_cache", params={"reset_running_requests": True}).raise_for_status()
            wait_until(lambda: _num_loaded(world.engine) >= loaded + NUM_BLOCKS, 60, "the load after it")  # noqa: B023
            wait_grown("vllm:generation_tokens_total", 5)
        answer = asked.result(ANSWER_S)
    assert len(answer.logprobs) == NUM_LONG_ANSWER
    _check_nothing_left(world, compare)


def test_reset_with_kvtier(world: World, compare: Comparisons) -> None:
    """Twice in a row, just after a request that stores: the prompt is computed, then kept again beside the old."""
    for _ in range(3):
        for _ in range(2):
            reset_unix_s = time.time()
            forget_gpu(world.engine, reset_external=True)
        world.wait_attached(reset_unix_s)
        assert ask(world.engine, PREFIX + QUESTION, max_tokens=1).cached_tokens == 0
    compare.restored_equals_prefix_cache_hit(world.restored(), world.references[PREFIX_TOKENS], "host")


def test_sleep(world: World, compare: Comparisons) -> None:
    """On the CPU vLLM keeps its memory and only empties its caches, kvtier's too."""
    reset_unix_s = time.time()
    for path in ("/sleep?level=1", "/wake_up"):
        world.engine.http.post(path).raise_for_status()
    world.wait_attached(reset_unix_s)
    assert ask(world.engine, PREFIX + QUESTION, max_tokens=1).cached_tokens == 0
    compare.restored_equals_prefix_cache_hit(world.restored(), world.references[PREFIX_TOKENS], "host")


def test_weights_loaded_in_place(world: World) -> None:
    """After a reset that reaches kvtier, nothing that the old weights computed is served."""
    make_model(world.model, OTHER_WEIGHTS)
    world.engine.http.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
    reset_unix_s = time.time()
    forget_gpu(world.engine, reset_external=True)
    world.wait_attached(reset_unix_s)
    answer = ask(world.engine, PREFIX + QUESTION)
    assert answer.cached_tokens == 0
    assert answer.logprobs != world.references[PREFIX_TOKENS].logprobs


def test_weights_that_change_without_a_reset_of_kvtier(world: World, compare: Comparisons) -> None:
    """kvtier notices the call, and caches again after a reset of vLLM's prefix cache alone."""
    make_model(world.model, TINY)
    changed_unix_s = time.time()
    world.engine.http.post("/collective_rpc", json={"method": "reload_weights"}).raise_for_status()
    world.wait_attached(changed_unix_s)
    assert world.restored().cached_tokens == 0
    compare.restored_equals_prefix_cache_hit(world.restored(), world.references[PREFIX_TOKENS], "host")


def _check_nothing_left(world: World, compare: Comparisons) -> None:
    # Behind all that was sent before: vLLM may not have read it yet, and would serve it beside the next request.
    ask(world.engine, QUESTION, max_tokens=1, alone=False)
    wait_until(lambda: _num_requests(world.engine) == 0, 60, "vLLM to drop the requests")
    wait_until(lambda: world.num_leases() == 0, 60, "the leases to end")
    compare.restored_equals_prefix_cache_hit(world.restored(), world.references[PREFIX_TOKENS], "host")


def _num_loaded(engine: Engine) -> float:
    return engine.metric("kvtier_connector_loaded_chunks_total", tier="host")


def _num_requests(engine: Engine) -> float:
    return engine.metric("vllm:num_requests_running") + engine.metric("vllm:num_requests_waiting")


def _send(engine: Engine, prompt: list[int]) -> socket.socket:
    """Send a completion request and read nothing; closing the socket is the client that hangs up."""
    body = json.dumps({"model": "model", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    connection = socket.create_connection(("127.0.0.1", engine.port), timeout=60)
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return connection
