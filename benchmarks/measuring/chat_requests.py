"""Chat requests to a running vLLM: time to first token, cached tokens, logprobs, and what processes read meanwhile."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from benchmarks.harness.engine import Engine
from benchmarks.harness.process import Process, wait_until
from benchmarks.harness.prompts import QUESTIONS, system_prompt
from benchmarks.measuring.process_usage import BytesRead

ANSWER_TOKENS = 8
# Beyond any cold prompt here: only a vLLM that hangs takes longer.
ANSWER_TIMEOUT_S = 180
EMPTY_TIMEOUT_S = 60
PINNED_VARIANT = 0

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of vLLM.

    Attributes:
        ttft_s: Until the first generated token arrived.
        cached_tokens: Prompt tokens that vLLM did not compute, as the API says.
        by_source: The same by where they came from, as vLLM's /metrics say; sources without tokens are left out.
        tokens: Generated tokens.
        logprobs: One per generated token.
        read: What the system's processes read for it.
    """

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    by_source: dict[str, int]
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    read: BytesRead

    @property
    def served_by(self) -> str:
        """The sources that supplied tokens, most first."""
        return " + ".join(sorted(self.by_source, key=lambda source: -self.by_source[source])) or "computed"


def question(number: int) -> str:
    """Return a question; other numbers differ from the first word on, so that no cache has more than the prompt."""
    return f"{number + 1000} is my reference. {QUESTIONS[number % len(QUESTIONS)]}"


def forget_device_cache(engine: Engine) -> None:
    """Empty vLLM's prefix cache, as other prompts would in time.

    Raises:
        TimeoutError: vLLM kept blocks in use.
    """

    def emptied() -> bool:
        # vLLM answers 200 also when it could not, because blocks are still being stored; some versions without a body.
        answer = engine.http.post("/reset_prefix_cache").raise_for_status()
        return not answer.content or bool(answer.json()["success"])

    wait_until(emptied, EMPTY_TIMEOUT_S, "vLLM to empty its prefix cache")


def greet(engine: Engine, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
    """Send a short request, so that lazy imports do not count as part of the first measured one."""
    ask(engine, [], [{"role": "user", "content": "Hello!"}], timeout_s)


def ask_pinned(engine: Engine, processes: Sequence[Process], number: int, variant: int = PINNED_VARIANT) -> Answer:
    """Ask question `number` behind the long system prompt `variant`."""
    messages = [
        {"role": "system", "content": system_prompt(variant)},
        {"role": "user", "content": question(number)},
    ]
    return ask(engine, processes, messages)


def ask(
    engine: Engine, processes: Sequence[Process], messages: Messages, timeout_s: float = ANSWER_TIMEOUT_S
) -> Answer:
    """Ask through the openai client, streaming, greedily; count what `processes` and their children read meanwhile."""
    groups = {process.pid for process in processes}
    sources = engine.cached_by_source()
    read = BytesRead.by_groups(groups)
    ttft_s, usage = 0.0, None
    tokens: list[str] = []
    logprobs: list[float] = []
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", timeout=timeout_s, max_retries=0) as client:
        start_s = time.perf_counter()
        stream = client.chat.completions.create(
            model="model",
            messages=messages,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        for event in stream:
            usage = event.usage or usage
            content = event.choices[0].logprobs.content if event.choices and event.choices[0].logprobs else None
            if content and not tokens:
                ttft_s = time.perf_counter() - start_s
            tokens += [each.token for each in content or ()]
            logprobs += [each.logprob for each in content or ()]
    assert usage is not None, "vLLM sent no usage"
    details = usage.prompt_tokens_details
    after = engine.cached_by_source()
    return Answer(
        ttft_s=ttft_s,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        by_source={source: after[source] - sources[source] for source in after if after[source] > sources[source]},
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        read=BytesRead.by_groups(groups) - read,
    )


def streamed_event(line: str) -> dict[str, Any]:
    """Return the event in a line of vLLM's stream; empty for a line without one."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return {}
    event: dict[str, Any] = json.loads(data)
    return event
