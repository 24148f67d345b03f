"""Anthropic's markers: what is marked, what is refused, and what is rendered to find it."""

from typing import Any

import pytest

from kvtier.core.tokens import common_prefix
from kvtier.gateway.markers.anthropic_markers import read_messages_request
from kvtier.gateway.markers.marked_request import MarkedRequest, MarkerError
from tests.unit.gateway.vllm_app import render

EPHEMERAL, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def text(words: str, control: Any = None) -> dict[str, Any]:
    """Return a text block."""
    return {"type": "text", "text": words} | ({"cache_control": control} if control else {})


def body(**fields: Any) -> dict[str, Any]:
    """Return a request."""
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]} | fields


def user(*blocks: Any) -> dict[str, Any]:
    """Return a user's turn."""
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    """Return a turn of the model."""
    return {"role": "assistant", "content": list(blocks)}


def read(**fields: Any) -> MarkedRequest:
    """Read a request that is marked."""
    request = read_messages_request(body(**fields))
    assert request is not None
    return request


def marked_tokens(request: MarkedRequest) -> list[int]:
    """Return the tokens up to each marker."""
    found = []
    for marker in request.markers:
        tokens = [render(variant) for variant in marker.variants]
        prefix = common_prefix(tokens)
        # Rendering the request itself begins with the same tokens.
        assert render(request.body)[: len(prefix)] == prefix
        found.append(len(prefix))
    return found


def words(request: MarkedRequest) -> list[int]:
    """Return the tokens of the whole prompt."""
    return render(request.body)


def test_nothing_is_marked_in_most_requests() -> None:
    assert read_messages_request(body()) is None
    assert read_messages_request(body(system=[text("a")], tools=[{"name": "t"}])) is None
    assert read_messages_request(body(cache_control=None, system=[text("a") | {"cache_control": None}])) is None


def test_a_tool_may_have_a_parameter_called_cache_control() -> None:
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    tool = {"name": "t", "input_schema": schema}
    assert read_messages_request(body(tools=[tool])) is None
    assert read(tools=[tool | {"cache_control": EPHEMERAL}]).body["tools"] == [tool]


class TestPlaces:
    """How far a marker reaches. The template: system, tools, turns; each turn opens with a word."""

    def test_the_last_block_of_the_system_reaches_to_the_first_turn(self) -> None:
        request = read(system=[text("a b"), text("c d", EPHEMERAL)], tools=[{"name": "t"}])
        tool_words = ["<tool>", '{"name":', '"t"}']
        assert marked_tokens(request) == [1 + 4 + len(tool_words) + 1]

    def test_an_earlier_block_of_the_system_reaches_to_its_end(self) -> None:
        assert marked_tokens(read(system=[text("a b", EPHEMERAL), text("c d")])) == [3]

    def test_a_tool_reaches_to_its_end_behind_what_the_template_writes_before(self) -> None:
        tools = [{"name": "t", "cache_control": EPHEMERAL}, {"name": "u"}]
        assert marked_tokens(read(system="a b", tools=tools)) == [3 + 3]

    def test_a_block_of_a_turn_reaches_to_its_end(self) -> None:
        turns = [user(text("a b", EPHEMERAL), text("c"))]
        assert marked_tokens(read(messages=turns)) == [1 + 1 + 2]

    def test_a_block_of_an_answer_reaches_to_its_end(self) -> None:
        turns = [user(text("a")), assistant(text("b c", EPHEMERAL)), user(text("d"))]
        assert marked_tokens(read(messages=turns)) == [1 + 2 + 3]

    def test_a_part_of_a_tools_result_reaches_to_its_end(self) -> None:
        result = {"type": "tool_result", "tool_use_id": "1", "content": [text("a b", EPHEMERAL), text("c")]}
        request = read(messages=[user(result)])
        assert marked_tokens(request) == [1 + 1 + 2]
        assert request.body["messages"][0]["content"][0]["content"] == [text("a b"), text("c")]

    def test_four_reach_one_beyond_the_other(self) -> None:
        request = read(
            tools=[{"name": "t", "cache_control": LONG}],
            system=[text("a b", LONG)],
            messages=[user(text("c", EPHEMERAL)), assistant(text("d")), user(text("e", EPHEMERAL), text("f"))],
        )
        places = marked_tokens(request)
        assert places == sorted(set(places))
        assert [marker.ttl_s for marker in request.markers] == [3600, 3600, 300, 300]


