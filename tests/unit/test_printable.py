"""What is shown of text that others wrote."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.printable import printable, printable_json, shown_url, shown_value

ANY_TEXT = st.text(st.characters(exclude_categories=()))
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | ANY_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
    max_leaves=10,
)


@given(ANY_TEXT)
def test_one_line_that_no_terminal_obeys(text: str) -> None:
    shown = printable(text)
    assert all(unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    assert {c for c in shown if unicodedata.category(c) == "Cf"} <= {"\u200c", "\u200d"}
    if text.isprintable():
        assert shown == text


def test_words_of_every_language_are_left_as_they_are() -> None:
    words = "größer 東京\u3000\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 👩\u200d💻"
    assert printable(words) == words
    assert printable("\x1b\x9b\x7f\n\u202e\ud800") == r"\x1b\x9b\x7f\n\u202e\ud800"


def test_what_is_endless_is_cut() -> None:
    assert printable("a" * 1_000_000) == "a" * 4000 + "… (1000000 characters)"


@given(ANY_JSON, st.sampled_from([None, 2]), st.booleans())
def test_json_is_exact_and_printable(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = printable_json(value, indent=indent, ascii_only=ascii_only)
    assert json.loads(text) == value
    assert printable(text.replace("\n", ""), len(text)) == text.replace("\n", "")
    assert not ascii_only or text.isascii()


def test_what_json_has_no_number_for_is_null() -> None:
    assert printable_json([float("nan"), {"a": float("inf"), "b": 1.5}]) == '[null, {"a": null, "b": 1.5}]'


@given(st.integers() | st.floats() | ANY_TEXT | st.binary() | ANY_JSON)
def test_values_are_short_and_printable(value: object) -> None:
    shown = shown_value(value)
    assert shown.isprintable()
    assert len(shown) < 10_000


def test_values_that_repr_cannot_show() -> None:
    deep: dict[str, Any] = {}
    inner = deep
    for _ in range(100_000):
        inner["a"] = inner = {}
    assert shown_value(deep).endswith("{...}}}}}}}")
    assert shown_value(1 << 100_000) == "<a number of 100001 bits>"
    assert shown_value("socket") == "'socket'"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("https://user:secret@host:1/x", "https://***@host:1/x"),
        ("HTTP://secret@host", "HTTP://***@host"),
        ("http://user:sec/ret@host", "http://***@host"),
        ("http://user:sec@ret@[::1", "http://***@[::1"),
        ("user:secret@host:8000", "***@host:8000"),
        ("//user:secret@host", "//***@host"),
        ("http://user:sec\nret@host", "http://***@host"),
        ("http://host/?key=secret#secret", "http://host/"),
    ],
)
def test_urls_are_shown_without_what_is_secret(url: str, shown: str) -> None:
    assert shown_url(url) == shown
