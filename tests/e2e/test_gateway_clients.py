"""Clients of hosted APIs against a real vLLM: the SDKs of Anthropic and OpenAI, and LiteLLM, streaming and not.

Every test runs twice: with the app inside vLLM, which was started with a key and without any flag for the app, and with
a gateway in front of another vLLM. Prompts differ from test to test, so each starts with nothing cached.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import Process, free_port
from benchmarks.harness.prompts import system_prompt

BLOCK_TOKENS = 32
EPHEMERAL: Any = {"type": "ephemeral"}
LONG: Any = {"type": "ephemeral", "ttl": "1h"}
# LiteLLM sends markers to OpenRouter when it takes the model for one of Anthropic's.
MODEL_NAMES = ("model", "anthropic/claude-tiny")
KEY = "secret"
TOOL: Any = {"name": "get_weather", "description": "The weather " * 40, "input_schema": {"type": "object"}}


@dataclass
class Front:
    """What clients talk to.

    Attributes:
        url: Base URL.
        engine: The vLLM behind it, without the app when a gateway is in front of it.
        clients: Closes the clients that were made, when all tests are done.
    """

    url: str
    engine: Engine
    is_gateway: bool
    clients: ExitStack

    def anthropic(self) -> anthropic.Anthropic:
        """Return the official client."""
        client = anthropic.Anthropic(base_url=self.url, auth_token=KEY, max_retries=0, timeout=110)
        return self.clients.enter_context(client)

    def openai(self) -> openai.OpenAI:
        """Return the official client."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=110)
        return self.clients.enter_context(client)


class Gateway(Process):
    """A `kvtier-gateway` on a free port of loopback."""

    def __init__(self, upstreams: list[str], log_path: Path, *options: str) -> None:
        """Prepare; `start` runs it."""
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        argv = [sys.executable, "-m", "kvtier.gateway.proxy.gateway_command", "--listen", f"127.0.0.1:{port}"]
        argv += [word for url in upstreams for word in ("--upstream", url)]
        super().__init__("kvtier-gateway", [*argv, *options], {}, log_path)

    def start(self) -> None:
        """Start it and wait until it answers."""
        super().start()
        self.wait_ready(self._answers, 60)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/live").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


def engine_options(*extra_args: str) -> EngineOptions:
    """Return how to serve the model."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--served-model-name", *MODEL_NAMES)
    model = str(cached_model("tiny", TINY))
    return EngineOptions(
        model=model, max_model_len=4096, block_size=BLOCK_TOKENS, pool_blocks=400, extra_args=(*tools, *extra_args)
    )


@pytest.fixture(scope="module", params=["middleware", "gateway"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Run a vLLM with the app in it, or one with a gateway in front."""
    home = tmp_path_factory.mktemp(request.param)
    if request.param == "middleware":
        # The harness gives the flag for cached tokens; the last one counts.
        app = ("--middleware", "kvtier.gateway.PromptCaching")
        options = engine_options(*app, "--no-enable-prompt-tokens-details", "--api-key", KEY)
        with Engine(options, home / "vllm.log") as engine, ExitStack() as clients:
            yield Front(engine.url, engine, is_gateway=False, clients=clients)
        return
    with (
        Engine(engine_options("--enable-scale-out"), home / "vllm.log") as engine,
        Gateway([engine.url], home / "gateway.log") as gateway,
        ExitStack() as clients,
    ):
        yield Front(gateway.url, engine, is_gateway=True, clients=clients)


def prompt(name: str) -> str:
    """Return a system prompt that no other test has: it differs in its first words."""
    return f"Test {name}. {system_prompt(len(name) % 6)}"[:6000]


def marked(name: str, control: Any = EPHEMERAL) -> list[Any]:
    """Return a marked system prompt of the Messages API."""
    return [{"type": "text", "text": prompt(name), "cache_control": control}]


