"""What requests begin with, as engines report it; and what is known of it at one moment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.core.tokens import TokenIds

DIGEST_BYTES = 16
MAX_PREFIXES = 7
"""Of one request; further ones are not counted."""


class SeenPrefix(NamedTuple):
    """A prefix of a request's prompt, in whole chunks: its digest (16 bytes), its length, what ends there."""

    digest: bytes
    num_tokens: int
    is_system_prompt: bool = False


class SeenRequest(NamedTuple):
    """What a request began with.

    Attributes:
        prefixes: In ascending order of tokens; one that is not longer than the one before is not counted.
        prompt_digest: 64 bits, equal for equal prompts.
        num_tokens: Of the whole prompt.
    """

    prefixes: Sequence[SeenPrefix]
    prompt_digest: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class PrefixTokens:
    """PrefixTokens of proto/kvtier/v1/engine.proto, checked."""

    digest: bytes
    tokens: TokenIds = field(repr=False)
    lora_name: str
    lora_path: str
    cache_salt: str = field(repr=False)


class PrefixCount(NamedTuple):
    """What is known of a prefix at one moment. Requests are aged: one of a half-life ago counts half.

    Attributes:
        digest: 16 bytes.
        num_tokens: As the first request said that had it.
        is_system_prompt: Some request's system prompt ended there.
        parent: Digest of the next shorter prefix in the last request that had this one; None if there was none. It may
            have no counter any longer.
        requests: At most this many began with it.
        error: At least `requests - error` did.
        num_prompts: Different prompts that began with it: 1 or 2 exactly, more by estimate, up to some 300.
        first_seen_s: Since when it has a counter.
        last_seen_s: When the last request had it.
    """

    digest: bytes
    num_tokens: int
    is_system_prompt: bool
    parent: bytes | None
    requests: float
    error: float
    num_prompts: int
    first_seen_s: float
    last_seen_s: float

    @property
    def requests_at_least(self) -> float:
        """Aged requests that are certain."""
        return self.requests - self.error


@dataclass(frozen=True, kw_only=True)
class SeenTraffic:
    """A reading of the sketch.

    Attributes:
        now_s: When it was taken.
        prefixes: In no order.
        requests: All requests that were looked at, aged.
        skipped: Requests that engines did not look at, aged.
        tokens: Tokens of all prompts that were looked at, aged.
        window_s: An aged number divided by this is a rate per second.
    """

    now_s: float
    prefixes: Sequence[PrefixCount]
    requests: float
    skipped: float
    tokens: float
    window_s: float

    @property
    def per_hour(self) -> float:
        """By this an aged number of requests becomes a rate an hour, with those that were not looked at."""
        sampled = 1 + self.skipped / self.requests if self.requests else 1.0
        return sampled * 3600 / self.window_s
