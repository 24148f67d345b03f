"""Pinned prompts are in vLLM's prefix cache before users ask: after a restart by themselves, else by `kvtier warm`.

The tests of this file run in order, on one daemon and one engine after the other. vLLM's cache has 64 blocks of 32
tokens, half of which warm prompts may take: IMPORTANT and SMALL fit, NEWER does not.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Event

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY, TINY_CONV
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import PATIENT, Answer, Stack, ask, forget_gpu, prefix_cache_hit, running_stack, tokens

IMPORTANT, NEWER, SMALL = tokens(1, 640), tokens(2, 640), tokens(3, 256)
QUESTION = tokens(10, 40)
NUM_WARM_TOKENS = len(IMPORTANT) + len(SMALL)
MAX_TRIES = 3


@dataclass
class World:
    """What the tests share; `reference` is IMPORTANT and QUESTION, the former from vLLM's prefix cache."""

    stack: Stack
    engines: ExitStack
    engine: Engine
    reference: Answer

    def restart_engine(self, *, start_daemon: bool = True) -> None:
        """End the engine and start one that warms itself."""
        self.engines.close()
        if not start_daemon:
            self.stack.daemon.stop()
        self.engine = self.engines.enter_context(self.stack.engine(warm_start=True))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Pin with an engine that does not warm itself."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)), max_batched_tokens=256, connector_config=PATIENT)
    with running_stack(options) as stack, ExitStack() as engines:
        engine = engines.enter_context(stack.engine())
        reference = prefix_cache_hit(engine, IMPORTANT, QUESTION)
        stack.wait_attached(engine)
        for name, prompt, priority in [("important", IMPORTANT, "5"), ("small", SMALL, "-1"), ("newer", NEWER, "0")]:
            stack.pin(name, prompt, engine, "--priority", priority)
            stack.wait_durable(name)
        yield World(stack, engines, engine, reference)


def warm_requests(engine: Engine) -> int:
    return int(engine.metric("kvtier_connector_warm_requests_total"))


def wait_warm(engine: Engine, num_rounds: int) -> None:
    """Wait until this many warm starts have ended."""
    ended = "kvtier warm start ended prompts=2 of 2"
    what = f"{num_rounds} warm starts to end"
    wait_until(lambda: engine.log_text().count(ended) >= num_rounds, 180, lambda: f"{what}\n{engine.log_tail()}")


def is_answered_by_vllm_alone(world: World, compare: Comparisons) -> None:
    """The first request of a user finds IMPORTANT in vLLM's prefix cache, and with it the right answer."""
    first = ask(world.engine, IMPORTANT + QUESTION)
    assert first.by_source["device"] == first.cached_tokens == len(IMPORTANT), first
    assert first.restored_tokens == 0
    compare.same_logprobs(first, world.reference)


def test_by_hand_after_a_reset(world: World, compare: Comparisons, note: Note) -> None:
    """Without `warm_url` nothing comes back by itself; `kvtier warm` brings it."""
    stack, engine = world.stack, world.engine
    forget_gpu(engine)
    answer = json.loads(stack.cli("warm", "important", "small", "--url", engine.url, "--json").stdout)
    assert [(p["name"], p["result"], p["cached_tokens"]) for p in answer["prompts"]] == [
        ("important", "warmed", len(IMPORTANT)),
        ("small", "warmed", len(SMALL)),
    ]
    note(f"by hand: {[round(prompt['seconds'], 2) for prompt in answer['prompts']]} s")
    is_answered_by_vllm_alone(world, compare)
    assert engine.metric("kvtier_connector_warmed_tokens_total") == NUM_WARM_TOKENS
    left_out = stack.cli("warm", "--url", engine.url)
    assert "newer: not warmed: needs 672 tokens of vLLM's cache" in " ".join(left_out.stderr.split())
    assert "warmed: 2 of 3 prompts" in left_out.stdout


def test_a_prompt_that_ends_with_a_chunk_comes_back_whole(world: World, compare: Comparisons) -> None:
    """vLLM computes a request's last token, and with it the chunk that it lies in: one token more is sent."""
    _warm_exactly(world.stack, world.engine, compare, covered_tokens=640)


def test_recurrent_state_comes_back_up_to_where_the_prompt_is_bound(compare: Comparisons) -> None:
    """Which is one chunk before the end: vLLM keeps no state where a request ends."""
    options = EngineOptions(model=str(cached_model("conv", TINY_CONV)), pool_blocks=128, connector_config=PATIENT)
    with running_stack(options) as stack, stack.engine() as engine:
        stack.wait_attached(engine)
        _warm_exactly(stack, engine, compare, covered_tokens=608)


