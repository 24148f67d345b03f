"""What opens user turns, learnt from templates whose tokens are words."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.core.tokens import common_prefix
from kvtier_connector.discovery import user_turn
from kvtier_connector.discovery.chat_rendering import NoUserTurnError
from kvtier_connector.discovery.user_turn import common_suffix, find_run, learn_user_turn

Render = Callable[[str | None, list[str], bool], list[str]]


class WordChat:
    """A chat template whose tokens are words, or letters of what people write."""

    template = ""

    def __init__(self, render: Render, special: Sequence[str] = ()) -> None:
        self._render = render
        self._words: list[str] = []
        self.special_tokens = frozenset(self._encode(special))

    def _encode(self, words: Sequence[str]) -> list[int]:
        for word in words:
            if word not in self._words:
                self._words.append(word)
        return [self._words.index(word) for word in words]

    def render(self, messages: Sequence[dict[str, str]], *, with_tools: bool = False) -> list[int]:
        system = next((each["content"] for each in messages if each["role"] == "system"), None)
        texts = [each["content"] for each in messages if each["role"] != "system"]
        return self._encode(self._render(system, texts, with_tools))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._words[token] for token in tokens)


def learn(render: Render, *special: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the words that open the first user turn, and what is remarked."""
    chat: Any = WordChat(render, special)
    turn = learn_user_turn(chat)
    return [chat.decode([token]) for token in turn.opening], turn.remarks


def turns(*opening: str) -> Render:
    """Return a template that puts these words before each text of a user."""

    def render(system: str | None, texts: list[str], with_tools: bool) -> list[str]:
        tools = ["TOOLS"] if with_tools else []
        return ["BEGIN", *tools, *(system or ""), *(word for text in texts for word in (*opening, *text))]

    return render


@pytest.mark.parametrize("opening", [["USER", "SAYS"], ["USER", " ", "SAYS"], ["A", "B", "C"]])
def test_two_visible_words_are_distinct(opening: list[str]) -> None:
    assert learn(turns(*opening)) == (opening, ())


def test_one_visible_word_may_stand_in_other_text() -> None:
    with pytest.raises(NoUserTurnError, match="'\\\\nUSER ', may also stand in other text"):
        learn(turns("\n", "USER", " "))


def test_one_special_token_is_distinct() -> None:
    assert learn(turns("<user>"), "<user>") == (["<user>"], ())
    assert learn(turns("\n", "<user>"), "<user>", "<other>") == (["\n", "<user>"], ())


def test_no_more_than_the_last_words_of_a_long_opening_are_searched() -> None:
    words = [f"word{number}" for number in range(40)]
    assert learn(turns(*words))[0] == words[-user_turn.MAX_OPENING_TOKENS :]


def test_what_ends_the_system_turn_does_not_open_a_turn_without_one() -> None:
    def render(system: str | None, texts: list[str], with_tools: bool) -> list[str]:
        return [*([*system, "END"] if system is not None else []), "USER", "SAYS", *texts[0]]

    assert learn(render)[0] == ["USER", "SAYS"]


def test_where_every_prompt_has_a_system_turn_its_end_is_a_part_of_the_opening() -> None:
    def render(system: str | None, texts: list[str], with_tools: bool) -> list[str]:
        return [*(system or "Help."), "END", "USER", "SAYS", *texts[0]]

    assert learn(render)[0] == ["END", "USER", "SAYS"]


def test_what_tools_change_is_not_a_part_of_the_opening() -> None:
    def render(system: str | None, texts: list[str], with_tools: bool) -> list[str]:
        return [*(system or "Help."), *(["T", "1"] if with_tools else ["END"]), "USER", "SAYS", *texts[0]]

    assert learn(render) == (["USER", "SAYS"], ())


@pytest.mark.parametrize("place", ["behind", "last"])
def test_tools_that_are_not_before_the_first_turn_are_remarked(place: str) -> None:
    def render(system: str | None, texts: list[str], with_tools: bool) -> list[str]:
        words = [*(system or "")]
        for number, text in enumerate(texts):
            tools = ["T", "1", "2"] if with_tools and number == len(texts) - 1 else []
            words += ["USER", "SAYS", *tools, *text] if place == "behind" else [*tools, "USER", "SAYS", *text]
        return words

    opening, remarks = learn(render)
    assert opening == ["USER", "SAYS"]
    (remark,) = remarks
    assert ("into the user turn" if place == "behind" else "before the last user turn") in remark


def test_a_model_that_takes_no_tools_has_none_to_remark() -> None:
    def render(system: str | None, texts: list[str], with_tools: bool) -> list[str]:
        if with_tools:
            raise ValueError("no tools")
        return turns("USER", "SAYS")(system, texts, False)

    assert learn(render) == (["USER", "SAYS"], ())


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("error", [TimeoutError("late"), NoUserTurnError("too much")])
def test_what_ends_learning_is_not_taken_for_a_template_that_refuses(error: Exception, with_tools: bool) -> None:
    def render(system: str | None, texts: list[str], tools: bool) -> list[str]:
        if system is not None and tools is with_tools:
            raise error
        return turns("USER", "SAYS")(system, texts, tools)

    if with_tools and isinstance(error, NoUserTurnError):
        assert learn(render)[0] == ["USER", "SAYS"], "it takes no tools"
        return
    with pytest.raises(type(error), match=str(error)):
        learn(render)


def test_renderings_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(user_turn, "time", SimpleNamespace(monotonic=lambda: now_s))
    render = turns("USER", "SAYS")

    def render_slowly(system: str | None, texts: list[str], with_tools: bool) -> list[str]:
        nonlocal now_s
        now_s += 1.0
        return render(system, texts, with_tools)

    with pytest.raises(TimeoutError, match="longer than 15 s"):
        learn(render_slowly)
    assert now_s == 100.0 + 16, "the last one began when 15 s were over"


@pytest.mark.parametrize(
    ("lists", "prefix", "suffix"),
    [
        ([[1, 2, 3]], [1, 2, 3], [1, 2, 3]),
        ([[1, 2, 3], [1, 2]], [1, 2], []),
        ([[2, 3], [1, 2, 3]], [], [2, 3]),
        ([[1, 2, 9, 3], [1, 2, 3], [1, 2, 2, 3]], [1, 2], [3]),
        ([[1, 2], []], [], []),
        ([[7, 1, 7], [7, 2, 7], [8, 1, 7]], [], [7]),
    ],
)
def test_what_lists_have_in_common(lists: list[list[int]], prefix: list[int], suffix: list[int]) -> None:
    assert common_prefix(lists) == prefix
    assert common_suffix(lists) == suffix


@pytest.mark.parametrize(
    ("tokens", "at"), [([1, 2, 3], 0), ([1, 2, 1, 2, 3], 2), ([1, 2, 3, 1, 2, 3], 0), ([1, 2], 2), ([], 0), ([3, 2], 2)]
)
def test_a_run_is_found_where_it_first_begins(tokens: list[int], at: int) -> None:
    assert find_run(tokens, [1, 2, 3]) == at
