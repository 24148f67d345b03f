"""System prompts of a wanted number of tokens."""

from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.harness.prompts import ASSISTANTS, system_prompt


@dataclass(frozen=True, kw_only=True)
class SystemPrompt:
    """One system prompt.

    Attributes:
        variant: Others differ from the first words on.
        tokens: As wanted; the text has as many within a few.
    """

    variant: int
    tokens: int
    text: str

    @property
    def name(self) -> str:
        """Return a name to pin it under."""
        return f"prompt-{self.tokens}-{self.variant}"

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return a conversation whose first user turn is the question."""
        return [{"role": "system", "content": self.text}, {"role": "user", "content": question}]


@cache
def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def make_prompt(model: Path, tokens: int, variant: int) -> SystemPrompt:
    """Return a system prompt of about this many of this model's tokens."""
    # The assistants repeat after their revisions are counted up, so each part of a long one is a text of its own.
    parts = (system_prompt(variant + number * 1000 * len(ASSISTANTS)) for number in count())
    text = ""
    ids: list[int] = []
    while len(ids) < tokens:
        text += next(parts)
        ids = _tokenizer(model).encode(text).ids
    return SystemPrompt(variant=variant, tokens=tokens, text=_tokenizer(model).decode(ids[:tokens]))