def _warm_exactly(stack: Stack, engine: Engine, compare: Comparisons, *, covered_tokens: int) -> None:
    prefix = tokens(4, 640)
    # Computed in one request of the length that pinning computes it in: another length is another rounding.
    forget_gpu(engine)
    assert ask(engine, prefix, max_tokens=1).cached_tokens == 0
    reference = ask(engine, prefix + QUESTION)
    assert reference.by_source["device"] == reference.cached_tokens == covered_tokens, reference
    path = stack.home / "exact.json"
    path.write_text(json.dumps(prefix))
    stack.cli("pin", "exact", "--tokens", str(path), "--url", engine.url)
    forget_gpu(engine)
    (warmed,) = json.loads(stack.cli("warm", "exact", "--url", engine.url, "--json").stdout)["prompts"]
    assert warmed["cached_tokens"] == covered_tokens
    first = ask(engine, prefix + QUESTION)
    assert first.by_source["device"] == first.cached_tokens == covered_tokens, first
    compare.same_logprobs(first, reference)
    stack.cli("unpin", "exact")
    stack.cli("evict", "exact")


def test_by_hand_it_yields_to_requests_that_wait(world: World) -> None:
    """More requests than fit into vLLM's cache: the rest wait, and `kvtier warm` with them, or not at all."""
    stack, engine = world.stack, world.engine
    was_refused = Event()

    def user(n: int) -> list[Answer]:
        """Ask until the command was refused: on a busy machine it takes seconds to start."""
        answers = [ask(engine, tokens(50 + n, 900), max_tokens=100, alone=False)]
        while not was_refused.is_set():
            answers.append(ask(engine, tokens(50 + n, 900), max_tokens=100, alone=False))
        return answers

    with ThreadPoolExecutor(8) as pool:
        users = [pool.submit(user, n) for n in range(8)]
        try:
            wait_until(lambda: engine.metric("vllm:num_requests_waiting") > 0, 60, "requests to wait")
            refused = stack.cli("warm", "small", "--url", engine.url, "--wait", "0", expect=1)
        finally:
            was_refused.set()
        assert "small: not warmed: requests waited in vLLM" in refused.stderr
        assert "warmed: 1 of 1 prompts" in stack.cli("warm", "small", "--url", engine.url, "--wait", "240").stdout
        assert all(len(answer.logprobs) == 100 for user in users for answer in user.result())


def test_after_a_restart_the_first_request_is_served_from_vllms_prefix_cache(
    world: World, compare: Comparisons, note: Note
) -> None:
    world.restart_engine()
    engine = world.engine
    wait_warm(engine, 1)
    note(engine.log_text().partition("kvtier warm start ended ")[2].splitlines()[0])
    assert "leaves out name=newer" in engine.log_text()
    assert warm_requests(engine) == 2
    assert engine.metric("kvtier_connector_warmed_tokens_total") == NUM_WARM_TOKENS
    is_answered_by_vllm_alone(world, compare)
    assert ask(engine, SMALL + QUESTION).by_source["device"] == len(SMALL)
    assert ask(engine, NEWER + QUESTION).by_source["host"] == len(NEWER), "not warmed, and hit all the same"
    assert engine.metric("kvtier_connector_warm_failures_total") == 0


def test_after_a_reset_too(world: World, compare: Comparisons) -> None:
    forget_gpu(world.engine)
    wait_warm(world.engine, 2)
    is_answered_by_vllm_alone(world, compare)


def test_a_daemon_that_comes_back_is_no_reason(world: World) -> None:
    """vLLM's blocks are still there."""
    num_before = warm_requests(world.engine)
    world.stack.daemon.kill()
    world.stack.daemon.start()
    world.stack.wait_attached(world.engine)
    ask(world.engine, SMALL + QUESTION)
    assert warm_requests(world.engine) == num_before


def test_it_waits_while_a_user_is_served(world: World, compare: Comparisons) -> None:
    """The daemon comes while a user's request runs: the engine attaches, and warms when the request has ended."""
    for _ in range(MAX_TRIES):
        world.restart_engine(start_daemon=False)
        if (num_looks := _looks_while_a_user_is_served(world)) > 0:  # on a busy machine the daemon may come too late
            break
    assert num_looks > 0, f"the user was served too soon {MAX_TRIES} times"
    wait_warm(world.engine, 1)
    is_answered_by_vllm_alone(world, compare)


def _looks_while_a_user_is_served(world: World) -> int:
    """Start the daemon while a user's request runs; return how often it ran on while a warm start waited for it."""
    engine = world.engine
    num_before = engine.metric("vllm:generation_tokens_total")
    with ThreadPoolExecutor(1) as pool:
        user: Future[Answer] = pool.submit(ask, engine, tokens(90, 100), max_tokens=900, alone=False)
        wait_until(lambda: engine.metric("vllm:num_requests_running") > 0, 60, "the user's request to run")
        world.stack.daemon.start()
        began = "kvtier warm start began"
        wait_until(lambda: began in engine.log_text(), 60, lambda: f"the warm start to begin\n{engine.log_tail()}")
        num_looks = 0
        while True:
            # In this order: both counts reach /metrics with vLLM's outputs, the user's last one before kvtier's.
            num_warm = warm_requests(engine)
            if engine.metric("vllm:generation_tokens_total") >= num_before + 900:
                break
            assert num_warm == 0, "a user's request is open"
            assert not user.done() or user.exception() is None, user.exception()
            num_looks += 1
        assert len(user.result().logprobs) == 900
    return num_looks
