"""System prompts that no one named: found in chats, pinned, restored after restarts; and by a client's marker.

The tests run in order, on one daemon and one engine after the other.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from benchmarks.harness.prompts import system_prompt
from tests.e2e.conftest import Note
from tests.e2e.harness import EVICTING, HANG_S, Stack, forget_gpu, running_stack

BLOCK_TOKENS = 32
SETTINGS = {"KVTIER_CACHE_AUTO_PIN_MIN_TOKENS": "256"}


@dataclass
class World:
    """What the tests share."""

    stack: Stack
    engines: ExitStack
    engine: Engine
    num_asked: int = 0

    def restart(self) -> None:
        """Kill the daemon, end vLLM, and start both again."""
        self.engines.close()
        self.stack.daemon.kill()
        self.stack.daemon.start()
        self.engine = self.engines.enter_context(self.stack.engine())
        self.stack.wait_attached(self.engine)

    def chat(self, system: str) -> Any:
        """Ask a new question under a system prompt, through the official client."""
        self.num_asked += 1
        messages: list[Any] = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Question {self.num_asked}: what do you say to {self.num_asked * 7}?"},
        ]
        with openai.OpenAI(base_url=f"{self.engine.url}/v1", api_key="none", timeout=110, max_retries=0) as client:
            return client.chat.completions.create(model="model", messages=messages, max_tokens=1)

    def ask_marked(self, system: str, question: str) -> Any:
        """Ask as a client of Anthropic's API that marks its system prompt."""
        marker = {"type": "ephemeral", "ttl": "1h"}
        parts: list[Any] = [{"type": "text", "text": system, "cache_control": marker}]
        with anthropic.Anthropic(base_url=self.engine.url, auth_token="secret", max_retries=0, timeout=110) as client:
            return client.messages.create(
                model="model", max_tokens=1, system=parts, messages=[{"role": "user", "content": question}]
            )

    def pins(self) -> list[Any]:
        """Return the prompts, as `kvtier list --json` has them."""
        return list(self.stack.json("list"))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    options = EngineOptions(
        model=str(cached_model("tiny", TINY)),
        max_model_len=4096,
        block_size=BLOCK_TOKENS,
        pool_blocks=400,
        connector_config=EVICTING,
        extra_args=("--middleware", "kvtier.gateway.PromptCaching"),
    )
    with running_stack(options, daemon_settings=SETTINGS) as stack, ExitStack() as engines:
        engine = engines.enter_context(stack.engine())
        stack.wait_attached(engine)
        yield World(stack, engines, engine)


def test_a_system_prompt_is_found_after_a_few_requests(world: World, note: Note) -> None:
    system = system_prompt(0)[:6000]
    world.chat("Hello!")  # the thread that learns the template begins with the first request
    wait_until(
        lambda: "system prompts are found up to the first user turn" in world.engine.log_text(), HANG_S, "template"
    )
    asked = 0
    while not world.pins():
        world.chat(system)
        asked += 1
        assert asked < 30, world.stack.json("advise")
    (pin,) = world.pins()
    assert (pin["name"][:5], pin["origin"]) == ("auto-", "auto")
    world.stack.ask_until_durable(pin["name"], lambda: world.chat(system))
    note(f"found after {asked} requests: {pin['name']}, {pin['num_tokens']} tokens")
    forget_gpu(world.engine)
    before = world.engine.cached_by_source()
    world.chat(system)
    after = world.engine.cached_by_source()
    assert after["host"] - before["host"] == pin["num_tokens"]


def test_it_outlives_vllm_and_the_daemon_and_counts_on(world: World) -> None:
    (pin,) = world.pins()
    world.restart()
    world.chat(system_prompt(0)[:6000])
    after = world.engine.cached_by_source()
    assert after["host"] + after["disk"] == pin["num_tokens"]
    wait_until(
        lambda: world.stack.json("show", pin["name"])["use"]["num_requests"] >= 1, HANG_S, "the request to be counted"
    )


def test_a_prompt_that_changes_in_the_middle_is_shown(world: World) -> None:
    text = system_prompt(1)[:6000]
    half = len(text) // 2
    for number in range(12):
        world.chat(f"{text[:half]} The ticket is {number * 37 + 1000}. {text[half:]}")

    def is_shown() -> bool:
        return any(namespace["places"] for namespace in world.stack.json("advise")["namespaces"])

    wait_until(is_shown, HANG_S, "the place to be reported")
    assert "The ticket is" in world.stack.cli("advise").stdout


def test_a_client_s_marker_becomes_a_pin_of_the_client(world: World) -> None:
    system = system_prompt(2)[:6000]
    usages = [world.ask_marked(system, question).usage for question in ("Where are you?", "Who is there?")]

    def requested() -> list[Any]:
        return [each for each in world.pins() if each["origin"] == "request"]

    # The daemon asks for the tokens, and vLLM sends them in its next step: a further request brings one.
    wait_until(lambda: bool(world.chat("Hello!") and requested()), HANG_S, "the pin that the marker asks for")
    (pin,) = requested()
    assert len(pin["owner"]) == 16
    world.stack.ask_until_durable(pin["name"], lambda: world.ask_marked(system, "What are you?"))
    written, read = usages
    assert written.cache_creation_input_tokens > BLOCK_TOKENS
    assert read.cache_read_input_tokens + read.cache_creation_input_tokens == written.cache_creation_input_tokens
    forget_gpu(world.engine)
    before = world.engine.cached_by_source()
    world.chat(system_prompt(2)[:6000])
    after = world.engine.cached_by_source()
    assert after["host"] - before["host"] >= BLOCK_TOKENS


def test_usage_says_zero_while_the_daemon_is_away(world: World) -> None:
    world.stack.daemon.kill()
    wait_until(
        lambda: world.chat("Hello?") and not world.engine.metric("kvtier_connector_attached"), HANG_S, "the loss"
    )
    usage = world.ask_marked(system_prompt(3)[:6000], "Is it away?").usage
    assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)
    assert usage.input_tokens > BLOCK_TOKENS
    world.stack.daemon.start()
    wait_until(
        lambda: world.chat("Hello?") and bool(world.engine.metric("kvtier_connector_attached")), HANG_S, "the return"
    )
    usage = world.ask_marked(system_prompt(4)[:6000], "Is it back?").usage
    assert usage.cache_creation_input_tokens > BLOCK_TOKENS