def check_counts(first: Any, second: Any) -> int:
    """Check a request that wrote a prompt and one that read it; return the tokens of the prompt."""
    num_tokens = first.cache_creation_input_tokens
    assert num_tokens > 200
    # All tests' prompts begin with the same few tokens, less than a block.
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens == num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.cache_creation_input_tokens == num_tokens % BLOCK_TOKENS
    return int(num_tokens)


def test_the_messages_api_counts_a_marked_system_prompt(front: Front) -> None:
    client = front.anthropic()
    usages = []
    for question in ("Where are you?", "Who are you, and what do you do?"):
        message = client.messages.create(
            model="model", max_tokens=4, system=marked("messages"), messages=[{"role": "user", "content": question}]
        )
        assert message.content[0].type == "text"
        usages.append(message.usage)
    num_tokens = check_counts(*usages)
    assert usages[0].cache_creation.ephemeral_5m_input_tokens == num_tokens
    assert usages[0].cache_creation.ephemeral_1h_input_tokens == 0
    # The rest is the question and the generation prompt: all of it is what vLLM counts.
    turns = [{"role": "system", "content": prompt("messages")}, {"role": "user", "content": "Where are you?"}]
    tokens = front.engine.http.post("/tokenize", json={"model": "model", "messages": turns}).json()["tokens"]
    assert num_tokens + usages[0].input_tokens == len(tokens)


def test_the_messages_api_counts_in_streams(front: Front) -> None:
    client = front.anthropic()
    usages = []
    for question in ("Where are you?", "Who are you, and what do you do?"):
        turns: Any = [{"role": "user", "content": question}]
        with client.messages.stream(model="model", max_tokens=4, system=marked("streamed"), messages=turns) as stream:
            for event in stream:
                if event.type == "message_start" and not front.is_gateway:
                    assert event.message.usage.cache_creation is not None
            usages.append(stream.get_final_message().usage)
    check_counts(*usages)


def test_breakpoints_of_tools_system_and_messages_count_together(front: Front) -> None:
    client = front.anthropic()
    turns: Any = [{"role": "user", "content": [{"type": "text", "text": "Compare: " * 50, "cache_control": EPHEMERAL}]}]
    usage = client.messages.create(
        model="model", max_tokens=4, system=marked("all", LONG), tools=[TOOL | {"cache_control": LONG}], messages=turns
    ).usage
    assert usage.cache_creation is not None
    assert usage.cache_creation.ephemeral_1h_input_tokens > 200
    assert usage.cache_creation.ephemeral_5m_input_tokens > 50
    turns += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now?"}]
    usage = client.messages.create(
        model="model", max_tokens=4, system=marked("all", LONG), tools=[TOOL | {"cache_control": LONG}], messages=turns
    ).usage
    assert usage.cache_read_input_tokens > 250


def test_automatic_caching_marks_the_conversation(front: Front) -> None:
    client = front.anthropic()
    turns: Any = [{"role": "user", "content": "Where are you?"}]
    first = client.messages.create(
        model="model", max_tokens=4, cache_control=EPHEMERAL, system=prompt("auto"), messages=turns
    ).usage
    turns += [{"role": "assistant", "content": "Here."}, {"role": "user", "content": "And who?"}]
    second = client.messages.create(
        model="model", max_tokens=4, cache_control=EPHEMERAL, system=prompt("auto"), messages=turns
    ).usage
    # Behind the marked question there is the generation prompt alone.
    assert first.input_tokens < 8
    assert second.cache_read_input_tokens == first.cache_creation_input_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_max_tokens_0_warms_and_answers_nothing(front: Front) -> None:
    client = front.anthropic()
    turns: Any = [{"role": "user", "content": "warm"}]
    warmed = client.messages.create(model="model", max_tokens=0, system=marked("warm"), messages=turns)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    turns = [{"role": "user", "content": "Where are you?"}]
    answer = client.messages.create(model="model", max_tokens=4, system=marked("warm"), messages=turns)
    check_counts(warmed.usage, answer.usage)


