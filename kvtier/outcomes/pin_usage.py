"""What requests had of one pin."""

from collections import Counter
from dataclasses import dataclass, field

from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.outcomes.recent_requests import EndedRequest


@dataclass(kw_only=True)
class PinUsage:
    """PinUsage of proto/kvtier/v1/cache.proto; the meanings stand there. `others`: requests by outcome, without HIT."""

    num_hits: int = 0
    last_hit_unix_s: float = 0.0
    last_used_unix_s: float = 0.0
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    saved_prefill_s: float = 0.0
    others: Counter[RequestOutcome] = field(default_factory=Counter)

    def add(self, request: EndedRequest, prefill_tokens_per_s: float) -> None:
        """A request of this pin has ended. Tokens behind those that it shares are not the pin's."""
        device_tokens = min(request.device_tokens, request.shared_tokens)
        host_tokens = min(request.host_tokens, request.shared_tokens - device_tokens)
        disk_tokens = min(request.disk_tokens, request.shared_tokens - device_tokens - host_tokens)
        self.device_tokens += device_tokens
        self.host_tokens += host_tokens
        self.disk_tokens += disk_tokens
        self.saved_prefill_s += (host_tokens + disk_tokens) / prefill_tokens_per_s
        if request.outcome is RequestOutcome.HIT:
            self.num_hits += 1
            self.last_hit_unix_s = max(self.last_hit_unix_s, request.ended_unix_s)
        else:
            self.others[request.outcome] += 1
        if request.outcome is not RequestOutcome.DIVERGED:
            self.last_used_unix_s = max(self.last_used_unix_s, request.ended_unix_s)
