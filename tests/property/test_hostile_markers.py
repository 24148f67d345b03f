"""Any JSON as a request: it is read, refused by field, or left to vLLM; nothing else happens."""

import asyncio
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.gateway import PromptCaching
from kvtier.gateway.markers.api_paths import read_markers, refusal
from kvtier.gateway.markers.marked_request import MAX_BREAKPOINTS, Api, MarkedRequest, MarkerError
from tests.unit.gateway.vllm_app import Client, VllmApp

KEYS = st.sampled_from(
    [
        "messages", "input", "system", "tools", "role", "content", "type", "text", "function", "name", "cache_control",
        "ttl", "mode", "prewarm", "prompt_cache_key", "prompt_cache_options", "prompt_cache_breakpoint",
        "prompt_cache_retention", "max_tokens", "stream", "thinking", "tool_choice", "kv_transfer_params", "kvtier",
    ]
)  # fmt: skip
WORDS = st.sampled_from(
    [
        "user", "system", "assistant", "tool", "text", "input_text", "tool_result", "thinking", "ephemeral", "5m", "1h",
        "30m", "24h", "explicit", "implicit", "", "\ud800",
    ]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 5) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=40,
)
BODIES = st.dictionaries(KEYS, VALUES, max_size=8)

EPHEMERAL, EXPLICIT = {"type": "ephemeral", "ttl": "1h"}, {"mode": "explicit"}
TOOLS = [{"name": "t", "cache_control": EPHEMERAL}, {"type": "function", "function": {"name": "t"}}]
MARKED: dict[Api, dict[str, Any]] = {
    Api.MESSAGES: {
        "system": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}],
        "tools": TOOLS[:1],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "t", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "cache_control": EPHEMERAL}]},
        ],
        "cache_control": EPHEMERAL,
        "max_tokens": 5,
    },
    Api.CHAT: {
        "tools": TOOLS[1:],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": EXPLICIT}]},
            {"role": "user", "content": [{"type": "text", "text": "b", "prompt_cache_breakpoint": EXPLICIT}]},
            {"role": "user", "content": "c"},
        ],
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    },
    Api.RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": EXPLICIT}]},
            {"role": "user", "content": "b"},
        ],
        "tools": [{"type": "function", "name": "t"}],
        "prompt_cache_retention": "24h",
    },
}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place inside a body: what holds it, and its key or index."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@st.composite
def mutated_bodies(draw: st.DrawFn, api: Api) -> dict[str, Any]:
    """Draw a request with markers, a few places of which are others."""
    body = deepcopy(MARKED[api])
    for _ in range(draw(st.integers(0, 3))):
        if found := places(body):
            inside, key = draw(st.sampled_from(found))
            if draw(st.booleans()):
                inside[key] = draw(VALUES)
            else:
                del inside[key]
    return body


def check(api: Api, body: dict[str, Any]) -> MarkedRequest | MarkerError | None:
    """Read a body, and return what came of that."""
    before = repr(body)
    answer = _read(api, body)
    if isinstance(answer, MarkerError):
        assert refusal(api, answer)["error"]["message"]
    else:
        assert answer is None or len(answer.markers) <= MAX_BREAKPOINTS
    assert repr(body) == before
    return answer


@given(api=st.sampled_from(Api), body=BODIES)
def test_a_body_is_read_refused_or_left_alone(api: Api, body: dict[str, Any]) -> None:
    check(api, body)


@pytest.mark.parametrize("api", Api)
def test_a_marked_request_in_which_something_is_changed_too(api: Api) -> None:
    outcomes = Counter[str]()

    @given(body=mutated_bodies(api))
    def run(body: dict[str, Any]) -> None:
        answer = check(api, body)
        outcomes["marked" if isinstance(answer, MarkedRequest) and answer.markers else type(answer).__name__] += 1

    run()
    assert outcomes["marked"]
    assert outcomes["MarkerError"]


def _read(api: Api, body: dict[str, Any]) -> MarkedRequest | MarkerError | None:
    try:
        return read_markers(api, body)
    except MarkerError as refused:
        return refused


@given(api=st.sampled_from(Api), raw=st.binary(max_size=200))
def test_bytes_that_are_no_json_reach_vllm(api: Api, raw: bytes) -> None:
    inner = VllmApp()
    body = b'{"cache_control": "' + raw

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await inner({**scope, "path": "/v1/other"}, receive, send)

    answer = asyncio.run(Client(PromptCaching(answers)).post(api.value, body))
    if answer.status != 400:  # it happened to be JSON, and wrong
        assert inner.bodies == [body]