@pytest.mark.parametrize(
    ("system", "problem"),
    [
        (
            [{"type": "text", "text": "x", "cache_control": EPHEMERAL}] * 5,
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            [{"type": "text", "text": "", "cache_control": EPHEMERAL}],
            "system.0.text: cache_control cannot be set for empty text blocks",
        ),
        (
            [{"type": "text", "text": "x", "cache_control": each} for each in (EPHEMERAL, LONG)],
            "system.1.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m'",
        ),
    ],
)
def test_wrong_markers_are_errors_of_the_official_client(front: Front, system: Any, problem: str) -> None:
    turns: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.BadRequestError) as failed:
        front.anthropic().messages.create(model="model", max_tokens=4, system=system, messages=turns)
    body: Any = failed.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert problem in body["error"]["message"]


def test_what_vllm_refuses_is_answered_by_vllm(front: Front) -> None:
    turns: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.NotFoundError):
        front.anthropic().messages.create(model="another", max_tokens=4, system=marked("none"), messages=turns)


def test_a_wrong_key_is_refused_by_vllm(front: Front) -> None:
    client = anthropic.Anthropic(base_url=front.url, auth_token="wrong", max_retries=0)
    ask: Any = {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    if front.is_gateway:  # its vLLM has no key
        assert client.messages.create(system=marked("key"), **ask).usage.cache_creation_input_tokens
        return
    with pytest.raises(anthropic.AuthenticationError):
        client.messages.create(system=marked("key"), **ask)


def test_tools_results_and_several_blocks_of_the_system_count(front: Front) -> None:
    client = front.anthropic()
    call: Any = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"place": "Bergen"}}
    result: Any = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain " * 60}
    system: Any = [*marked("results"), {"type": "text", "text": "Be brief.", "cache_control": EPHEMERAL}]
    turns: Any = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result | {"cache_control": EPHEMERAL}]},
    ]
    tools: Any = [TOOL, TOOL | {"name": "get_time", "cache_control": EPHEMERAL}]
    first = client.messages.create(model="model", max_tokens=4, tools=tools, system=system, messages=turns).usage
    assert first.cache_creation_input_tokens > 300
    turns += [{"role": "assistant", "content": "It rains."}, {"role": "user", "content": "Thanks."}]
    second = client.messages.create(model="model", max_tokens=4, tools=tools, system=system, messages=turns).usage
    assert second.cache_read_input_tokens == first.cache_creation_input_tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_chat_takes_cache_control_in_parts(front: Front, stream: bool) -> None:
    client = front.openai()
    usages = []
    for question in ("Where are you?", "Who are you, and what do you do?"):
        turns: Any = [
            {"role": "system", "content": marked(f"chat {stream}")},
            {"role": "user", "content": [{"type": "text", "text": question}]},
        ]
        options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer: Any = client.chat.completions.create(model="model", max_tokens=4, messages=turns, **options)
        usages.append(list(answer)[-1].usage if stream else answer.usage)
    num_tokens = check_counts(*usages)
    assert usages[0].prompt_tokens_details.cache_write_tokens == num_tokens
    assert usages[1].prompt_tokens_details.cached_tokens >= num_tokens - BLOCK_TOKENS


def test_chat_takes_breakpoints_and_options(front: Front) -> None:
    client = front.openai()
    part: Any = {"type": "text", "text": prompt("breakpoint"), "prompt_cache_breakpoint": {"mode": "explicit"}}
    usages = []
    for question in ("Where are you?", "Who are you, and what do you do?"):
        answer = client.chat.completions.create(
            model="model",
            max_tokens=4,
            messages=[{"role": "system", "content": [part]}, {"role": "user", "content": question}],
            prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        )
        assert answer.usage is not None
        usages.append(answer.usage.prompt_tokens_details)
    assert usages[0].cache_write_tokens > 200
    assert usages[0].cached_tokens == 0
    assert usages[1].cache_write_tokens == usages[0].cache_write_tokens % BLOCK_TOKENS
    assert usages[1].cached_tokens >= usages[0].cache_write_tokens - BLOCK_TOKENS


