"""What the demo found: two acts, each about one system prompt, and what a prompt costs that is not pinned."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.measuring.chat_requests import Answer

BLOCK_TOKENS = 32
# What may be missing at the end of a restored prompt: less than a chunk, and the template's last tokens.
SLACK_TOKENS = 2 * BLOCK_TOKENS


@dataclass(frozen=True, kw_only=True)
class DemoCase:
    """A row of the table: what happened before the question, and which tier must supply the prompt."""

    name: str
    expected: str
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class Act:
    """What happens to one system prompt.

    Attributes:
        title: How it came to be pinned.
        variant: Of `system_prompt`.
        num_tokens: Of the pin, those in whole chunks.
    """

    title: str
    variant: int
    num_tokens: int
    cases: list[DemoCase] = field(default_factory=list)

    def failures(self) -> list[str]:
        """Return a line for each case that another tier served than expected."""
        least = self.num_tokens - SLACK_TOKENS
        found = [(case, case.answer.by_source.get(case.expected, 0)) for case in self.cases]
        return [
            f"{self.title}, {case.name}: {tokens} tokens came from {case.expected}, expected at least {least}"
            for case, tokens in found
            if tokens < least
        ]


@dataclass(frozen=True, kw_only=True)
class Story:
    """All acts, and the answers to prompts of the same kind that were not pinned."""

    cold: Sequence[Answer]
    acts: Sequence[Act]

    def cold_ttft_s(self) -> float:
        """Return the median time to first token of the cold prompts."""
        return statistics.median(answer.ttft_s for answer in self.cold)

    def failures(self) -> list[str]:
        """Return a line for each case, of any act, that is not as expected."""
        return [line for act in self.acts for line in act.failures()]
