"""OpenAI's markers, and Anthropic's in chat requests."""

from typing import Any

import pytest

from kvtier.core.tokens import common_prefix
from kvtier.gateway.markers.marked_request import MarkedRequest, MarkerError
from kvtier.gateway.markers.openai_markers import read_chat_request, read_responses_request
from tests.unit.gateway.vllm_app import render

EPHEMERAL, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
EXPLICIT = {"mode": "explicit"}


def part(words: str, **marker: Any) -> dict[str, Any]:
    """Return a text part."""
    return {"type": "text", "text": words, **marker}


def turn(role: str, *parts: Any, **fields: Any) -> dict[str, Any]:
    """Return a turn of parts."""
    return {"role": role, "content": list(parts), **fields}


def chat(*turns: Any, **fields: Any) -> MarkedRequest:
    """Read a chat request that is marked."""
    request = read_chat_request({"model": "m", "messages": list(turns), **fields})
    assert request is not None
    return request


def marked_tokens(request: MarkedRequest) -> list[int]:
    """Return the tokens up to each marker."""
    found = []
    for marker in request.markers:
        prefix = common_prefix([render(variant) for variant in marker.variants])
        assert render(request.body)[: len(prefix)] == prefix
        found.append(len(prefix))
    return found


HELLO = {"role": "user", "content": "hello there"}
CLERK = turn("system", part("a b", cache_control=EPHEMERAL))


def test_nothing_is_marked_in_most_requests() -> None:
    assert read_chat_request({"messages": [HELLO]}) is None
    assert read_responses_request({"input": "x", "prompt_cache_key": None}) is None


class TestCacheControl:
    """Anthropic's marker, as LiteLLM and OpenRouter send it."""

    def test_in_a_part_reaches_to_the_first_turn_and_vllm_does_not_see_it(self) -> None:
        request = chat(CLERK, HELLO)
        assert marked_tokens(request) == [1 + 1 + 2 + 1]
        assert request.body["messages"] == [turn("system", part("a b")), HELLO]
        assert request.has_cache_control

    def test_on_a_turn_of_text(self) -> None:
        system = {"role": "system", "content": "a b", "cache_control": LONG}
        request = chat(system, HELLO)
        assert marked_tokens(request) == [1 + 1 + 2 + 1]
        assert [marker.ttl_s for marker in request.markers] == [3600]

    def test_on_a_tool_and_inside_its_function(self) -> None:
        function = {"name": "t", "parameters": {"properties": {"cache_control": {}}}}
        for tool in ({"function": function, "cache_control": LONG}, {"function": function | {"cache_control": LONG}}):
            request = chat(turn("system", part("a")), HELLO, tools=[tool | {"type": "function"}])
            assert request.body["tools"] == [{"type": "function", "function": function}]
            assert len(marked_tokens(request)) == 1

    def test_at_the_top_level_marks_the_newest_turn(self) -> None:
        request = chat(HELLO, cache_control=EPHEMERAL)
        assert marked_tokens(request) == [1 + 1 + 2]

    def test_on_a_tools_answer_and_on_a_turn_without_content(self) -> None:
        call: Any = {"role": "assistant", "content": None, "tool_calls": [], "cache_control": EPHEMERAL}
        answer = {"role": "tool", "tool_call_id": "1", "content": "c d", "cache_control": EPHEMERAL}
        places = marked_tokens(chat(HELLO, call, answer))
        assert places == [1 + 3 + 1, 1 + 3 + 1 + 1 + 2]

    def test_five_are_refused(self) -> None:
        with pytest.raises(MarkerError, match="Found 5"):
            read_chat_request({"messages": [turn("user", *[part("a", cache_control=EPHEMERAL)] * 5)]})


