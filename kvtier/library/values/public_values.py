"""What the daemon answers, as values. A field has the name of the message's field in proto/kvtier/v1/cache.proto.

Points in time are seconds since 1970 (`_unix_s`), 0 for never or not yet. To add a field of a message, add a line here:
`conversion` finds it by its name and its type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvtier.library.values.outcome_values import PinUsage


class PromptState(StrEnum):
    """How far a prompt is captured."""

    UNRENDERED = "unrendered"
    """Registered as a source; it has no tokens yet."""
    WAITING = "waiting"
    """No engine has recognized it yet."""
    CAPTURING = "capturing"
    """An engine has recognized it, and some chunk is not durable yet."""
    DURABLE = "durable"
    """Every chunk is on disk, and survives kill -9 and reboot."""
    OVER_QUOTA = "over_quota"
    """The disk quota keeps it from becoming durable."""
    STALE = "stale"
    """It is durable for engines of before; those attached now have other weights, another dtype or block size."""
    REFRESHING = "refreshing"
    """As STALE, and some chunks are durable for the engines attached now."""
    REFUSED = "refused"
    """An engine cannot use it, as `error` says, and none has recognized it: waiting does not change that."""
    UNKNOWN = "unknown"
    """A state of a newer daemon."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """A prompt in one namespace: all that an engine needs to use its chunks.

    Attributes:
        covered_tokens: Tokens in whole chunks; the rest is always computed.
        num_durable_chunks: Chunks on disk after an fsync; the prompt is durable here when all are.
        ephemeral: The namespace ends with its engines, whose weights were changed in place, and never reaches disk; the
            prompt counts as durable here when all chunks are in host memory.
        raw_bytes: Of all chunks, not compressed.
        disk_bytes: What the durable chunks take on disk.
        live: An engine of this namespace is attached.
        durable_raw_bytes: The length of the durable chunks before compression.
        num_shared_chunks: Chunks that another pinned prompt has too.
        disk_share_bytes: `disk_bytes`, in which a chunk of n pinned prompts counts as an nth.
    """

    namespace_id: str
    model: str
    covered_tokens: int
    num_chunks: int
    num_host_chunks: int
    num_durable_chunks: int
    raw_bytes: int
    disk_bytes: int
    live: bool
    durable_raw_bytes: int
    num_shared_chunks: int
    disk_share_bytes: int
    ephemeral: bool

    @property
    def num_kept_chunks(self) -> int:
        """Chunks that make the prompt durable here, when all are."""
        return self.num_host_chunks if self.ephemeral else self.num_durable_chunks


@dataclass(frozen=True, kw_only=True)
class PinUse:
    """What an automatic pin was good for, over all namespaces.

    Attributes:
        num_requests: Requests that began with it, and with no longer automatic pin.
        saved_tokens: Of these requests; vLLM's own prefix cache may have had some.
        saved_s: Seconds of prefill for these tokens.
    """

    num_requests: int
    saved_tokens: int
    saved_s: float
    last_used_unix_s: float


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as the daemon knows it.

    Attributes:
        pin_id: Stays the same when a version takes the name of the prompt that it replaces.
        pinned: Whether it is kept until its end; else its chunks are cache that may be evicted.
        model: Empty: any.
        cache_salt: As requests send it; empty: none, or the caller is a viewer. Not in the repr, as `recipe`: logs show
            neither.
        expires_unix_s: When the pin ends, or its TTL ended it; 0: never.
        bindings: One for each namespace in which an engine has recognized it.
        recipe: Its source, as JSON values (`docs/format.md`); text if it cannot be read. None in a list, and for none.
        num_engines: Engines attached now to which the prompt applies.
        num_confirmed: Those of them that have recognized it.
        tokens_digest: Equal for prompts with equal tokens.
        error: Why an engine cannot use it; empty: none said so.
        priority: -100 to 100, the higher, the more important.
        public: Requests with any cache_salt may use it.
        origin: `named` (an operator), `auto` (found in requests), `request` (a request asked for it) or `replacement`
            (it takes the name before the `@` when it is durable).
        owner: Whose prompt it is, or of a pin by request: whose, a digest. May be empty.
        use: Of an automatic pin.
        replacement: Name of the version that takes its place once durable; empty for none.
        labels: What commands select prompts by.
        ttl_s: Time to live in seconds, as it was given last; 0: none.
        sliding: It begins again at each use.
        source_digest: XXH3-128 of its stored source; empty without one.
        usage: What requests had of it, and what that saved.
        computed_elsewhere: Engines here need not compute it: a store that hosts share has its KV, or will have.
    """

    name: str
    pin_id: str
    pinned: bool
    state: PromptState
    model: str
    lora_name: str
    cache_salt: str = field(repr=False)
    num_tokens: int
    created_unix_s: float
    expires_unix_s: float
    bindings: tuple[Binding, ...]
    recipe: Any = field(repr=False)
    num_engines: int
    num_confirmed: int
    tokens_digest: str
    error: str
    priority: int
    public: bool
    origin: str
    owner: str
    use: PinUse
    replacement: str
    labels: Mapping[str, str]
    ttl_s: int
    sliding: bool
    source_digest: str
    usage: PinUsage
    computed_elsewhere: bool


