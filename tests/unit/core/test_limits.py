"""Bounds of what comes from outside: the last value that is taken, and the first that is refused."""

from typing import Any

import pytest

from kvtier.core import limits
from kvtier.core.layout import KVLayout, suffix_of
from kvtier.errors import InvalidArgumentError
from tests.fakes.chunks import key_of, layout_of

WHOLES = {
    "token": (limits.TOKEN, 0, 4_294_967_295),
    "ttl": (limits.TTL_S, 0, 3_153_600_000),
    "priority": (limits.PRIORITY, -100, 100),
    "key bytes": (limits.KEY_BYTES, 5, 64),
    "model names": (limits.NUM_MODEL_NAMES, 1, 256),
    "fingerprint fields": (limits.NUM_FINGERPRINT_FIELDS, 1, 64),
    "ranks": (limits.NUM_RANKS, 1, 1024),
    "groups": (limits.NUM_GROUPS, 1, 256),
    "group": (limits.GROUP_IDX, 0, 65_535),
    "chunk tokens": (limits.CHUNK_TOKENS, 1, 1_048_576),
}


@pytest.mark.parametrize(("bound", "least", "most"), WHOLES.values(), ids=WHOLES)
def test_a_whole_number_is_taken_up_to_both_bounds(bound: limits.Whole, least: int, most: int) -> None:
    assert [bound.check("field", value) for value in (least, most)] == [least, most]
    for value in (least - 1, most + 1):
        with pytest.raises(InvalidArgumentError, match=f"field = .*use {least} to {most}"):
            bound.check("field", value)


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [1]], ids=repr)
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a whole number"):
        limits.Whole(0, 10).check("field", value)