class TestOwnMarkers:
    """`prompt_cache_*`."""

    def test_a_key_marks_the_newest_turn_for_half_an_hour(self) -> None:
        request = chat(turn("system", part("a")), HELLO, prompt_cache_key="k")
        assert marked_tokens(request) == [len(render(request.body)) - 1]
        assert [marker.ttl_s for marker in request.markers] == [1800]
        assert not request.has_cache_control

    @pytest.mark.parametrize(
        ("fields", "ttl_s"),
        [
            ({"prompt_cache_retention": "in_memory"}, 600),
            ({"prompt_cache_retention": "24h"}, 86_400),
            ({"prompt_cache_options": {"ttl": "12h"}}, 43_200),
            ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 1800),
            ({"prompt_cache_options": {}, "prompt_cache_retention": "24h"}, 86_400),
        ],
    )
    def test_the_ttl_comes_from_options_or_retention(self, fields: Any, ttl_s: int) -> None:
        assert [marker.ttl_s for marker in chat(HELLO, **fields).markers] == [ttl_s]

    def test_explicit_breakpoints_come_beside_the_implicit_one(self) -> None:
        system = turn("system", part("a b", prompt_cache_breakpoint=EXPLICIT | {"ttl": "12h"}), part("c"))
        request = chat(system, HELLO)
        assert marked_tokens(request) == [1 + 1 + 2, len(render(request.body)) - 1]
        assert [marker.ttl_s for marker in request.markers] == [43_200, 1800]
        assert request.body["messages"][0] == turn("system", part("a b"), part("c"))

    @pytest.mark.parametrize(("mode", "expected"), [("implicit", [5, 6, 7, 7]), ("explicit", [4, 5, 6, 7])])
    def test_the_latest_of_many_count(self, mode: str, expected: list[int]) -> None:
        parts = [part(word, prompt_cache_breakpoint=EXPLICIT) for word in "abcde"]
        assert marked_tokens(chat(turn("user", *parts), prompt_cache_options={"mode": mode})) == expected

    def test_four_cache_controls_leave_none_for_them(self) -> None:
        """The first of the four was dropped, for the implicit one."""
        parts = [part(word, cache_control=LONG) for word in "abcd"]
        request = chat(turn("user", *parts), HELLO, prompt_cache_key="k")
        assert marked_tokens(request) == [3, 4, 5, 6]
        assert [marker.ttl_s for marker in request.markers] == [3600] * 4

    def test_are_in_the_order_of_the_prompt_among_cache_controls(self) -> None:
        parts = [part("a", prompt_cache_breakpoint=EXPLICIT), part("b", cache_control=EPHEMERAL)]
        tool = {"type": "function", "function": {"name": "t"}, "cache_control": EPHEMERAL}
        request = chat(turn("user", *parts, cache_control=EPHEMERAL), HELLO, tools=[tool])
        places = marked_tokens(request)
        assert places == sorted(places)
        assert [marker.ttl_s for marker in request.markers] == [300, 300, 300, 1800]  # "a" is the one too many
        explicit = chat(turn("user", *parts), tools=[tool], prompt_cache_options=EXPLICIT)
        assert [marker.ttl_s for marker in explicit.markers] == [300, 1800, 300]

    @pytest.mark.parametrize("options", [{"ttl": "12h"}, EXPLICIT | {"ttl": "12h"}])
    def test_vllm_gets_no_options(self, options: Any) -> None:
        """It acts on none of them, and 0.33 refuses all TTLs but one."""
        request = read_responses_request({"input": "x", "prompt_cache_options": options, "user": "me"})
        assert request is not None
        assert request.body == {"input": "x", "user": "me"}

    def test_explicit_mode_without_a_breakpoint_marks_nothing(self) -> None:
        assert chat(HELLO, prompt_cache_options=EXPLICIT).markers == ()

    def test_responses_mark_text_and_parts(self) -> None:
        request = read_responses_request({"input": "a b", "instructions": "c", "prompt_cache_key": "k"})
        assert request is not None
        assert marked_tokens(request) == [1 + 1 + 1 + 2]
        assert request.body["prompt_cache_key"] == "k"
        first = {"type": "input_text", "text": "a", "prompt_cache_breakpoint": EXPLICIT}
        items = [turn("user", first, {"type": "input_text", "text": "b"})]
        request = read_responses_request({"input": items, "prompt_cache_options": EXPLICIT})
        assert request is not None
        assert marked_tokens(request) == [1 + 1 + 1]

    def test_an_item_that_is_no_message_ends_a_response(self) -> None:
        output = {"type": "function_call_output", "call_id": "1", "output": "x", "role": "tool"}
        request = read_responses_request({"input": [HELLO, output], "prompt_cache_key": "k"})
        assert request is not None
        assert marked_tokens(request) == [1 + 3 + 1]

    def test_a_prewarm_is_marked_without_markers(self) -> None:
        options = {"mode": "explicit", "prewarm": True}
        request = read_responses_request({"input": "x", "prompt_cache_options": options})
        assert request is not None
        assert request.is_prewarm
        assert request.markers == ()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt_cache_key": 5}, ("prompt_cache_key",)),
        ({"prompt_cache_retention": "in-memory"}, ("prompt_cache_retention",)),
        ({"prompt_cache_options": "30m"}, ("prompt_cache_options",)),
        ({"prompt_cache_options": {"ttl": "5m"}}, ("prompt_cache_options", "ttl")),
        ({"prompt_cache_options": {"mode": "both"}}, ("prompt_cache_options", "mode")),
        ({"prompt_cache_options": {"prewarm": 1}}, ("prompt_cache_options", "prewarm")),
        ({"prompt_cache_options": {"prewarm": True}, "stream": True}, ("prompt_cache_options", "prewarm")),
        (
            {"input": [turn("user", part("a", prompt_cache_breakpoint=True))]},
            ("input", 0, "content", 0, "prompt_cache_breakpoint"),
        ),
        (
            {"input": [turn("user", part("a", prompt_cache_breakpoint={"mode": "implicit"}))]},
            ("input", 0, "content", 0, "prompt_cache_breakpoint", "mode"),
        ),
    ],
)
def test_wrong_markers_are_refused_by_field(fields: Any, path: Any) -> None:
    with pytest.raises(MarkerError) as refused:
        read_responses_request({"input": "x", **fields})
    assert refused.value.path == path


@pytest.mark.parametrize("turns", [None, 5, "text", [], [None], [{"role": "user", "content": {"a": 1}}], [[]]])
def test_malformed_requests_are_left_to_vllm(turns: Any) -> None:
    for fields in ({"prompt_cache_key": "k"}, {"cache_control": EPHEMERAL}, {"tools": 5, "prompt_cache_key": "k"}):
        read_chat_request({"messages": turns, **fields})
        read_responses_request({"input": turns, **fields})