class TestAutomatic:
    """The marker at the top level stands on the last block that can be marked."""

    def test_of_the_last_turn(self) -> None:
        request = read(cache_control=EPHEMERAL, system="a b", messages=[{"role": "user", "content": "c d"}])
        assert marked_tokens(request) == [len(words(request)) - 1]
        assert "cache_control" not in request.body

    def test_behind_empty_text_and_reasoning(self) -> None:
        thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
        turns = [user(text("a b")), assistant(thinking, text(""))]
        assert marked_tokens(read(cache_control=EPHEMERAL, messages=turns)) == [1 + 1 + 2]

    def test_is_the_same_as_one_on_that_block(self) -> None:
        request = read(cache_control=EPHEMERAL, messages=[user(text("a", EPHEMERAL))])
        assert len(request.markers) == 1

    def test_of_the_system_without_turns(self) -> None:
        assert len(read(cache_control=LONG, system=[text("a")], messages=[]).markers) == 1

    def test_marks_nothing_when_nothing_can_be_marked(self) -> None:
        assert read_messages_request(body(cache_control=EPHEMERAL, messages=[])) is None


class TestRefused:
    """What the hosted API refuses, in its words."""

    @pytest.mark.parametrize(
        ("fields", "problem"),
        [
            ({"cache_control": "5m"}, "cache_control: Input should be an object"),
            ({"cache_control": {}}, "cache_control.type: Input should be 'ephemeral'"),
            ({"cache_control": {"type": "permanent"}}, "cache_control.type: Input should be 'ephemeral'"),
            ({"cache_control": EPHEMERAL | {"ttl": 300}}, "cache_control.ttl: Input should be '5m' or '1h'"),
            ({"cache_control": EPHEMERAL | {"x": 1}}, "cache_control.x: Extra inputs are not permitted"),
            (
                {"tools": [{"name": "t", "cache_control": {"type": "ephemeral", "ttl": "24h"}}]},
                "tools.0.cache_control.ttl: Input should be '5m' or '1h'",
            ),
            (
                {"messages": [user(text("", EPHEMERAL))]},
                "messages.0.content.0.text: cache_control cannot be set for empty text blocks",
            ),
            (
                {"messages": [assistant({"type": "thinking", "thinking": "hm", "cache_control": EPHEMERAL})]},
                "messages.0.content.0.thinking.cache_control: Extra inputs are not permitted",
            ),
            (
                {"messages": [user(*[text("a", EPHEMERAL)] * 5)]},
                "A maximum of 4 blocks with cache_control may be provided. Found 5.",
            ),
            (
                {"system": [text("a", EPHEMERAL)], "messages": [user(text("b", LONG))]},
                "messages.0.content.0.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m' "
                "cache_control block. Note that blocks are processed in the following order: `tools`, `system`, "
                "`messages`.",
            ),
            (
                {"cache_control": LONG, "messages": [user(text("a", EPHEMERAL))]},
                "cache_control.ttl: differs from the ttl of the cache_control on the last block",
            ),
            (
                {"cache_control": EPHEMERAL, "messages": [user(*[text("a", EPHEMERAL)] * 4, text("b"))]},
                "cache_control: no breakpoint is left: 4 blocks have a cache_control of their own",
            ),
            (
                {"max_tokens": 0, "stream": True},
                "max_tokens: 0 pre-warms the cache and cannot be combined with stream",
            ),
            (
                {"max_tokens": 0, "tool_choice": {"type": "any"}},
                "max_tokens: 0 pre-warms the cache and cannot be combined with tool_choice",
            ),
        ],
    )
    def test_names_the_field(self, fields: dict[str, Any], problem: str) -> None:
        with pytest.raises(MarkerError) as refused:
            read_messages_request(body(**fields))
        assert str(refused.value) == problem


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": None},
        {"messages": [1, "x", {"role": "user"}]},
        {"messages": [user(7, None, {"type": "text"})]},
        {"messages": [{"role": "user", "content": {"cache_control": 1}}]},
        {"tools": {"cache_control": 1}, "system": 5},
    ],
)
def test_malformed_requests_are_left_to_vllm(fields: dict[str, Any]) -> None:
    assert read_messages_request(body(**fields)) is None


def test_a_rendering_has_all_that_decides_the_prompt_and_nothing_else() -> None:
    fields = {"temperature": 0.5, "stream": True, "cache_salt": "s", "chat_template_kwargs": {"a": 1}, "unknown": 2}
    request = read(cache_control=EPHEMERAL, thinking={"type": "enabled", "budget_tokens": 1024}, **fields)
    assert request.body.keys() >= fields.keys()
    for variant in request.markers[0].variants:
        assert variant.keys() == {"model", "messages", "max_tokens", "mm_payload", "chat_template_kwargs", "unknown"}
