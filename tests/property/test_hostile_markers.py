"""Any JSON as a request: it is read, refused by field, or left to vLLM; nothing else happens."""

import asyncio
from typing import Any

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


@given(api=st.sampled_from(Api), body=BODIES)
def test_a_body_is_read_refused_or_left_alone(api: Api, body: dict[str, Any]) -> None:
    before = repr(body)
    answer = _read(api, body)
    if isinstance(answer, MarkerError):
        assert refusal(api, answer)["error"]["message"]
    else:
        assert answer is None or len(answer.markers) <= MAX_BREAKPOINTS
    assert repr(body) == before


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