def test_the_length_of_text_is_that_in_utf8() -> None:
    text = limits.Text(4)
    for good in ("", "abcd", "öö", "\N{OLD ITALIC LETTER A}"):
        assert text.check("field", good) == good
    for long, num_bytes in (("abcde", 5), ("ööa", 5), ("ööö", 6)):
        with pytest.raises(InvalidArgumentError, match=f"has {num_bytes} bytes, at most 4"):
            text.check("field", long)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (b"abc", "must be text"),
        (None, "must be text"),
        ("a\ud800", "UTF-8 cannot say"),
        ("a\0", "NUL"),
        ("", "must not be empty"),
    ],
    ids=repr,
)
def test_what_is_no_usable_text_is_refused(value: object, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        limits.Text(4, may_be_empty=False).check("field", value)


@pytest.mark.parametrize("name", ["a", "Z9", "0", "a._/@-b", "a" * 128, "auto-1"])
def test_a_name_of_letters_digits_and_some_signs_is_taken(name: str) -> None:
    assert limits.is_name(name)
    assert limits.check_name(name) == name


@pytest.mark.parametrize("name", ["", "a" * 129, "-a", ".a", "_a", "/a", "a b", "a\n", "ö", "a:b", None, 5, b"a"])
def test_another_name_is_refused(name: object) -> None:
    assert not limits.is_name(name)
    with pytest.raises(InvalidArgumentError, match="use 1 to 128 letters") as refused:
        limits.check_name(name)
    assert refused.value.field == "name"


def test_names_of_automatic_pins_are_not_chosen() -> None:
    for name in ("auto", "automatic", "my-auto-1", "Auto-1"):
        limits.check_chosen_name("field", name)
    with pytest.raises(InvalidArgumentError, match="automatic pins") as refused:
        limits.check_chosen_name("field", "auto-1")
    assert refused.value.field == "field"


def test_an_owner_is_a_digest_or_empty() -> None:
    for owner in ("", "0123456789abcdef"):
        assert limits.check_owner("field", owner) == owner
    for wrong in ("0123456789abcde", "0123456789abcdef0", "0123456789abcdeF", "0123456789abcdeg", " ", None, 0, b""):
        with pytest.raises(InvalidArgumentError, match="16 hex digits"):
            limits.check_owner("field", wrong)


def test_the_digest_of_a_prefix_has_16_bytes() -> None:
    assert limits.check_digest("field", bytes(range(16))) == bytes(range(16))
    for num_bytes in (0, 15, 17):
        with pytest.raises(InvalidArgumentError, match=f"{num_bytes} bytes.*digest of 16"):
            limits.check_digest("field", bytes(num_bytes))


def test_a_list_may_have_as_many_items_as_its_bound() -> None:
    for num_items in (0, 2, 3):
        limits.check_count("field", num_items, 3)
    with pytest.raises(InvalidArgumentError, match=r"4 of them.*at most 3"):
        limits.check_count("field", 4, 3)


def test_a_key_has_a_hash_and_a_group_of_the_namespace() -> None:
    for num_bytes in (1, 60):
        for group_idx in (3, 256):
            limits.check_key("field", bytes(num_bytes) + suffix_of(group_idx), {3, 256})
    for num_bytes in (0, 61):
        with pytest.raises(InvalidArgumentError, match=f"has {num_bytes + 4} bytes, .* have 5 to 64"):
            limits.check_key("field", bytes(num_bytes) + suffix_of(3), {3, 256})
    for group_idx in (0, 1, 2, 4, 3 << 8, 3 << 24):
        with pytest.raises(InvalidArgumentError, match=r"group suffix must be one of \[3, 256\]"):
            limits.check_key("field", bytes(32) + suffix_of(group_idx), {256, 3})


def test_keys_of_a_prompt_are_of_one_length_and_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, keys = layout_of(), [key_of(0), key_of(1), key_of(0, 1)]
    monkeypatch.setattr(limits, "MAX_KEYS", 3)
    limits.check_keys("field", keys[:1], layout)
    limits.check_keys("field", keys, layout)
    for wrong, match in (
        ([], "at least one chunk"),
        ([*keys, key_of(2)], "4 of them.*at most 3"),
        ([keys[0], keys[1], keys[0]], "may come once"),
        ([keys[0], key_of(0, 2)], "group suffix"),
        ([keys[0], bytes(8)], r"\[8, 36\].*one length"),
        ([keys[0], bytes(4)], "has 4 bytes"),
    ):
        with pytest.raises(InvalidArgumentError, match=match):
            limits.check_keys("field", wrong, layout)


def test_the_fields_of_a_fingerprint_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FINGERPRINT_BYTES", limits.Whole(1, 10))
    for fields in ({"a": "x" * 10}, {"a": "öö", "b": "x" * 6}, {"a": "", "b": "x" * 10, "c": ""}):
        assert limits.check_fingerprint("field", fields) == fields
    for fields, match in (
        ({}, "number of field fields"),
        ({"a": "x" * 11}, r"field\.a = .*at most 10"),
        ({"a": "ööö", "b": "x" * 5}, r"field\.b = .*at most 4"),
        ({"a": "x" * 5, "b": "x" * 5, "c": "x"}, r"field\.c = .*at most 0"),
        ({"": "x"}, "name in field"),
    ):
        with pytest.raises(InvalidArgumentError, match=match):
            limits.check_fingerprint("field", fields)
    assert len(limits.check_fingerprint("field", {str(number): "" for number in range(64)})) == 64
    with pytest.raises(InvalidArgumentError, match="number of field fields = 65"):
        limits.check_fingerprint("field", {str(number): "" for number in range(65)})


SIZES = {"num_ranks": 2, "rank_bytes": 100, "num_writers": 1}


def group(group_idx: int, **changes: Any) -> dict[str, object]:
    return {"group_idx": group_idx, "chunk_tokens": 16, "useful_bytes": 50, "window_chunks": 2} | changes


def test_a_layout_is_read_ordered_by_group() -> None:
    layout = limits.read_layout("field", SIZES, [group(5), group(0, useful_bytes=100, window_chunks=0)])
    assert isinstance(layout, KVLayout)
    assert (layout.num_ranks, layout.rank_bytes, layout.num_writers) == (2, 100, 1)
    assert layout.group_indexes() == [0, 5]
    assert [(each.chunk_tokens, each.useful_bytes, each.window_chunks) for each in layout.groups] == [
        (16, 100, 0),
        (16, 50, 2),
    ]


@pytest.mark.parametrize(
    ("sizes", "groups", "match"),
    [
        (SIZES, [], "number of field.groups = 0"),
        (SIZES, [group(0), group(1), group(0)], "each group may come once"),
        ({"num_ranks": 2, "rank_bytes": 100}, [group(0)], "has the fields num_ranks, rank_bytes, num_writers"),
        (SIZES | {"more": 1}, [group(0)], "has the fields"),
        (SIZES | {"num_ranks": 0}, [group(0)], r"field\.num_ranks = "),
        (SIZES, [{"group_idx": 0}], r"field\.groups = .*has the fields group_idx"),
        (SIZES, [group(0, chunk_tokens=0)], r"field\.groups\.chunk_tokens = "),
        (SIZES, [group(0, useful_bytes=101)], "useful_bytes"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_field(sizes: Any, groups: Any, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        limits.read_layout("field", sizes, groups)
