"""A fleet of made-up prompts, engines and requests, as values of the library: what the stub of the API answers."""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvtier.library.values.outcome_values import (
    Explanation,
    NearBinding,
    NearPrompt,
    OutcomeCount,
    PinUsage,
    RecentRequest,
    RequestOutcome,
)
from kvtier.library.values.proof_values import Readiness, WaitingPrompt
from kvtier.library.values.public_values import (
    Advice,
    AdvisedPrefix,
    Binding,
    ChangingPlace,
    DaemonStatus,
    EngineStatus,
    Namespace,
    NamespaceAdvice,
    PinUse,
    Prompt,
    PromptState,
    Tier,
    Verdict,
)
from kvtier.library.values.remote_values import RemoteSpending, RemoteStatus

GIB = 1 << 30
CHUNK_TOKENS = 64
ROW_BYTES = 1_048_576
MODEL = "Qwen/Qwen3-32B"
NAMESPACE = "8214bc77ee36f0a1c55d"
NAMES = (
    "support-bot", "billing-agent", "code-review", "legal-summaries", "translator-fr", "translator-ja", "onboarding",
    "sales/outreach", "sales/qualify", "triage", "sql-assistant", "release-notes", "incident-commander", "hr-policies",
    "contract-review", "meeting-notes", "research-agent", "shopping-guide", "fraud-screening", "docs-search",
    "claims-intake", "travel-desk", "kyc-checks", "auto-3f9a1c2b",
)  # fmt: skip
TEXTS = (
    """You are the support agent of Acme Cloud.
Answer in the language of the customer.
Today is 2026-07-01.
If a command fails, say so and open a case.
Never promise a refund; hand over to billing instead.
Use the tools below before you ask the customer for facts that we already have.""",
    """You are the support agent of Acme Cloud.
Answer in the language of the customer, in at most five sentences.
Today is 2026-07-02.
If a command fails, say so and open a case with severity 3.
Never promise a refund; hand over to billing instead.
Use the tools below before you ask the customer for facts that we already have.
Close with one question about whether that helped.""",
)
_STATES = {
    3: PromptState.CAPTURING, 9: PromptState.WAITING, 14: PromptState.OVER_QUOTA, 17: PromptState.STALE,
    20: PromptState.REFUSED,
}  # fmt: skip


def recipe(text: str) -> dict[str, Any]:
    """Return the stored source of a system prompt."""
    return {"version": 1, "kind": "system", "content": text}


def prompts(now_s: float, count: int = len(NAMES)) -> list[Prompt]:
    """Return that many prompts; the first ones have names that people would choose."""
    draw = random.Random(7)
    names = [NAMES[i] if i < len(NAMES) else f"tenant-{i:05d}/assistant" for i in range(count)]
    made = [_prompt(name, index, now_s, draw) for index, name in enumerate(names)]
    old = replace(
        made[0], name="support-bot@1", pin_id="pin-old", pinned=False, num_tokens=2891, recipe=recipe(TEXTS[0]),
        created_unix_s=now_s - 40 * 86_400,
    )  # fmt: skip
    return [*made, old] if count else []


