"""Learns from the chat template which tokens open a conversation's first user turn."""

import datetime
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.core.tokens import common_prefix
from kvtier_connector.discovery.chat_rendering import ChatRenderer, Message, NoUserTurnError
from kvtier_connector.discovery.template_dates import date_end

LEARNING_TIMEOUT_S = 15.0
"""Some 80 short renderings take 0.1 to 0.5 s."""
MAX_OPENING_TOKENS = 16
"""What stands further before the user's text may be a constant that the template writes into the system turn."""
_SYSTEM_TEXTS = (
    "You answer questions about the weather.",
    "Be brief, and friendly",
    "First rule\nSecond rule\n",
    "The number is 7",
    "请用中文回答",
    "Say what you know (and no more)",
    "Ends in blanks  ",
    "Ends in lines\n\n",
)
"""They end in different ways: a token that is the same behind all of them is the template's."""
_USER_TEXTS = (
    "Hello there",
    "what is this?",
    " behind a blank",
    "  behind two",
    "\non a line further down",
    "\n\ntwo lines further down",
    "\n  on a line that is indented",
    "\tbehind a tab",
    "7 apples",
    "你好世界",
    "(in brackets)",
    '"quoted"',
)
"""They begin in different ways: a token that is the same before all of them is the template's."""


@dataclass(frozen=True)
class UserTurn:
    """What opens the first user turn, and what the operator should know of the template.

    Attributes:
        opening: Tokens that stand before every first user text and nowhere before them; a system prompt ends there.
        remarks: Sentences for the log.
    """

    opening: tuple[int, ...]
    remarks: tuple[str, ...] = ()


def learn_user_turn(chat: ChatRenderer) -> UserTurn:
    """Render conversations with different texts, and return what is the same in all of them.

    Raises:
        NoUserTurnError: The template has no such tokens; the error says why.
        TimeoutError: It takes too long.
    """
    return _Probes(chat).learn()


def common_suffix(lists: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens with which all end."""
    return common_prefix([each[::-1] for each in lists])[::-1]


def find_run(tokens: list[int], run: list[int]) -> int:
    """Return where a run of tokens first begins; the length when it is not there."""
    length = len(run)
    found = (at for at, token in enumerate(tokens) if token == run[0] and tokens[at : at + length] == run)
    return next(found, len(tokens))


class _Probes:
    """What a template makes of the texts above, up to where the user's text begins."""

    def __init__(self, chat: ChatRenderer) -> None:
        self._chat = chat
        self._deadline_s = time.monotonic() + LEARNING_TIMEOUT_S
        self._began_on = datetime.date.today()
        self.bare = self._before_user(None)
        self.plain = self._with_systems()
        self.with_tools = self._with_systems_and_tools()

    def learn(self) -> UserTurn:
        chat = self._chat
        if len({tuple(each) for each in self.plain}) == 1:
            raise NoUserTurnError("the chat template leaves system messages out")
        run = common_suffix(self.plain)[-MAX_OPENING_TOKENS:]
        if not chat.decode(run).strip():
            return self._of_tools_only()
        # The shortest comes first. Without what ends the system turn it also opens a conversation that has none: so it
        # is known that there is no system prompt.
        for others in ([self.bare, *self.with_tools], [self.bare], self.with_tools, []):
            opening = common_suffix([run, *others])
            if self._opens(opening, self.plain) and all(
                find_run(each, opening) < len(each) for each in self.with_tools
            ):
                return UserTurn(tuple(opening), (*self._date_remarks(), *self._tools_remarks(opening)))
        raise NoUserTurnError(f"what opens user turns, {chat.decode(run)!r}, may also stand in other text")

    def _of_tools_only(self) -> UserTurn:
        """The system text is a part of the user turn; what stands before it can only be tools."""
        folded = "the chat template puts the system text into the user turn"
        tools = self._before_user(None, with_tools=True) if self.with_tools else self.bare
        opening = common_suffix([self.bare, tools])[-MAX_OPENING_TOKENS:]
        if len(tools) <= len(self.bare) or not self._opens(opening, [self.bare, tools]):
            raise NoUserTurnError(folded)
        return UserTurn(tuple(opening), (f"{folded}, so only tools are found before it", *self._date_remarks()))

    def _opens(self, opening: list[int], prompts: Sequence[list[int]]) -> bool:
        """Return whether texts cannot contain it, and whether it first occurs before the user's text."""
        return self._is_distinct(opening) and all(
            find_run(tokens, opening) == len(tokens) - len(opening) for tokens in prompts
        )

    def _is_distinct(self, opening: Sequence[int]) -> bool:
        if not self._chat.special_tokens.isdisjoint(opening):
            return True
        return sum(bool(self._chat.decode([token]).strip()) for token in opening) >= 2

    def _date_remarks(self) -> Iterator[str]:
        """Say where a template writes today's date: it may be tomorrow's by now."""
        for tokens, prompts in ((self.plain[0], "every prompt"), (self.bare, "prompts without a system message")):
            for day in {self._began_on, datetime.date.today()}:
                end = date_end(tokens, self._chat.decode, self._chat.template, day)
                if end is not None:
                    yield f"it writes today's date into {prompts}, up to token {end}: what follows changes each day"
                    return

    def _tools_remarks(self, opening: list[int]) -> Iterator[str]:
        """Say so where tools are not, or not always, before the first user turn."""
        if not self.with_tools:
            return
        with_tools = self.with_tools[0]
        end = find_run(with_tools, opening)
        answered: list[Message] = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
        longer = [*_conversation(_SYSTEM_TEXTS[0], _USER_TEXTS[0]), *answered]
        if end < len(with_tools) - len(opening):
            yield "it puts tools into the user turn, behind what is found"
        elif find_run(self._render(longer, with_tools=True), opening) < end:
            yield "it puts tools before the last user turn, so they are not found in longer conversations"

    def _with_systems(self) -> list[list[int]]:
        try:
            return [self._before_user(system) for system in _SYSTEM_TEXTS]
        except (NoUserTurnError, TimeoutError):
            raise
        except Exception as exc:  # a template may raise anything
            reason = str(exc) or type(exc).__name__
            raise NoUserTurnError(f"the chat template takes no system messages ({reason})") from exc

    def _with_systems_and_tools(self) -> list[list[int]]:
        try:
            return [self._before_user(system, with_tools=True) for system in _SYSTEM_TEXTS]
        except TimeoutError:
            raise
        except Exception:  # the model takes no tools
            return []

    def _before_user(self, system: str | None, *, with_tools: bool = False) -> list[int]:
        """Return the tokens that stand before any user text."""
        renderings = [self._render(_conversation(system, user), with_tools=with_tools) for user in _USER_TEXTS]
        return common_prefix(renderings)

    def _render(self, messages: Sequence[Message], *, with_tools: bool) -> list[int]:
        if time.monotonic() > self._deadline_s:
            raise TimeoutError(f"its renderings take longer than {LEARNING_TIMEOUT_S:.0f} s")
        return self._chat.render(messages, with_tools=with_tools)


def _conversation(system: str | None, user: str) -> list[Message]:
    messages = [{"role": "user", "content": user}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]
