"""Every metric that the connector adds to vLLM's /metrics, declared here and nowhere else.

All are counted in the scheduler half, once per engine however many workers it has; bytes and seconds of the copies are
the workers', which vLLM adds up over them as `vllm:kv_offload_load_bytes` and the like. Tokens by tier are vLLM's
`vllm:prompt_tokens_cached_by_source`: kvtier reports `host` or `disk` for each chunk, and vLLM knows no other sources.
"""

from enum import StrEnum

from kvtier.core.requests.request_instructions import InstructionEnd
from kvtier.obs.declare import counter, gauge, histogram

_WAIT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LookupEnd(StrEnum):
    """How a request's lookup round ended."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> "LookupEnd":
        end = str.__new__(cls, value)
        end._value_, end.meaning = value, meaning
        return end

    WHOLE = "whole", "All that was asked for can be loaded."
    PART = "part", "Some of it: the rest was evicted meanwhile, or not worth waiting for."
    NONE = "none", "Nothing of it."
    SLOWER = "slower", "Some of it, but so little that computing it is faster than a load, as both were measured."
    UNKNOWN = "unknown", "Not asked: the prompt begins like nothing that is pinned or held."
    TOO_SHORT = "too_short", "Not asked: the prompt has no whole chunk."
    DIVERGED = (
        "diverged",
        "Not asked: the prompt begins like a pin and differs before the pin's end; vLLM's prefix cache has what is "
        "held of it.",
    )
    PREFIX_CACHE = "prefix_cache", "Not asked: nothing is held beyond vLLM's prefix-cache hit."
    NO_SESSION = "no_session", "Not asked, or asked in vain: no daemon, or the session broke."
    LATE = "late", "The daemon did not answer in time; lookups miss at once until it answers."
    BREAKER_OPEN = "breaker_open", "Not asked, because of such a lookup before."
    FAILED = "failed", "Not asked again: a load of this request has failed."
    NOT_CACHEABLE = (
        "not_cacheable",
        "Not asked: its KV cannot be distinguished from other KV (an adapter loaded in place).",
    )
    OVER_LIMIT = "over_limit", "Not asked: it has more chunks than one message may name."


LOOKUPS = counter("connector_lookups", "Lookup rounds of requests, by how they ended.", result=tuple(LookupEnd))
ANSWER_SECONDS = histogram(
    "connector_answer_seconds", "From an Acquire sent to the daemon's first answer in the scheduler.", _WAIT_S
)
PROMOTION_WAIT_SECONDS = histogram(
    "connector_promotion_wait_seconds", "How long requests waited for promotions after the first answer.", _WAIT_S
)
PREFILL_WAITS = counter(
    "connector_prefill_waits",
    "Requests of a decode engine that waited for what a prefill engine stores, by whether it came in time.",
    result=("came", "late"),
)
PREFILL_WAIT_SECONDS = histogram(
    "connector_prefill_wait_seconds", "How long these requests waited, if what they waited for came.", _WAIT_S
)
LOADED_CHUNKS = counter(
    "connector_loaded_chunks", "Chunks given to the workers to load, by the tier they came from.", tier=("host", "disk")
)
PUBLIC_CHUNKS = counter(
    "connector_public_chunks",
    "Of the loaded chunks those of public prompts that were for requests with a cache salt.",
)
FAILED_LOADS = counter("connector_failed_loads", "Requests of which a load failed; vLLM computed their tokens.")
STORED_CHUNKS = counter("connector_stored_chunks", "Chunks that all workers were done with writing for the daemon.")
UNSTORED_CHUNKS = counter("connector_unstored_chunks", "Chunks not stored because no arena slot was granted in time.")
WARM_REQUESTS = counter(
    "connector_warm_requests", "Requests of the warm start, or of `kvtier warm`, that reached the scheduler."
)
WARMED_TOKENS = counter("connector_warmed_tokens", "Tokens that were given to the workers to load for them.")
WARM_FAILURES = counter(
    "connector_warm_failures", "Prompts that the warm start could not warm: its request was refused, or not answered."
)
REQUEST_INSTRUCTIONS = counter(
    "connector_request_instructions",
    "Requests with instructions for kvtier, by what became of them: pinned; refused by the daemon; unanswered, because "
    "there is no daemon, too many wait, or a LoRA adapter is not known; too short for a chunk; nothing stored, as "
    "asked; invalid, and ignored.",
    result=tuple(InstructionEnd),
)
KV_HINTS = counter(
    "connector_kv_hints",
    "KV hints of orchestrators, by action and by what became of them. `deferred` was not done and may be sent again.",
    action=("pin", "retain", "prefetch", "demote", "other"),
    outcome=("accepted", "clipped", "deferred", "rejected", "missing"),
)
ATTACHED = gauge("connector_attached", "1 while the engine has a session with the daemon; as of its last step.")

OBSERVED_REQUESTS = counter(
    "connector_observed_requests", "Requests whose beginnings were reported to the daemon, which finds what repeats."
)
SKIPPED_REQUESTS = counter(
    "connector_skipped_requests", "Requests whose beginnings were not: more came than the engine looks at, a sample."
)
KNOWS_USER_TURN = gauge(
    "connector_knows_user_turn",
    "1 when the end of a system prompt is known from the chat template; 0: fixed lengths stand in.",
)

ANNOUNCED_BLOCKS = gauge(
    "connector_announced_blocks",
    "Blocks of pinned prompts in host memory of which routers know, by vLLM's KV cache events; 0 without these.",
)

GPU_PINNED_BLOCKS = gauge(
    "connector_gpu_pinned_blocks",
    "Blocks of pinned prompts that `gpu_pin` keeps in vLLM's prefix cache, if they get there.",
)
GPU_RESIDENT_BLOCKS = gauge(
    "connector_gpu_resident_blocks", "Those of them that vLLM has, as counted over the last steps."
)
GPU_HELD_BLOCKS = gauge("connector_gpu_held_blocks", 'With `gpu_pin = "hard"`: those that kvtier holds a reference to.')
GPU_MOVES = counter(
    "connector_gpu_moves", "Pinned blocks moved to the end of vLLM's free queue, so that it evicts others."
)
GPU_RELEASED = counter(
    "connector_gpu_released", "References to pinned blocks released because requests needed the blocks."
)
PASSED_REQUESTS = counter(
    "connector_passed_requests",
    "Requests whose prompt had to be loaded, for which vLLM had too few blocks, and which let later ones pass that "
    "needed few.",
)

METRICS = (
    LOOKUPS,
    ANSWER_SECONDS,
    PROMOTION_WAIT_SECONDS,
    PREFILL_WAITS,
    PREFILL_WAIT_SECONDS,
    LOADED_CHUNKS,
    PUBLIC_CHUNKS,
    FAILED_LOADS,
    STORED_CHUNKS,
    UNSTORED_CHUNKS,
    WARM_REQUESTS,
    WARMED_TOKENS,
    WARM_FAILURES,
    REQUEST_INSTRUCTIONS,
    KV_HINTS,
    ATTACHED,
    OBSERVED_REQUESTS,
    SKIPPED_REQUESTS,
    KNOWS_USER_TURN,
    ANNOUNCED_BLOCKS,
    GPU_PINNED_BLOCKS,
    GPU_RESIDENT_BLOCKS,
    GPU_HELD_BLOCKS,
    GPU_MOVES,
    GPU_RELEASED,
    PASSED_REQUESTS,
)
