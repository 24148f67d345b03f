"""Clients ask for pins in their requests: the first request stores, and the pin outlives vLLM and the daemon.

The tests run in order, on one daemon and one engine after the other.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from kvtier._pb.cache_pb2 import PromptStatus
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import (
    ANSWER_S,
    EVICTING,
    Answer,
    Stack,
    ask,
    forget_gpu,
    prefix_cache_hit,
    running_stack,
    tokens,
)

PREFIX_TOKENS = 640
PREFIX, QUESTION = tokens(1, PREFIX_TOKENS), tokens(2, 40)
NUM_CHUNKS = PREFIX_TOKENS // 32
TTL_S = 3600


@dataclass
class World:
    """What the tests share."""

    stack: Stack
    engines: ExitStack
    engine: Engine
    reference: Answer | None = None

    def restart(self) -> None:
        """End vLLM and the daemon, and start both again."""
        self.engines.close()
        self.stack.daemon.stop()
        self.stack.daemon.start()
        self.engine = self.engines.enter_context(self.stack.engine())
        self.stack.wait_attached(self.engine)

    def pins(self) -> list[PromptStatus]:
        """Return the pins."""
        with self.stack.admin() as client:
            return client.list()

    def client(self) -> openai.OpenAI:
        """Return the official client."""
        return openai.OpenAI(base_url=f"{self.engine.url}/v1", api_key="none", timeout=ANSWER_S, max_retries=0)

    def instructed(self, result: str) -> float:
        """Return how many requests with instructions ended so."""
        return self.engine.metric("kvtier_connector_request_instructions_total", result=result)


def params(**instructions: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"kvtier": instructions}}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    options = EngineOptions(model=str(cached_model("tiny", TINY)), max_batched_tokens=256, connector_config=EVICTING)
    with running_stack(options) as stack, ExitStack() as engines:
        engine = engines.enter_context(stack.engine())
        stack.wait_attached(engine)
        wait_until(
            lambda: any(row.num_store_grants > NUM_CHUNKS for row in stack.status().sessions), 60, "store credits"
        )
        yield World(stack, engines, engine)


def test_the_first_request_with_a_pin_stores_and_the_next_one_is_restored(
    world: World, compare: Comparisons, note: Note
) -> None:
    world.reference = prefix_cache_hit(world.engine, PREFIX, QUESTION)
    forget_gpu(world.engine)
    with world.client() as client:
        began_s = time.monotonic()
        client.completions.create(
            model="model",
            prompt=PREFIX,
            max_tokens=1,
            extra_body=params(pin="support/v1", ttl=TTL_S, breakpoints=[{"num_tokens": PREFIX_TOKENS}]),
        )
    wait_until(lambda: bool(world.pins()), 60, "the daemon to record the pin")
    world.stack.wait_durable("support/v1")
    note(f"durable {time.monotonic() - began_s:.2f} s after a request of one token was sent")
    assert world.stack.counters()["stored_chunks"] == NUM_CHUNKS, "by that request alone"
    forget_gpu(world.engine)
    compare.restored_equals_prefix_cache_hit(ask(world.engine, PREFIX + QUESTION), world.reference, "host")
    (pin,) = world.pins()
    assert 0 < pin.expires_unix_s - time.time() <= 1.25 * TTL_S
    assert world.instructed("pinned") == 1


def test_a_chat_is_pinned_under_a_name_that_is_made_up(world: World) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You are the assistant of a shop. " * 40},
        {"role": "user", "content": "Where is my order?"},
    ]
    with world.client() as client:
        for _ in range(3):
            client.chat.completions.create(
                model="model", messages=messages, max_tokens=1, extra_body=params(pin=True, ttl="1h")
            )
        wait_until(lambda: len(world.pins()) > 1, 60, "the daemon to record the pin")
        (pin,) = [each for each in world.pins() if each.name.startswith("request-")]
        world.stack.wait_durable(pin.name)
        forget_gpu(world.engine)
        before = world.engine.cached_by_source()
        client.chat.completions.create(model="model", messages=messages, max_tokens=1)
        after = world.engine.cached_by_source()
    assert after["host"] - before["host"] >= 32
    assert world.instructed("pinned") == 4
    assert len(world.pins()) == 2


def test_pins_of_requests_outlive_vllm_and_the_daemon(world: World, compare: Comparisons) -> None:
    before = {pin.name: pin.expires_unix_s for pin in world.pins()}
    world.restart()
    assert {pin.name: pin.expires_unix_s for pin in world.pins()} == before
    assert world.reference is not None
    compare.restored_equals_prefix_cache_hit(ask(world.engine, PREFIX + QUESTION), world.reference, "disk")


def test_no_store_and_wrong_instructions_are_answered_as_ever(world: World) -> None:
    stored = world.stack.counters()["stored_chunks"]
    with world.client() as client:
        for instructions in ({"no_store": True}, {"pin": "-rm"}, {"pinn": True}):
            client.completions.create(
                model="model", prompt=tokens(7, 200), max_tokens=1, extra_body=params(**instructions)
            )
    assert world.stack.counters()["stored_chunks"] == stored
    assert world.instructed("no_store") == 1
    assert world.instructed("invalid") == 2
    assert "kv_transfer_params.kvtier.pin" in world.engine.log_text()
    assert len(world.pins()) == 2
