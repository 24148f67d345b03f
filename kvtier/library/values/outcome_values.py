"""Why requests were restored what they were, and what pins saved.

As `public_values`: a field has the name of the message's field in proto/kvtier/v1/cache.proto.
"""

from dataclasses import dataclass, field
from enum import StrEnum

UNRECOGNIZED = "unrecognized"


class RequestOutcome(StrEnum):
    """What became of a request; docs/troubleshooting.md has the meaning of each, and what to do."""

    HIT = "hit"
    PART = "part"
    DIVERGED = "diverged"
    UNKNOWN = "unknown"
    """It begins like no pin."""
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
    UNRECOGNIZED = UNRECOGNIZED
    """An outcome of a newer daemon."""


@dataclass(frozen=True, kw_only=True)
class OutcomeCount:
    """How many requests had an outcome."""

    outcome: RequestOutcome
    num_requests: int


@dataclass(frozen=True, kw_only=True)
class PinUsage:
    """What requests had of a prompt since it was pinned, over all engines.

    Attributes:
        num_hits: Requests with the outcome HIT.
        last_used_unix_s: When the last request ended that began with it as a whole, whatever its outcome.
        device_tokens: Tokens that came from vLLM's prefix cache, which might have been there without kvtier.
        host_tokens: From host memory; `disk_tokens`: from disk.
        saved_prefill_s: Seconds of prefill for host_tokens and disk_tokens; what loading them took is not subtracted.
        others: Requests of other outcomes that had it as their pin.
    """

    num_hits: int
    last_hit_unix_s: float
    last_used_unix_s: float
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    saved_prefill_s: float
    others: tuple[OutcomeCount, ...]

    @property
    def restored_tokens(self) -> int:
        """Tokens that kvtier brought."""
        return self.host_tokens + self.disk_tokens


@dataclass(frozen=True, kw_only=True)
class RecentRequest:
    """A request that ended lately; no text, no tokens.

    Attributes:
        request_id: As the client knows it, its first 256 bytes.
        pin_name: Of the longest pin that it begins with, else of one with which it shares the most; may be empty.
        shared_tokens: With that pin, in whole chunks.
        device_tokens: Of its prompt, by where they came from, as host_tokens and disk_tokens; the rest was computed.
    """

    request_id: str
    outcome: RequestOutcome
    pin_id: str
    pin_name: str
    prompt_tokens: int
    shared_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    ended_unix_s: float
    namespace_id: str


class MissingCause(StrEnum):
    """How chunks that no tier holds left the last tier that held them; cache.proto has the exact meaning of each."""

    NOT_RECORDED = "not_recorded"
    """Never stored; or lost before the daemon started, or longer ago than it remembers."""
    EVICTED_BY_COMMAND = "evicted_by_command"
    EVICTED_FOR_HOST_MEMORY = "evicted_for_host_memory"
    EVICTED_FOR_DISK_SPACE = "evicted_for_disk_space"
    DROPPED_AS_DAMAGED = "dropped_as_damaged"
    UNRECOGNIZED = UNRECOGNIZED
    """A cause of a newer daemon."""


@dataclass(frozen=True, kw_only=True)
class MissingChunks:
    """Chunks that are missing for one cause.

    Attributes:
        last_unix_s: When the last of them was lost; 0 with NOT_RECORDED.
    """

    cause: MissingCause
    num_chunks: int
    last_unix_s: float


@dataclass(frozen=True, kw_only=True)
class NearBinding:
    """What is held of what a request shares with a prompt, in a namespace.

    Attributes:
        live: An engine is attached.
        bound: An engine has recognized the prompt.
        shared_tokens: In whole chunks; `lost_tokens`: beyond those.
        num_host_chunks: Chunks of shared_tokens, by where they are read fastest.
        differing_fields: Of a namespace without an engine: in what it differs from that of an engine.
        missing: num_missing_chunks by cause, the most frequent first; empty from an older daemon.
    """

    namespace_id: str
    model: str
    live: bool
    bound: bool
    shared_tokens: int
    lost_tokens: int
    num_host_chunks: int
    num_disk_chunks: int
    num_missing_chunks: int
    differing_fields: tuple[str, ...]
    missing: tuple[MissingChunks, ...]


@dataclass(frozen=True, kw_only=True)
class NearPrompt:
    """A prompt that begins like a request.

    Attributes:
        shared_tokens: From the first on.
        differs_at: Index of the first token that differs; 0: none that is known.
        differs_in: Which of `model`, `lora_name` and `cache_salt` differ: then nothing of it can be restored.
    """

    name: str
    pin_id: str
    pinned: bool
    num_tokens: int
    shared_tokens: int
    differs_at: int
    differs_in: tuple[str, ...]
    bindings: tuple[NearBinding, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a request was, or would be, restored what it is.

    Attributes:
        reason: In a sentence or two, with a remedy where there is one.
        prompts: Those that share the most with it, at most 5, that with most first.
        request: What was reported of it, of one that was named by its id.
        last_request: Of one that could come: the last request of the prompt that decides the outcome. Its engine knows
            what the daemon does not: what a load costs beside computing, and whether the daemon answers in time.
    """

    outcome: RequestOutcome
    reason: str
    prompts: tuple[NearPrompt, ...]
    request: RecentRequest | None
    last_request: RecentRequest | None


class ChangeLooksLike(StrEnum):
    """What the place where a request differs from a pin looks like."""

    DATE = "a date"
    TIME = "a time"
    ID = "an id"
    NUMBER = "a number"
    TEXT = "other text"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a request differs from a prompt, as text.

    Attributes:
        name: Of the prompt.
        before: What both have just before it.
        in_request: What the request has there; `in_prompt`: the prompt.
        looks_like: Whether it is something that changes with each request.
    """

    name: str
    before: str = field(repr=False)
    in_request: str = field(repr=False)
    in_prompt: str = field(repr=False)
    looks_like: ChangeLooksLike


@dataclass(frozen=True, kw_only=True)
class Explained:
    """An explanation, and the text around the first differing token of its nearest prompt.

    Attributes:
        num_tokens: Of the request's prompt; 0 for one that was named by its id.
        difference: None: nothing differs, or no vLLM can say what the tokens mean.
    """

    explanation: Explanation
    num_tokens: int = 0
    difference: Difference | None = None