def _prompt(name: str, index: int, now_s: float, draw: random.Random) -> Prompt:
    num_tokens = draw.choice((1200, 3027, 4811, 8120, 16_384, 40_960))
    num_chunks = num_tokens // CHUNK_TOKENS
    state = _STATES.get(index, PromptState.DURABLE)
    share = {PromptState.CAPTURING: 0.6, PromptState.OVER_QUOTA: 0.4}.get(state, 1.0)
    num_durable = 0 if state in (PromptState.WAITING, PromptState.REFUSED) else int(share * num_chunks)
    num_host = int(num_durable * draw.choice((0.0, 0.35, 1.0, 1.0)))
    hits = 0 if not num_durable else int(draw.lognormvariate(4, 2))
    is_auto = name.startswith("auto-")
    binding = Binding(
        namespace_id=NAMESPACE, model=MODEL, covered_tokens=num_chunks * CHUNK_TOKENS, num_chunks=num_chunks,
        num_host_chunks=num_host, num_durable_chunks=num_durable, raw_bytes=num_chunks * ROW_BYTES,
        disk_bytes=int(num_durable * ROW_BYTES / 1.48), live=True, durable_raw_bytes=num_durable * ROW_BYTES,
        num_shared_chunks=4 if index % 5 == 0 else 0, disk_share_bytes=int(num_durable * ROW_BYTES / 1.6),
        ephemeral=False,
    )  # fmt: skip
    others = [
        OutcomeCount(outcome=RequestOutcome.DIVERGED, num_requests=hits // 19),
        OutcomeCount(outcome=RequestOutcome.PART, num_requests=hits // 31),
    ]
    usage = PinUsage(
        num_hits=hits, last_hit_unix_s=now_s - 60 * index if hits else 0.0,
        last_used_unix_s=now_s - 60 * index if hits else 0.0, device_tokens=hits * num_tokens // 3,
        host_tokens=hits * num_tokens // 2, disk_tokens=hits * num_tokens // 9,
        saved_prefill_s=hits * num_tokens / 9000.0, others=tuple(each for each in others if each.num_requests),
    )  # fmt: skip
    return Prompt(
        name=name, pin_id=f"pin-{index:05d}", pinned=index % 11 != 10, state=state, model=MODEL, lora_name="",
        cache_salt="", num_tokens=num_tokens, created_unix_s=now_s - 86_400 * (1 + index % 30),
        expires_unix_s=now_s + 7 * 86_400 if index % 3 == 1 else 0.0, bindings=(binding,) if num_durable else (),
        recipe=recipe(TEXTS[1]), num_engines=2, num_confirmed=0 if state is PromptState.WAITING else 2,
        tokens_digest=f"{draw.getrandbits(128):032x}", priority=(0, 10, 0, -20)[index % 4], public=index % 7 == 0,
        error="it has 40960 tokens, and this vLLM takes 32768" if state is PromptState.REFUSED else "",
        origin="auto" if is_auto else "named", owner=("support", "sales", "platform", "")[index % 4],
        use=PinUse(num_requests=0, saved_tokens=0, saved_s=0.0, last_used_unix_s=0.0), replacement="",
        labels={"team": ("support", "sales", "platform")[index % 3]} | ({"tier": "gold"} if index % 6 == 0 else {}),
        ttl_s=7 * 86_400 if index % 3 == 1 else 0, sliding=index % 6 == 1, source_digest=f"{index:032x}", usage=usage,
        computed_elsewhere=False,
    )  # fmt: skip


def chunk_bytes(prompt: Prompt) -> bytes:
    """Return the chunk map of a prompt; see `ChunkMap`."""
    binding = prompt.bindings[0]
    places = bytearray(binding.num_chunks)
    for index in range(binding.num_chunks):
        on_disk = index < binding.num_durable_chunks
        places[index] = on_disk + 2 * (index < binding.num_host_chunks)
    return bytes(places)


def status(now_s: float, known: Sequence[Prompt], *, engines: bool = True, breaker: str = "") -> DaemonStatus:
    """Return the daemon's status."""
    namespace = Namespace(
        namespace_id=NAMESPACE, model=MODEL, num_host_chunks=11_322, num_disk_chunks=58_211, disk_bytes=41 * GIB,
        row_bytes=ROW_BYTES, fingerprint={}, live=engines, seen_unix_s=now_s, quarantine_reason="",
        quarantined_unix_s=0.0,
    )  # fmt: skip
    sessions = [
        EngineStatus(
            session_id=f"s{index}", engine_id=f"e{index}", pid=4211 + index, namespace_id=NAMESPACE,
            model_names=(MODEL,), attached_unix_s=now_s - 7200 * (1 + index), num_leases=96 * index,
            num_store_grants=12, quarantined=False, num_acquires=index,
        )
        for index in range(2 if engines else 0)
    ]  # fmt: skip
    old = replace(namespace, namespace_id="1c09d2e4b7aa", model="Qwen/Qwen3-8B", live=False, disk_bytes=3 * GIB)
    host = Tier(
        location="/dev/shm/kvtier", used_bytes=27 * GIB, limit_bytes=32 * GIB, num_chunks=11_322,
        pinned_bytes=19 * GIB, breaker_open_reason="",
    )  # fmt: skip
    disk = Tier(
        location="/var/lib/kvtier", used_bytes=44 * GIB, limit_bytes=200 * GIB, num_chunks=58_211,
        pinned_bytes=31 * GIB, breaker_open_reason=breaker,
    )  # fmt: skip
    return DaemonStatus(
        version="0.1.0", pid=3900, started_unix_s=now_s - 3 * 86_400, socket="/run/kvtier/kvtier.sock", host=host,
        disk=disk, disk_keys=(), sessions=tuple(sessions), namespaces=(namespace, old), num_prompts=len(known),
        num_pinned=sum(each.pinned for each in known), store="pinned", prompt_bytes=8_000_000,
        counters={
            "packs_written": 1822, "disk_written_bytes_write_back": 52 * GIB, "pack_fsyncs": 1911,
            "packs_compacted": 40, "disk_written_bytes_compaction": 2 * GIB, "scrub_passes": 3,
            "damaged_chunks_disk": 2, "io_errors_disk_read": 1,
            "prompt_tokens_device": 41_000_000, "prompt_tokens_host": 28_300_000, "prompt_tokens_disk": 3_100_000,
            "prompt_tokens_computed": 29_000_000, "saved_prefill_seconds": 5081, "requests_hit": 8112,
            "hit_chunks_host": 120_411, "hit_chunks_disk": 9120,
        },
        http_url="http://127.0.0.1:9464", http_problem="",
    )  # fmt: skip


def readiness(known: Sequence[Prompt]) -> Readiness:
    """Return which pinned prompts can be restored."""
    whys = {
        PromptState.CAPTURING: "28 of 47 chunks are on disk",
        PromptState.WAITING: "no engine has recognized it yet",
        PromptState.OVER_QUOTA: "disk.bytes is used up, or the file system is full",
        PromptState.STALE: "durable for engines of before",
        PromptState.REFUSED: "it has 40960 tokens, and this vLLM takes 32768",
    }
    pinned = [each for each in known if each.pinned and each.origin == "named"]
    bad = [
        WaitingPrompt(name=each.name, state=each.state, why=whys[each.state]) for each in pinned if each.state in whys
    ]
    return Readiness(ready=not bad, num_prompts=len(pinned), num_ready=len(pinned) - len(bad), waiting=tuple(bad[:100]))


def requests(now_s: float, known: Sequence[Prompt]) -> list[RecentRequest]:
    """Return requests that ended lately, the last first."""
    draw = random.Random(3)
    named = [each for each in known if each.bindings][:12]
    outcomes = [RequestOutcome.HIT] * 16 + [RequestOutcome.PART] * 2 + [
        RequestOutcome.DIVERGED, RequestOutcome.UNKNOWN, RequestOutcome.NOT_STORED, RequestOutcome.LATE,
        RequestOutcome.TOO_SHORT,
    ]  # fmt: skip
    return [_request(now_s - 2.3 * index, draw, draw.choice(named), draw.choice(outcomes)) for index in range(240)]


def _request(ended_unix_s: float, draw: random.Random, prompt: Prompt, outcome: RequestOutcome) -> RecentRequest:
    share = {RequestOutcome.HIT: 1.0, RequestOutcome.PART: 0.5, RequestOutcome.DIVERGED: 0.2}.get(outcome, 0.0)
    shared = int(prompt.num_tokens * share) // CHUNK_TOKENS * CHUNK_TOKENS
    device = shared * draw.choice((0, 0, 1, 3)) // 3
    disk = (shared - device) * draw.choice((0, 0, 1)) // 2
    is_named = outcome not in (RequestOutcome.UNKNOWN, RequestOutcome.TOO_SHORT)
    return RecentRequest(
        request_id=f"chatcmpl-{draw.getrandbits(96):024x}", outcome=outcome, pin_id=prompt.pin_id if is_named else "",
        pin_name=prompt.name if is_named else "", prompt_tokens=prompt.num_tokens + draw.randrange(20, 600),
        shared_tokens=shared, device_tokens=device, host_tokens=shared - device - disk, disk_tokens=disk,
        ended_unix_s=ended_unix_s, namespace_id=NAMESPACE,
    )  # fmt: skip


def advice(now_s: float) -> Advice:
    """Return what is worth a pin."""

    def prefix(num_tokens: int, verdict: Verdict, pin: str, rate: float) -> AdvisedPrefix:
        return AdvisedPrefix(
            digest=num_tokens.to_bytes(16, "big"), num_tokens=num_tokens, is_system_prompt=num_tokens != 2048,
            verdict=verdict, pin_name=pin, requests_per_hour=rate, num_prompts=int(rate * 3),
            last_seen_unix_s=now_s - 20, added_tokens=num_tokens, added_bytes=num_tokens * 11_000,
            saved_s_per_hour=rate * num_tokens / 9000, saved_share=0.1,
        )  # fmt: skip

    return Advice(
        mode="pin",
        max_bytes=8 * GIB,
        namespaces=(
            NamespaceAdvice(
                namespace_id=NAMESPACE, model=MODEL, requests_per_hour=1840.0, prompt_tokens_per_hour=9.1e6,
                chosen_bytes=GIB, saved_s_per_hour=811.0, saved_share=0.62,
                prefixes=(
                    prefix(6144, Verdict.CHOSEN, "auto-3f9a1c2b", 412.0),
                    prefix(3027, Verdict.NAMED, "support-bot", 290.0),
                    prefix(2048, Verdict.CONTAINED, "", 433.0),
                    prefix(1890, Verdict.TOO_FEW_REQUESTS, "", 3.0),
                    prefix(31_000, Verdict.OVER_BUDGET, "", 11.0),
                ),
                places=(
                    ChangingPlace(
                        num_stable_tokens=220, num_tokens=4811, num_prompts=41, before=" it \nToday is 2026-07-0",
                        examples=("1.", "2.", "3."), seen_unix_s=now_s - 90,
                    ),
                ),
            ),
        ),
    )  # fmt: skip


def explanation(prompt: Prompt, request: RecentRequest | None) -> tuple[Explanation, dict[str, Any] | None]:
    """Return why a request differs from a prompt, and where."""
    near = NearPrompt(
        name=prompt.name, pin_id=prompt.pin_id, pinned=True, num_tokens=prompt.num_tokens, shared_tokens=220,
        differs_at=220, differs_in=(),
        bindings=(
            NearBinding(
                namespace_id=NAMESPACE, model=MODEL, live=True, bound=True, shared_tokens=192, lost_tokens=28,
                num_host_chunks=3, num_disk_chunks=0, num_missing_chunks=0, differing_fields=(), missing=(),
            ),
        ),
    )  # fmt: skip
    reason = (
        f"it begins like '{prompt.name}' and differs from token 220 on; what follows is computed: move what changes "
        "behind the pinned prompt, or pin it again as it is now"
    )
    made = Explanation(
        outcome=RequestOutcome.DIVERGED, reason=reason, prompts=(near,), request=request, last_request=None
    )
    difference = {
        "name": prompt.name, "before": "… it \nToday is 2026-07-0", "in_request": "2.\nIf a command fails, say so…",
        "in_prompt": "1.\nIf a command fails, say so…", "looks_like": "DATE",
    }  # fmt: skip
    return made, difference


def remote(now_s: float) -> RemoteStatus:
    """Return how the daemon stands with a store that hosts share."""
    spending = RemoteSpending(
        num_reads=4102, num_writes=811, num_lists=920, num_deletes=12, num_failed=0, bytes_up=9 * GIB,
        bytes_down=3 * GIB, dollars=0.41,
    )  # fmt: skip
    return RemoteStatus(
        url="s3://kv-shared/prod", host="gpu-07", problem="", looked_unix_s=now_s - 4, clock_offset_s=0.02,
        num_pins=22, num_kv_objects=118, kv_bytes=37 * GIB, num_waiting_pins=0, num_uploaded=9, num_restored=4,
        num_conflicts=0, refused=(), spending=spending, hosts=(),
    )  # fmt: skip


def traffic(now_s: float, span_s: int) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield what requests had from where, by second or by minute: what an afternoon looks like."""
    step_s = 1 if span_s <= 3600 else 60
    draw = random.Random(5)
    for index in range(span_s // step_s):
        at_s = now_s - span_s + index * step_s
        load = 900 * step_s * (1.2 + math.sin(at_s / 5200)) * draw.uniform(0.7, 1.3)
        warm = 0.55 + 0.25 * math.sin(at_s / 900)
        yield at_s, {
            "device": load * warm * 0.5, "host": load * warm * 0.4, "disk": load * warm * 0.1,
            "computed": load * (1 - warm),
        }  # fmt: skip


def now() -> float:
    """Return seconds since 1970."""
    return time.time()