@dataclass(frozen=True, kw_only=True)
class PromptPage:
    """A part of all prompts, by name.

    Attributes:
        next_page_token: For the next page; empty: this is the last.
    """

    prompts: tuple[Prompt, ...]
    next_page_token: str


@dataclass(frozen=True, kw_only=True)
class ChunkMap:
    """Where the chunks of a prompt lie, in one namespace.

    Attributes:
        chunks: A byte for each: 0 missing, 1 on disk, 2 in host memory, 3 in both. Chunks of a KV cache group are in
            prefix order, and stand together.
        covered_tokens: Tokens in whole chunks.
    """

    name: str
    namespace_id: str
    chunks: bytes
    covered_tokens: int


@dataclass(frozen=True, kw_only=True)
class Evicted:
    """What was dropped.

    Attributes:
        num_shared_chunks: Chunks that were kept, because pinned prompts have them too.
    """

    num_chunks: int
    host_bytes: int
    disk_bytes: int
    num_shared_chunks: int


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Host memory, or the disk.

    Attributes:
        location: Its folder.
        pinned_bytes: Of pinned prompts.
        breaker_open_reason: Why it is switched off after I/O errors; empty: it is on.
    """

    location: str
    used_bytes: int
    limit_bytes: int
    num_chunks: int
    pinned_bytes: int
    breaker_open_reason: str


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """An engine that is attached.

    Attributes:
        num_leases: Chunks that it reads or writes now.
        num_store_grants: Arena slots that it may write.
        quarantined: Its connection is gone, and its slots wait until its processes have ended.
        num_acquires: Reads under way.
    """

    session_id: str
    engine_id: str
    pid: int
    namespace_id: str
    model_names: tuple[str, ...]
    attached_unix_s: float
    num_leases: int
    num_store_grants: int
    quarantined: bool
    num_acquires: int


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """All that makes KV caches interchangeable: model, dtype, layout.

    Attributes:
        row_bytes: Of one chunk, not compressed.
        fingerprint: What has to be equal; empty in `DaemonStatus`.
        live: An engine of it is attached.
        seen_unix_s: When an engine attached last or, since the daemon's start, left.
        quarantine_reason: Why it serves and stores nothing; empty: it does.
    """

    namespace_id: str
    model: str
    num_host_chunks: int
    num_disk_chunks: int
    disk_bytes: int
    row_bytes: int
    fingerprint: Mapping[str, Any]
    live: bool
    seen_unix_s: float
    quarantine_reason: str
    quarantined_unix_s: float


@dataclass(frozen=True, kw_only=True)
class KeyUsage:
    """What of the disk is sealed with one key.

    Attributes:
        name: The key's ID, a dot and a fingerprint; empty: plain packs.
        writes: New packs are sealed with it; compaction rewrites the others.
        is_missing: It is not in `disk.key_file`: its chunks are misses.
    """

    name: str
    writes: bool
    is_missing: bool
    num_packs: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class DaemonStatus:
    """The daemon, its tiers and its engines.

    Attributes:
        counters: Events since the daemon started, by name.
        store: `pinned` (chunks of pinned prompts only) or `all`.
        http_url: Of metrics and API; empty: nothing is served over HTTP; `http_problem` says why, if it should be.
        prompt_bytes: Memory that tokens and recipes of all prompts take.
        disk_keys: Which keys packs are sealed with; empty while nothing is encrypted.
    """

    version: str
    pid: int
    started_unix_s: float
    socket: str
    host: Tier
    disk: Tier
    sessions: tuple[EngineStatus, ...]
    namespaces: tuple[Namespace, ...]
    num_prompts: int
    num_pinned: int
    counters: Mapping[str, int]
    store: str
    http_url: str
    http_problem: str
    prompt_bytes: int
    disk_keys: tuple[KeyUsage, ...]


class Verdict(StrEnum):
    """Whether a prefix is worth a pin."""

    CHOSEN = "chosen"
    CONTAINED = "contained"
    """Its requests begin with a longer one that is worth a pin."""
    TOO_SHORT = "too_short"
    TOO_FEW_REQUESTS = "too_few_requests"
    ONE_PROMPT = "one_prompt"
    """All its requests were one prompt, repeated."""
    OVER_BUDGET = "over_budget"
    NAMED = "named"
    """A pin that is not automatic begins with it."""
    UNKNOWN = "unknown"
    """A verdict of a newer daemon."""


@dataclass(frozen=True, kw_only=True)
class AdvisedPrefix:
    """What several requests begin with.

    Attributes:
        is_system_prompt: It ends where the first user turn begins; else at a fixed number of tokens.
        pin_name: Of the pin that keeps it; empty: none.
        num_prompts: Different prompts that begin with it, by estimate.
        added_tokens: What it adds to shorter ones that are worth a pin; `added_bytes` likewise, on disk.
        saved_s_per_hour: Seconds of prefill that it saves, or would save.
        saved_share: Of all prompt tokens, 0 to 1.
    """

    digest: bytes
    num_tokens: int
    is_system_prompt: bool
    verdict: Verdict
    pin_name: str
    requests_per_hour: float
    num_prompts: int
    last_seen_unix_s: float
    added_tokens: int
    added_bytes: int
    saved_s_per_hour: float
    saved_share: float


@dataclass(frozen=True, kw_only=True)
class ChangingPlace:
    """Where prompts that begin alike differ from one request to the next.

    Attributes:
        num_stable_tokens: Tokens before it.
        num_tokens: Of the whole system prompt.
        num_prompts: Different prompts seen that differ there.
        before: Text just before it.
        examples: What stood there.
    """

    num_stable_tokens: int
    num_tokens: int
    num_prompts: int
    before: str = field(repr=False)
    examples: tuple[str, ...] = field(repr=False)
    seen_unix_s: float


@dataclass(frozen=True, kw_only=True)
class NamespaceAdvice:
    """What requests of one namespace begin with.

    Attributes:
        chosen_bytes: What all that is worth a pin takes on disk; `saved_s_per_hour` and `saved_share`: what it saves.
        prefixes: Those seen more than once; what is worth a pin comes first.
    """

    namespace_id: str
    model: str
    requests_per_hour: float
    prompt_tokens_per_hour: float
    chosen_bytes: int
    saved_s_per_hour: float
    saved_share: float
    prefixes: tuple[AdvisedPrefix, ...]
    places: tuple[ChangingPlace, ...]


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What is worth a pin.

    Attributes:
        mode: Of automatic pins: `off`, `observe` or `pin`.
        max_bytes: The budget on disk under which prefixes were chosen.
    """

    mode: str
    max_bytes: int
    namespaces: tuple[NamespaceAdvice, ...]


@dataclass(frozen=True, kw_only=True)
class FsckFinding:
    """One finding of a check.

    Attributes:
        code: See docs/format.md; one that begins with `note-` is no problem.
        subject: A path, the id of a pack, or the name of a prompt.
        detail: What was found, and what a repair does or did.
    """

    code: str
    subject: str
    detail: str
    num_chunks: int
    repaired: bool


@dataclass(frozen=True, kw_only=True)
class FsckReport:
    """What a check of ledger, packs and arenas found; `verified_bytes` counts bytes read by a deep one."""

    findings: tuple[FsckFinding, ...]
    num_packs: int
    num_chunks: int
    verified_bytes: int
    num_arena_slots: int
