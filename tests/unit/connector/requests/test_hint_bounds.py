"""What a KV hint may say, at the exact bounds of each field, and what of it is carried out."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.core import limits
from kvtier.core.requests.request_instructions import DEFAULT_TTL_S
from kvtier_connector.requests.kv_hints import MAX_ACTIONS, MAX_RANGES, Action, Hint, HintedPrefix, read_hints

LEAST, MOST = limits.PREFIX_TOKENS.least, limits.PREFIX_TOKENS.most


def read(kind: Any, payload: Any, version: Any = "1.0", protocol: Any = "0.1") -> Hint:
    action = SimpleNamespace(action_type=kind, payload=payload, action_version=version)
    (hint,) = read_hints(SimpleNamespace(protocol_version=protocol, actions=[action]))
    return hint


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("kv.pin", Action.PIN),
        ("kv.demote", Action.DEMOTE),
        ("pin", Action.OTHER),
        ("kv.other", Action.OTHER),
        ("kv.evict", Action.OTHER),
        ("kv." + "x" * 100, Action.OTHER),
        (7, Action.OTHER),
    ],
)
def test_an_action_is_known_by_its_whole_name(kind: Any, action: Action) -> None:
    hint = read(kind, {})
    assert hint.action is action
    assert bool(hint.problem) is (action is Action.OTHER)


@pytest.mark.parametrize("version", ["0", "1", "0.9", "1.2.3"])
def test_major_versions_0_and_1_are_known(version: str) -> None:
    assert read("kv.pin", {}, version, version).problem == ""


@pytest.mark.parametrize(("version", "protocol"), [("2", "0.1"), ("1", "2.0"), (1, "1"), ("1", None), ("", "1")])
def test_other_versions_are_not(version: Any, protocol: Any) -> None:
    hint = read("kv.pin", {}, version, protocol)
    assert "kvtier knows major versions 0 and 1" in hint.problem
    assert hint.prefixes == ()


@pytest.mark.parametrize("kind", ["kv.pin", "kv.retain", "kv.prefetch", "kv.demote"])
@pytest.mark.parametrize("field", ["duration", "priority", "directives", "end"])
def test_each_action_has_its_own_fields(kind: str, field: str) -> None:
    """Ranges are retained only; what is prefetched or demoted has no end in time and no priority."""
    payload = {"duration": 60, "priority": 3, "end": LEAST, "directives": [{"end": LEAST}]}
    hint = read(kind, {field: payload[field]})
    has_ttl = kind in ("kv.pin", "kv.retain")
    expected = {"duration": has_ttl, "priority": has_ttl, "directives": kind == "kv.retain", "end": True}
    assert (hint.problem == "") is expected[field]


@pytest.mark.parametrize(("kind", "is_clipped"), [("kv.pin", True), ("kv.retain", True), ("kv.prefetch", False)])
def test_what_has_no_end_in_time_is_clipped_where_it_would_have_one(kind: str, is_clipped: bool) -> None:
    assert read(kind, {}) == Hint(action=Action(kind[3:]), prefixes=(HintedPrefix(),), is_clipped=is_clipped)
    assert HintedPrefix().ttl_s == DEFAULT_TTL_S


@pytest.mark.parametrize(("end", "is_taken"), [(LEAST - 1, False), (LEAST, True), (MOST, True), (MOST + 1, False)])
def test_an_end_is_a_number_of_tokens(end: int, is_taken: bool) -> None:
    hint = read("kv.demote", {"end": end})
    assert hint.prefixes == ((HintedPrefix(end=end),) if is_taken else ())
    assert hint.is_clipped is False


@pytest.mark.parametrize(
    ("duration", "ttl_s"),
    [
        (0, None),
        (0.001, 1),
        (1, 1),
        (1.5, 2),
        (limits.TTL_S.most, limits.TTL_S.most),
        (limits.TTL_S.most + 1, None),
        (True, None),
        ("60", None),
        (float("nan"), None),
        (-1, None),
    ],
)
def test_a_duration_is_rounded_up_to_seconds(duration: Any, ttl_s: int | None) -> None:
    hint = read("kv.pin", {"duration": duration})
    assert [prefix.ttl_s for prefix in hint.prefixes] == ([] if ttl_s is None else [ttl_s])
    assert ("payload.duration" in hint.problem) is (ttl_s is None)


@pytest.mark.parametrize(("count", "is_taken"), [(0, False), (1, True), (MAX_RANGES, True), (MAX_RANGES + 1, False)])
def test_a_retain_action_has_a_bounded_number_of_ranges(count: int, is_taken: bool) -> None:
    hint = read("kv.retain", {"directives": [{"end": LEAST, "duration": 9}] * count})
    assert len(hint.prefixes) == (count if is_taken else 0)
    assert hint.is_clipped is False


@pytest.mark.parametrize(
    ("ranges", "num_prefixes", "is_clipped"),
    [
        ([{"duration": 9}], 1, False),
        ([{"duration": 9}, {}], 2, True),
        ([{}, {"duration": 9}], 2, True),
        ([{"duration": 9}, {"covers_output": True}], 1, True),
        ([{"duration": 9, "covers_output": False}], 1, False),
        ([{"covers_output": True}], 0, False),
        ([7], 0, False),
        ({"duration": 9}, 0, False),
        ([{"start": -1, "duration": 9}], 0, False),
        ([{"start": 0, "duration": 9, "priority": 2}], 1, False),
    ],
)
def test_ranges_of_the_prompt_are_kept_and_what_is_generated_is_not(
    ranges: Any, num_prefixes: int, is_clipped: bool
) -> None:
    hint = read("kv.retain", {"directives": ranges, "scope": "x"})
    assert (len(hint.prefixes), hint.is_clipped, bool(hint.problem)) == (num_prefixes, is_clipped, not num_prefixes)


@pytest.mark.parametrize("payload", [None, [], 7])
def test_a_payload_is_an_object(payload: Any) -> None:
    assert "must be an object" in read("kv.pin", payload).problem


@pytest.mark.parametrize("num_more", [0, 1])
def test_as_many_actions_as_allowed_are_read_and_that_there_were_more_is_said(num_more: int) -> None:
    action = SimpleNamespace(action_type="kv.pin", payload={}, action_version="1")
    actions = [action] * (MAX_ACTIONS + num_more)
    hints = list(read_hints(SimpleNamespace(protocol_version="1", actions=actions)))
    assert [hint.action for hint in hints] == [Action.PIN] * MAX_ACTIONS + [Action.OTHER] * num_more
    assert all(f"has {MAX_ACTIONS + 1} actions" in hint.problem for hint in hints[MAX_ACTIONS:])
