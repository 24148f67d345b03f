"""Why a request was, or was not, restored what kvtier has: one enum from the connector to the CLI."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class RequestOutcome(StrEnum):
    """RequestOutcome of proto/kvtier/v1/engine.proto, by the same names; the exact meanings stand there."""

    HIT = "hit"
    PART = "part"
    DIVERGED = "diverged"
    UNKNOWN = "unknown"
    TOO_SHORT = "too_short"
    NOT_CACHEABLE = "not_cacheable"
    CACHE_SKIPPED = "cache_skipped"
    NO_SESSION = "no_session"
    BREAKER_OPEN = "breaker_open"
    LATE = "late"
    SLOWER = "slower"
    NOT_STORED = "not_stored"
    NO_SLOT = "no_slot"
    DISK_OFF = "disk_off"
    OVER_LIMIT = "over_limit"
    LOAD_FAILED = "load_failed"
    ADAPTER_NOT_READY = "adapter_not_ready"
    NOT_PROMOTED = "not_promoted"
    QUARANTINED = "quarantined"

    @property
    def is_miss(self) -> bool:
        """Whether kvtier had, or should have had, what the request begins with."""
        return self not in (RequestOutcome.HIT, RequestOutcome.UNKNOWN, RequestOutcome.TOO_SHORT)


MEANINGS: Mapping[RequestOutcome, str] = MappingProxyType(
    {
        RequestOutcome.HIT: "All that it shares with its pin (without one: all that was held) came from a cache.",
        RequestOutcome.PART: "kvtier restored some of that; the rest was computed.",
        RequestOutcome.DIVERGED: "It begins like a pin, and differs before the end of every such pin.",
        RequestOutcome.UNKNOWN: "It begins like no pin of its model, adapter and cache_salt.",
        RequestOutcome.TOO_SHORT: "It is too short for one whole chunk and a token behind it.",
        RequestOutcome.NOT_CACHEABLE: "Its KV cannot be distinguished from other KV (an adapter loaded in place).",
        RequestOutcome.CACHE_SKIPPED: "It must not read a cache: log probabilities of its prompt, or a missing state.",
        RequestOutcome.NO_SESSION: "There was no session with a daemon; reported in the next one.",
        RequestOutcome.BREAKER_OPEN: "A lookup before it was late, and the daemon had not answered since.",
        RequestOutcome.LATE: "The daemon did not answer in time.",
        RequestOutcome.SLOWER: "To load what was there would have taken longer than to compute it.",
        RequestOutcome.NOT_STORED: "Its chunks are not stored: not yet, or they were evicted, or lost.",
        RequestOutcome.NO_SLOT: "Its chunks are on disk, and no place in host memory could be freed.",
        RequestOutcome.DISK_OFF: "Its chunks are on disk, and the disk's circuit breaker is open.",
        RequestOutcome.OVER_LIMIT: "The engine held too many leases, or the request has too many chunks.",
        RequestOutcome.LOAD_FAILED: "A load failed, and vLLM computed the tokens.",
        RequestOutcome.ADAPTER_NOT_READY: "The content of its LoRA adapter was not known in time.",
        RequestOutcome.NOT_PROMOTED: "Its chunks are on disk, and to wait for them was not worth it.",
        RequestOutcome.QUARANTINED: "Its namespace is quarantined: an operator, or `kvtier verify`, has stopped it.",
    }
)
