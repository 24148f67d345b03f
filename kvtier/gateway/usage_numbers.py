"""Usage as the hosted APIs report it, from what vLLM counted and where the markers are.

| number | is |
|---|---|
| read | tokens that vLLM did not compute, up to the last breakpoint |
| written | the rest up to the last breakpoint: computed now, and kept |
| written, by TTL | up to the last breakpoint with the longer TTL, and from there on |

The hosted APIs split by TTL in the same way. Without an owner nothing is kept, so nothing is written; nor when the
connector reports that the daemon is away or refuses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtier.core.requests.request_instructions import PARAMETER, InstructionEnd
from kvtier.gateway.markers.marked_request import Api, Json

_REFUSED = (InstructionEnd.REFUSED, InstructionEnd.TOO_SHORT, InstructionEnd.INVALID)
_WRITES = {300: "ephemeral_5m_input_tokens", 3600: "ephemeral_1h_input_tokens"}
_WRITES_OPENAI = {1800: "ttl_30m_tokens", 12 * 3600: "ttl_12h_tokens"}


class MarkedPlace(NamedTuple):
    """A marker's place in the prompt, in tokens from its start, and its TTL in seconds."""

    num_tokens: int
    ttl_s: int


class CacheCounts(NamedTuple):
    """Tokens read from the cache, written to it, and those written by TTL in seconds."""

    read: int
    written: int
    written_by_ttl: dict[int, int]


def count(points: Sequence[MarkedPlace], cached_tokens: int, *, is_kept: bool) -> CacheCounts:
    """Return the counts of a request.

    Args:
        points: In the order of the prompt.
        cached_tokens: Of the prompt, that vLLM did not compute.
        is_kept: The caller has an owner, so that the marked prefix is pinned.
    """
    last = max((point.num_tokens for point in points), default=0)
    read = min(cached_tokens, last)
    written_by_ttl: dict[int, int] = {}
    counted = read
    if is_kept:
        for ttl_s in sorted({point.ttl_s for point in points}, reverse=True):
            end = max(point.num_tokens for point in points if point.ttl_s == ttl_s)
            written_by_ttl[ttl_s] = max(0, end - counted)
            counted = max(counted, end)
    return CacheCounts(read, sum(written_by_ttl.values()), written_by_ttl)


@dataclass(kw_only=True)
class UsageWriter:
    """Writes usage into answers of one request.

    Attributes:
        has_cache_control: Anthropic's fields are added to the chat API's.
        has_siblings: One body has several answers (`n`). vLLM reports the count of the one that ends last, which may
            have read what the first one computed: counts are 0.
        measured_tokens: Tokens that were not computed, as vLLM's engine counted; None before it said so, or when only
            vLLM's own usage says it.
        model: As the request names it.
        is_daemon_away: As the model's last answer had it; what this one says of it counts more.
        result: What became of the instruction, as the connector reports it; empty before it does.
        sources: Tokens that were not computed, by source, likewise.
        was_unknown: Usage was written without a count of cached tokens.
    """

    api: Api
    points: Sequence[MarkedPlace]
    is_kept: bool
    has_cache_control: bool
    is_prewarm: bool
    has_siblings: bool = False
    measured_tokens: int | None = None
    model: str = ""
    is_daemon_away: bool = False
    result: str = ""
    sources: dict[str, int] = field(default_factory=dict)
    was_unknown: bool = False

    def read_report(self, params: Any) -> None:
        """Read the connector's report out of an answer's `kv_transfer_params`, where it has one."""
        report = params.get(PARAMETER) if isinstance(params, dict) else None
        if isinstance(report, dict) and isinstance(report.get("cached_tokens"), dict):
            self.result, self.sources = str(report.get("result", "")), report["cached_tokens"]
            self.is_daemon_away = self.result == InstructionEnd.UNANSWERED

    def is_known(self, usage: Json) -> bool:
        """Return whether it is known how much of the prompt was cached."""
        return self._cached_tokens(usage) is not None

    def write(self, usage: Json) -> Json:
        """Return the usage of an answer; counts are 0 when vLLM does not report cached tokens."""
        cached = self._cached_tokens(usage)
        self.was_unknown |= cached is None and not self.has_siblings
        is_kept = self.is_kept and not self.is_daemon_away and self.result not in _REFUSED
        counts = count(self.points, cached or 0, is_kept=is_kept and cached is not None)
        if self.api is Api.MESSAGES:
            return self._anthropic(usage, counts)
        name = "prompt_tokens_details" if self.api is Api.CHAT else "input_tokens_details"
        details = (usage.get(name) or {}) | {"cached_tokens": cached or 0, "cache_write_tokens": counts.written}
        if self.api is Api.RESPONSES and counts.written_by_ttl.keys() <= _WRITES_OPENAI.keys():
            by_ttl = {field: counts.written_by_ttl.get(ttl_s, 0) for ttl_s, field in _WRITES_OPENAI.items()}
            details["cache_write_tokens_details"] = by_ttl
        written = usage | {name: details}
        if self.is_prewarm:
            written |= {"output_tokens": 0, "total_tokens": usage.get("input_tokens", 0)}
        return written | (_anthropic_counts(counts) if self.has_cache_control else {})

    def _anthropic(self, usage: Json, counts: CacheCounts) -> Json:
        """vLLM's `input_tokens` are those that are neither read nor written, as the API has it; ours are others."""
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        prompt_tokens = sum(usage.get(name) or 0 for name in names)
        written = usage | {"input_tokens": max(0, prompt_tokens - counts.read - counts.written)}
        if self.is_prewarm:
            written |= {"output_tokens": 0}
        return written | _anthropic_counts(counts)

    def _cached_tokens(self, usage: Json) -> int | None:
        if self.has_siblings:
            return None
        if self.measured_tokens is not None:
            return self.measured_tokens
        if self.api is Api.MESSAGES:
            cached = usage.get("cache_read_input_tokens")
        else:
            details = usage.get("prompt_tokens_details" if self.api is Api.CHAT else "input_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if isinstance(cached, int) else None


def _anthropic_counts(counts: CacheCounts) -> Json:
    by_ttl = {field: counts.written_by_ttl.get(ttl_s, 0) for ttl_s, field in _WRITES.items()}
    return {
        "cache_creation_input_tokens": counts.written,
        "cache_read_input_tokens": counts.read,
        "cache_creation": by_ttl,
    }
