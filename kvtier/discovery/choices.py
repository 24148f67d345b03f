"""What is asked of a selection of prefixes, and what it answers; `kvtier advise` shows the same."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvtier.core.layout import KVLayout

STAY = 1.25
"""What is pinned counts as this much more, in a selection and between namespaces: pins do not flap."""


class Verdict(Enum):
    """Why a prefix is pinned or is not."""

    CHOSEN = "chosen"
    CONTAINED = "contained in longer ones"
    TOO_SHORT = "too short"
    TOO_FEW_REQUESTS = "too few requests"
    ONE_PROMPT = "one prompt repeated"
    OVER_BUDGET = "over budget"


@dataclass(frozen=True, kw_only=True)
class PinRules:
    """What a prefix must have to be pinned.

    Attributes:
        min_tokens: A shorter one is computed faster than it is looked up.
        min_requests: Aged, rounded: this many of late, or more of longer ago.
        max_bytes: Of all chosen together, as stored.
    """

    min_tokens: int
    min_requests: int
    max_bytes: int


@dataclass(frozen=True, kw_only=True)
class PinCosts:
    """What a pin costs and saves.

    Attributes:
        bytes_per_token: As stored. Prefixes of one another share them.
        bytes_per_pin: As stored: windows and states at a pin's end, which nothing shares.
        prefill_tokens_per_s: Measured.

    Raises:
        ValueError: A value is not positive; `bytes_per_pin` may be 0.
    """

    bytes_per_token: float
    bytes_per_pin: float
    prefill_tokens_per_s: float

    def __post_init__(self) -> None:
        if self.bytes_per_token < 0 or self.bytes_per_pin < 0 or self.bytes_per_token + self.bytes_per_pin <= 0:
            raise ValueError(f"{self}: a pin needs bytes; use a namespace's layout")
        if self.prefill_tokens_per_s <= 0:
            raise ValueError(f"prefill_tokens_per_s {self.prefill_tokens_per_s}: use a positive rate")

    @classmethod
    def of(cls, layout: KVLayout, stored_ratio: float, prefill_tokens_per_s: float) -> "PinCosts":
        """Return the costs in a namespace; `stored_ratio` is stored bytes / payload bytes, as measured."""
        per_token = per_pin = 0.0
        for group in layout.groups:
            chunk_bytes = layout.num_writers * group.useful_bytes * stored_ratio
            if group.window_chunks:
                per_pin += group.window_chunks * chunk_bytes
            else:
                per_token += chunk_bytes / group.chunk_tokens
        return cls(bytes_per_token=per_token, bytes_per_pin=per_pin, prefill_tokens_per_s=prefill_tokens_per_s)


class PinnedPrefix(NamedTuple):
    """A prefix that has an automatic pin; `parent` as in PrefixCount."""

    digest: bytes
    num_tokens: int
    is_system_prompt: bool
    parent: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class PrefixChoice:
    """A prefix, and whether it is worth a pin.

    Attributes:
        verdict: Why, or why not.
        contained_in: With CONTAINED: the most used longer one that is chosen.
        is_pinned: It has an automatic pin.
        requests_per_hour: Certain ones.
        num_prompts: Different prompts, by estimate.
        last_seen_s: 0 when it is pinned and was not seen since.
        added_tokens: To the longest shorter one that is chosen, and to what it shares with others that are.
        added_bytes: For these tokens; 0 for those that a pin with a name has.
        saved_s_per_hour: Seconds of prefill that it saves; what it would save when it is not chosen.
        saved_share: Tokens that it saves, as a share of all prompt tokens.
    """

    digest: bytes
    num_tokens: int
    is_system_prompt: bool
    verdict: Verdict
    contained_in: bytes | None
    is_pinned: bool
    requests_per_hour: float
    num_prompts: int
    last_seen_s: float
    added_tokens: int
    added_bytes: int
    saved_s_per_hour: float
    saved_share: float


@dataclass(frozen=True, kw_only=True)
class Selection:
    """All prefixes that were weighed: the chosen ones first, each part by the seconds that it saves.

    Attributes:
        choices: Ranked.
        total_bytes: Of the chosen ones, at most the budget.
        saved_s_per_hour: By all of them.
        saved_share: Of all prompt tokens.
    """

    choices: tuple[PrefixChoice, ...]
    total_bytes: int
    saved_s_per_hour: float
    saved_share: float

    @property
    def chosen(self) -> tuple[PrefixChoice, ...]:
        """What shall be pinned."""
        return tuple(choice for choice in self.choices if choice.verdict is Verdict.CHOSEN)

    @property
    def superfluous(self) -> tuple[PrefixChoice, ...]:
        """Pins that can end now: longer pins hold their chunks, or the rules forbid them."""
        return tuple(
            choice
            for choice in self.choices
            if choice.is_pinned and choice.verdict not in (Verdict.CHOSEN, Verdict.OVER_BUDGET)
        )

    @property
    def displaced(self) -> tuple[PrefixChoice, ...]:
        """Pins that end when a chosen prefix gets its tokens and needs their bytes; the least valuable first."""
        displaced = [choice for choice in self.choices if choice.is_pinned and choice.verdict is Verdict.OVER_BUDGET]
        return tuple(sorted(displaced, key=lambda choice: (choice.requests_per_hour, choice.digest)))
