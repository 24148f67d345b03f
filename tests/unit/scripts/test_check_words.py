"""scripts/check_words.py: what it finds, what it leaves alone, and that the numbers of the baseline only fall."""

import tomllib
from collections.abc import Sequence

import pytest
from check_words import ROOT, Finding, Rules, lowered, over_baseline

_RULES = Rules(tomllib.loads((ROOT / "scripts" / "words.toml").read_text()))


def found(path: str, *lines: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.found) for finding in _RULES.findings(path, "\n".join(lines) + "\n")]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("spare_rows = 1", "spare rows"),
        ("class SpareRows: ...", "Spare Rows"),
        ("def find_room(): ...", "room"),
        ('raise Error("nobody listens")', "nobody"),
        ("x = 1  # it lets go of the row", "lets go"),
        ('"""Wait for word of the daemon."""', "word of the"),
        ("appraiser = Appraiser()", "Appraiser"),
        ("OTHERS_OWN_HIT = 1", "OWN HIT"),
        ("x = 1  # not any more.", "any more"),
    ],
)
def test_names_comments_and_strings_of_python_are_searched(line: str, word: str) -> None:
    assert found("kvtier/a.py", "", line) == [(2, word)]


@pytest.mark.parametrize(
    "line",
    [
        "headroom_bytes = 1",
        "own_cache_salt = 1",
        "x = 1  # a read gives up to 4 MiB",
        "let_it_go_on()  # it lets go on",
        "x = 1  # are there any more bytes?",
        "word = self.read(4)  # a word of 64 bits is read",
        "x = 1  # an ordinary zstd frame",
        "x = 1  # the fate of a patient",
        "x = 1  # Bold, retold",
    ],
)
def test_plain_english_is_left_alone(line: str) -> None:
    assert found("kvtier/a.py", line) == []


def test_a_phrase_is_found_over_the_end_of_a_line_of_a_comment() -> None:
    assert found("kvtier/a.py", "x = 1", "    # it gives", "    # up the row") == [(2, "gives up")]


def test_the_name_of_a_module_is_searched() -> None:
    assert found("kvtier/service/find_room.py", "x = 1") == [(0, "room")]


def test_code_in_markdown_is_not_searched() -> None:
    lines = ("Say `nobody listens`.", "", "```", "nobody", "```", "[a](nobody.md), ``ro`om``", "But nobody here.")
    assert found("docs/a.md", *lines) == [(7, "nobody")]


def test_words_in_a_comment_of_settings_are_found_and_names_are_not() -> None:
    assert found("configs/a.yml", "# nobody", "expr: kvtier_room_bytes > 1", "summary: no room") == [
        (1, "nobody"),
        (3, "room"),
    ]


def test_what_is_generated_is_not_searched() -> None:
    assert found("docs/cli.md", "<!-- Written by scripts/gen_docs.py from the code. -->", "nobody " * 30) == []
    assert found("kvtier/_pb/a.py", "nobody") == []


_LONG = "word " * 24 + "words"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("x" * 119,), []),
        ((_LONG,), [(1, "125 columns")]),
        (("```", _LONG, "```"), [(2, "125 columns")]),
        (("| " + _LONG + " |",), []),
        (("- https://example.org/" + "x" * 120,), []),
        (("see https://example.org/" + "x" * 120,), [(1, "144 columns")]),
    ],
)
def test_lines_end_at_120_columns(lines: Sequence[str], expected: list[tuple[int, str]]) -> None:
    assert found("docs/a.md", *lines) == expected


def findings(*paths: str) -> list[Finding]:
    return [Finding(path, 1, "nobody", "no one") for path in paths]


def test_a_folder_may_have_what_the_baseline_says_and_no_more() -> None:
    two = findings("docs/a.md", "docs/adr/b.md")
    assert over_baseline(two, {"docs": 2}) == []
    assert over_baseline(two, {"docs": 1}) == two
    assert over_baseline(findings("README.md"), {"docs": 1}) == findings("README.md")
    assert over_baseline(findings("README.md"), {".": 1}) == []


def test_the_baseline_only_falls() -> None:
    assert lowered(findings("docs/a.md", "kvtier/a.py", "kvtier/b.py", "kvtier/c.py"), {"docs": 4, "kvtier": 2}) == {
        "docs": 1,
        "kvtier": 2,
    }
    assert lowered([], {"docs": 4}) == {}
