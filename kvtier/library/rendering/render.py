"""Renders a recipe to the token ids that every request with this prompt starts with; vLLM tokenizes.

The tokens of a prompt depend on the text after it: a template may need a user turn, and BPE merges characters across
the boundary. So each recipe is rendered with continuations that differ in their first character, and the common token
prefix is the prompt.

| recipe | rendered as |
|---|---|
| system; messages up to an assistant or system turn | + user "Apricots…", + user "7 quokkas…" |
| messages up to a user or tool turn | unchanged; + assistant "Apricots…", user; + assistant "7 quokkas…", user |
| text | unchanged; + " Apricots…"; + newline and "7 quokkas…" |

Messages that end with a user turn get no second user turn, because many templates require alternation. The answer of
the model follows them, so the generation prompt belongs to the prefix as far as an answer in the history keeps it.
A request that repeats the messages and one that continues the conversation share exactly this prefix.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

from kvtier.core.tokens import common_prefix
from kvtier.errors import RenderError
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.library.rendering.vllm_client import VllmClient

# A letter and a digit never share a first token, in any vocabulary.
_PROBES = ("Apricots ripen early.", "7 quokkas nap.")
_ANSWERED_ROLES = ("user", "tool")

UNSTABLE = (
    "vLLM rendered the same input to different tokens twice: the chat template prints the time or something random. "
    "Requests match the pin only up to that place."
)


class Rendering(NamedTuple):
    """The first tokens of every request with a prompt, and reasons why they may change."""

    tokens: tuple[int, ...]
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Rendering({len(self.tokens)} tokens, {self.warnings})"


def render(recipe: Recipe, vllm: VllmClient, model: str) -> Rendering:
    """Render a recipe.

    Raises:
        RenderError: vLLM refused or is unreachable, or the continuations have no common prefix.
    """

    def tokens_of(variant: Any) -> list[int]:
        if recipe.kind is SourceKind.TEXT:
            return vllm.tokenize_text(model, variant)
        return vllm.tokenize_chat(model, variant, recipe.tools, recipe.chat_template_kwargs)

    first, *others = _variants(recipe)
    before, *rendered = map(tokens_of, (first, *others))
    after = tokens_of(first)  # as the last, because time has passed
    tokens = common_prefix([before, *rendered, after])
    if not tokens:
        raise RenderError(
            "the rendered prompt shares no first token with itself when another user turn follows; the chat template "
            "does not start with this source, so there is nothing to pin"
        )
    warnings = [UNSTABLE] if after != before else []
    # A pin works with a server that has no /detokenize.
    text = ""
    if recipe.kind is not SourceKind.TEXT:
        with suppress(RenderError):
            text = vllm.detokenize(model, tokens)
    if stamp := find_date_stamp(text, recipe.to_json()):
        warnings.append(
            f"the chat template prints today's date (\"{stamp}\"): tomorrow's requests miss the pin from there on. "
            "Give vLLM a template with a fixed date (--chat-template), or pin again every day."
        )
    return Rendering(tuple(tokens), tuple(warnings))


def _variants(recipe: Recipe) -> Sequence[Any]:
    """Return the texts or message lists whose common token prefix is the prompt."""
    first, second = _PROBES
    if recipe.kind is SourceKind.TEXT:
        return [recipe.content, f"{recipe.content} {first}", f"{recipe.content}\n{second}"]
    messages = recipe.messages()
    if messages[-1].get("role") not in _ANSWERED_ROLES:
        return [[*messages, _turn("user", probe)] for probe in _PROBES]
    return [
        messages,
        [*messages, _turn("assistant", first), _turn("user", second)],
        [*messages, _turn("assistant", second), _turn("user", first)],
    ]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# strftime's names follow the locale, and templates are written in English.
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July",
    "August", "September", "October", "November", "December",
)  # fmt: skip


def find_date_stamp(text: str, source: str, now: datetime | None = None) -> str | None:
    """Return a spelling of today's date that is in `text` and not in `source`, None when there is none.

    Covers the date in every time zone, because the machine of vLLM may be in another one. A date in `source` is
    intended.
    """
    today = (now or datetime.now(tz=UTC)).date()
    for days in (0, -1, 1):
        for spelling in _spellings(today + timedelta(days=days)):
            if spelling in text and spelling not in source:
                return spelling
    return None


def _spellings(day: date) -> Iterator[str]:
    """Yield the usual ways to write a day, longest first."""
    name = _MONTHS[day.month - 1]
    for month in dict.fromkeys((name, name[:3])):
        for number in dict.fromkeys((f"{day:%d}", f"{day.day}")):
            yield from (f"{number} {month} {day.year}", f"{month} {number}, {day.year}")
            yield from (f"{month} {number} {day.year}", f"{number}-{month}-{day.year}")
    for written in ("%Y-%m-%d", "%d-%m-%Y", "%m-%d-%Y"):
        yield from (day.strftime(written.replace("-", separator)) for separator in "-/.")
    yield f"{day:%Y%m%d}"