@pytest.mark.parametrize("retention", ["in_memory", "24h"])
def test_chat_takes_a_key_and_a_retention(front: Front, retention: Any) -> None:
    answer = front.openai().chat.completions.create(
        model="model",
        max_tokens=4,
        messages=[{"role": "system", "content": prompt(retention)}, {"role": "user", "content": "Where are you?"}],
        prompt_cache_key="tests",
        prompt_cache_retention=retention,
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    # All but the generation prompt.
    assert 0 < answer.usage.prompt_tokens - (answer.usage.prompt_tokens_details.cache_write_tokens or 0) < 8


@pytest.mark.parametrize("stream", [False, True])
def test_responses_take_a_key(front: Front, stream: bool) -> None:
    client = front.openai()
    usages = []
    for _ in range(2):
        answer: Any = client.responses.create(
            model="model",
            max_output_tokens=4,
            instructions=prompt(f"responses {stream}"),
            input="Where are you?",
            prompt_cache_key="tests",
            prompt_cache_options={"ttl": "12h"},
            stream=stream,
        )
        if stream:
            answer = list(answer)[-1].response
        usages.append(answer.usage.input_tokens_details)
    assert usages[0].cached_tokens == 0
    assert usages[0].cache_write_tokens > 200
    assert usages[0].cache_write_tokens_details.ttl_12h_tokens == usages[0].cache_write_tokens
    assert usages[1].cached_tokens > 200
    assert usages[1].cache_write_tokens < BLOCK_TOKENS


def test_a_wrong_ttl_is_an_error_of_the_official_client(front: Front) -> None:
    options: Any = {"ttl": "5m"}
    with pytest.raises(openai.BadRequestError) as failed:
        front.openai().responses.create(model="model", input="x", prompt_cache_options=options)
    assert failed.value.param == "prompt_cache_options.ttl"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["anthropic/model", "openrouter/anthropic/claude-tiny"])
@pytest.mark.filterwarnings("ignore")
def test_litellm_sees_the_counts(front: Front, model: str, stream: bool) -> None:
    litellm = pytest.importorskip("litellm")
    base = front.url if model == "anthropic/model" else f"{front.url}/v1"
    usages = []
    for question in ("Where are you?", "Who are you, and what do you do?"):
        options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = litellm.completion(
            model=model,
            api_base=base,
            api_key=KEY,
            extra_headers={"Authorization": f"Bearer {KEY}"},  # vLLM reads no other
            max_tokens=4,
            messages=[
                {"role": "system", "content": marked(f"litellm {model} {stream}")},
                {"role": "user", "content": question},
            ],
            **options,
        )
        usages.append(list(answer)[-1].usage if stream else answer.usage)
    num_tokens = usages[0].cache_creation_input_tokens
    assert num_tokens > 200
    assert usages[1].cache_read_input_tokens == num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert usages[1].prompt_tokens_details.cached_tokens >= usages[1].cache_read_input_tokens


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_unmarked_answers_have_only_what_vllm_says(front: Front, path: str) -> None:
    body = {"model": "model", "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": "Hello"}]}
    key = {"authorization": f"Bearer {KEY}"}
    usage = json.loads(httpx.post(f"{front.url}{path}", json=body, headers=key, timeout=60).content)["usage"]
    assert "cache_creation" not in usage
    if front.is_gateway:
        assert usage == front.engine.http.post(path, json=body).json()["usage"] or usage["prompt_tokens_details"]
    else:
        assert usage.get("prompt_tokens_details") is None
        assert "cache_read_input_tokens" not in usage
