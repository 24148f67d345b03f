"""Explains why a request was restored what it was, and what a request with some tokens would get now."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvtier.concurrency.turns import Breather, slices
from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.fingerprint import differing_fields
from kvtier.core.layout import ChunkKey, GroupLayout, KVLayout, group_idx_of
from kvtier.core.requests.request_outcomes import MEANINGS, RequestOutcome
from kvtier.core.tokens import TokenIds
from kvtier.errors import RequestNotFoundError
from kvtier.ledger import BindingRow, PromptRow
from kvtier.outcomes.missing_chunks import MissingChunks, why_missing
from kvtier.outcomes.outcome_book import OutcomeBook
from kvtier.outcomes.recent_requests import EndedRequest
from kvtier.prompts.book import PromptBook
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

MAX_NEAR_PROMPTS = 5
_SHORT_ID = 12
"""Characters that commands show of a namespace's id, and understand."""


MaySee = Callable[[PromptRow | None], bool]
"""Says whether a prompt exists for the caller; None: one that is not known any longer."""


@dataclass(frozen=True, kw_only=True)
class AskedPrompt:
    """The prompt of a request that could come; what is empty is not known (model), or not there."""

    tokens: TokenIds = field(repr=False)
    model: str = ""
    lora_name: str = ""
    cache_salt: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True)
class NearBinding:
    """NearBinding of proto/kvtier/v1/cache.proto; the meanings stand there."""

    namespace_id: str
    model: str
    live: bool
    bound: bool
    shared_tokens: int
    lost_tokens: int
    num_host_chunks: int = 0
    num_disk_chunks: int = 0
    num_missing_chunks: int = 0
    differing_fields: Sequence[str] = ()
    missing: Sequence[MissingChunks] = ()


@dataclass(frozen=True, kw_only=True)
class NearPrompt:
    """NearPrompt of proto/kvtier/v1/cache.proto; `is_whole`: the request begins with all of its whole chunks."""

    prompt: PromptRow
    shared_tokens: int
    is_whole: bool = False
    differs_at: int | None = None
    differs_in: Sequence[str] = ()
    bindings: Sequence[NearBinding] = ()


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Explanation of proto/kvtier/v1/cache.proto; `pin_name`: now, of the pin of both requests."""

    outcome: RequestOutcome
    reason: str
    prompts: Sequence[NearPrompt] = ()
    request: EndedRequest | None = None
    last_request: EndedRequest | None = None
    pin_name: str = ""


class Explainer:
    """Reads what the daemon knows, changes nothing. Loop thread only.

    Args:
        resources: The disk's health, and why chunks were lost.
        prompts: All prompts.
        namespaces: By id; they come and go.
        live_sessions: Returns the engines attached now.
        outcomes: What became of requests.
    """

    def __init__(
        self,
        resources: Resources,
        prompts: PromptBook,
        namespaces: Mapping[str, Namespace],
        live_sessions: Callable[[], Sequence[Session]],
        outcomes: OutcomeBook,
    ) -> None:
        self._resources, self._prompts, self._namespaces = resources, prompts, namespaces
        self._live_sessions, self._outcomes = live_sessions, outcomes

    def name_of(self, pin_id: str) -> str:
        """Return the name that a pin has now; empty when there is none."""
        prompt = self._prompts.by_pin_id(pin_id)
        return "" if prompt is None else prompt.name

    def explain_request(self, request_id: str, may_see: MaySee = lambda prompt: True) -> Explanation:
        """Explain what an engine has reported of a request; `may_see`: whether its pin exists for the caller.

        Raises:
            RequestNotFoundError: No recent request has this id.
        """
        request = self._outcomes.recent.find(request_id)
        prompt = self._prompts.by_pin_id(request.pin_id)
        if not may_see(prompt):
            raise RequestNotFoundError(request_id, len(self._outcomes.recent))
        return Explanation(
            outcome=request.outcome,
            reason=MEANINGS[request.outcome],
            prompts=[] if prompt is None else [NearPrompt(prompt=prompt, shared_tokens=request.shared_tokens)],
            request=request,
            pin_name=self.name_of(request.pin_id),
        )

    async def explain(self, asked: AskedPrompt, may_see: MaySee = lambda prompt: True) -> Explanation:
        """Explain what a request would get now; ten thousand prompts are compared, in turns of the loop.

        `may_see` says whether a prompt exists for the caller; others are passed over.
        """
        engines = [each for each in self._live_sessions() if not asked.model or asked.model in each.hello.model_names]
        live = {session.namespace_id: session.namespace for session in engines}
        chunk_tokens = min((_prefix_group(each.layout).chunk_tokens for each in live.values()), default=1)
        near = await self._nearest(asked, chunk_tokens, may_see)
        near = [await self._with_bindings(each, live) for each in near]
        if not live:
            remedy = "no engine of this model is attached: start vLLM with the kvtier connector"
            return Explanation(outcome=RequestOutcome.NO_SESSION, reason=remedy, prompts=near)
        if len(asked.tokens) <= chunk_tokens:
            reason = f"the prompt has {len(asked.tokens)} tokens; a chunk has {chunk_tokens}, and one more is computed"
            return Explanation(outcome=RequestOutcome.TOO_SHORT, reason=reason, prompts=near)
        decides = _deciding(near, chunk_tokens)
        if decides is None:
            outcome, reason = _judge_unusable(near, chunk_tokens)
            return Explanation(outcome=outcome, reason=reason, prompts=near)
        outcome, reason = self._judge(decides, live)
        return Explanation(
            outcome=outcome,
            reason=reason,
            prompts=near,
            last_request=self._outcomes.recent.last_of(decides.prompt.pin_id),
            pin_name=decides.prompt.name,
        )

    # Prompts that begin alike

    async def _nearest(self, asked: AskedPrompt, chunk_tokens: int, may_see: MaySee) -> list[NearPrompt]:
        """Return those that share the most, and among them the longest with which the request begins as a whole."""
        breather, found = Breather(), list[NearPrompt]()
        for prompt in self._prompts:
            await breather.pause()
            num_shared = prompt.token_ids.num_shared(asked.tokens) if may_see(prompt) else 0
            if not num_shared:
                continue
            end = min(len(prompt.tokens), len(asked.tokens))
            whole = len(prompt.tokens) // chunk_tokens * chunk_tokens
            found.append(
                NearPrompt(
                    prompt=prompt,
                    shared_tokens=num_shared,
                    is_whole=0 < whole <= num_shared,
                    differs_at=num_shared if num_shared < end else None,
                    differs_in=_differs_in(prompt, asked),
                )
            )
        nearness = partial(_nearness, chunk_tokens)
        share_chunks = [each for each in found if each.shared_tokens >= chunk_tokens]
        # Of those that share less than a chunk, the nearest shows at least where they differ.
        nearest = heapq.nlargest(MAX_NEAR_PROMPTS if share_chunks else 1, share_chunks or found, key=nearness)
        decisive = _decisive(found)
        if decisive and decisive[0] not in nearest:
            nearest[-1] = decisive[0]
        return nearest

    async def _with_bindings(self, near: NearPrompt, live: Mapping[str, Namespace]) -> NearPrompt:
        prompt = near.prompt
        rows = {row.namespace_id: row for row in self._prompts.bindings_of(prompt.pin_id)}
        serving = {each.namespace_id for each in self._live_sessions() if each.serves(prompt)}
        known = (self._namespaces.get(each) for each in dict.fromkeys([*(serving & live.keys()), *rows]))
        namespaces = [each for each in known if each is not None]
        bindings = [await self._binding(each, rows.get(each.namespace_id), near, live) for each in namespaces]
        return replace(near, bindings=bindings)

    async def _binding(
        self, namespace: Namespace, row: BindingRow | None, near: NearPrompt, live: Mapping[str, Namespace]
    ) -> NearBinding:
        group = _prefix_group(namespace.layout)
        shared_tokens = near.shared_tokens // group.chunk_tokens * group.chunk_tokens
        if row is not None:
            shared_tokens = min(shared_tokens, row.covered_tokens)
        others = [each for each in live.values() if each.row.model == namespace.row.model and each is not namespace]
        differing = differing_fields(namespace.fingerprint, others[0].fingerprint) if others else []
        num_host = num_disk = 0
        missing: Sequence[MissingChunks] = []
        if row is None:
            if num_chunks := shared_tokens // group.chunk_tokens:
                missing = [MissingChunks(cause=MissingCause.NOT_RECORDED, num_chunks=num_chunks)]
        else:
            is_all = shared_tokens == row.covered_tokens
            keys = row.keys if is_all else _prefix_keys(row, group)[: shared_tokens // group.chunk_tokens]
            breather, absent = Breather(), list[ChunkKey]()
            for part in slices(keys):
                await breather.pause()
                chunks = namespace.table.get_all(part)
                held = [chunk for chunk in chunks if chunk is not None and chunk.held]
                in_host = sum(chunk.readable and not chunk.eviction_pending for chunk in held)
                num_host += in_host
                num_disk += len(held) - in_host
                absent += [key for key, chunk in zip(part, chunks, strict=True) if chunk is None or not chunk.held]
            missing = await why_missing(self._resources.lost_chunks, namespace.namespace_id, absent)
        return NearBinding(
            namespace_id=namespace.namespace_id,
            model=namespace.row.model,
            live=namespace.namespace_id in live,
            bound=row is not None,
            shared_tokens=shared_tokens,
            lost_tokens=near.shared_tokens - shared_tokens,
            num_host_chunks=num_host,
            num_disk_chunks=num_disk,
            num_missing_chunks=sum(each.num_chunks for each in missing),
            differing_fields=[] if namespace.namespace_id in live else differing,
            missing=missing,
        )

    # The outcome

    def _judge(self, pin: NearPrompt, live: Mapping[str, Namespace]) -> tuple[RequestOutcome, str]:
        if pin.is_whole or pin.differs_at is None:  # or the request ends within the pin
            return self._judge_whole(pin, live)
        return RequestOutcome.DIVERGED, (
            f"it begins like {pin.prompt.name!r} and differs from token {pin.differs_at} on; what follows is "
            "computed: move what changes behind the pinned prompt, or pin it again as it is now"
        )

    def _judge_whole(self, pin: NearPrompt, live: Mapping[str, Namespace]) -> tuple[RequestOutcome, str]:
        """Judge a pin with which the request begins, by the namespace of an engine that has the most of it."""
        name = pin.prompt.name
        bound = [each for each in pin.bindings if each.live and each.bound]
        if not bound:
            elsewhere = [each for each in pin.bindings if each.bound and each.differing_fields and _num_held(each)]
            if elsewhere:
                fields = ", ".join(elsewhere[0].differing_fields)
                return RequestOutcome.NOT_STORED, f"{name!r} is held for engines that differ in {fields} only"
            return RequestOutcome.NOT_STORED, f"no engine has recognized {name!r} yet; `kvtier show {name}` says why"
        served = [each for each in bound if live[each.namespace_id].quarantine is None]
        if not served:
            return RequestOutcome.QUARANTINED, _why_quarantined(live[bound[0].namespace_id])
        sharing = [each for each in served if each.shared_tokens]  # others lack no chunk, and restore none
        if not sharing:
            reason = f"what it shares with {name!r} is less than one chunk of the engines that have recognized that"
            return RequestOutcome.NOT_STORED, reason
        best = min(sharing, key=lambda each: (each.num_missing_chunks, each.num_disk_chunks))
        if best.num_disk_chunks and not self._resources.disk_health.readable:
            return RequestOutcome.DISK_OFF, f"the disk is switched off after errors; parts of {name!r} are only there"
        if not best.num_missing_chunks:
            where = "on disk" if best.num_disk_chunks else "in host memory"
            return RequestOutcome.HIT, f"all that it shares with {name!r} is {where}, or faster to reach"
        remedy = f"`kvtier pin` again, or the next request, stores the rest of {name!r}"
        if _num_held(best):
            why = _why("they were", best.missing)
            return RequestOutcome.PART, f"{best.num_missing_chunks} chunks are not stored{why}; {remedy}"
        return RequestOutcome.NOT_STORED, f"nothing of it is stored{_why('it was', best.missing)}; {remedy}"


def _num_held(binding: NearBinding) -> int:
    return binding.num_host_chunks + binding.num_disk_chunks


def _why_quarantined(namespace: Namespace) -> str:
    quarantine, short_id = namespace.quarantine, namespace.namespace_id[:_SHORT_ID]
    assert quarantine is not None
    remedy = f"`kvtier quarantine {short_id} --release` serves it again"
    return f"its namespace is quarantined, and vLLM computes everything ({quarantine.reason}); {remedy}"


def _judge_unusable(near: Sequence[NearPrompt], chunk_tokens: int) -> tuple[RequestOutcome, str]:
    other = next((each for each in near if each.differs_in and each.shared_tokens >= chunk_tokens), None)
    if other is None:
        return RequestOutcome.UNKNOWN, "it begins like no prompt that kvtier knows; `kvtier pin` pins one"
    differs_in = ", ".join(other.differs_in)
    return RequestOutcome.UNKNOWN, f"it begins like {other.prompt.name!r}, which has another {differs_in}"


def _why(subject: str, missing: Sequence[MissingChunks]) -> str:
    """Return the rest of a sentence about missing chunks, if all are missing for one cause that is known."""
    (cause, *others) = [each.cause for each in missing]
    if others or cause is MissingCause.NOT_RECORDED:
        return ""
    return f": {subject} {cause.replace('_', ' ')}"


def _decisive(found: Sequence[NearPrompt]) -> list[NearPrompt]:
    """Return the longest prompt that the request begins with and may be restored, if there is one."""
    whole = [each for each in found if each.is_whole and not each.differs_in]
    return [max(whole, key=lambda each: (len(each.prompt.tokens), each.prompt.pinned))] if whole else []


def _deciding(near: Sequence[NearPrompt], chunk_tokens: int) -> NearPrompt | None:
    """Return the prompt by which the request is judged: that one, or else the nearest that may be restored."""
    usable = [each for each in near if not each.differs_in and each.shared_tokens >= chunk_tokens]
    return next(iter(_decisive(usable)), None) or max(usable, key=partial(_nearness, chunk_tokens), default=None)


def _nearness(chunk_tokens: int, near: NearPrompt) -> tuple[int, bool, bool, int, str]:
    """Return what orders prompts: of those that share as many chunks, the pinned ones come first."""
    num_chunks = near.shared_tokens // chunk_tokens
    return num_chunks, not near.differs_in, near.prompt.pinned, near.shared_tokens, near.prompt.name


def _differs_in(prompt: PromptRow, asked: AskedPrompt) -> list[str]:
    differs = {
        "model": bool(asked.model) and prompt.model not in ("", asked.model),
        "lora_name": prompt.lora_name != asked.lora_name,
        "cache_salt": prompt.cache_salt != asked.cache_salt and not prompt.public,
    }
    return [field for field, is_other in differs.items() if is_other]


def _prefix_group(layout: KVLayout) -> GroupLayout:
    """Return the group by whose chunks a prompt is looked up: the first of full attention, else the first."""
    return next((group for group in layout.groups if not group.window_chunks), layout.groups[0])


def _prefix_keys(row: BindingRow, group: GroupLayout) -> Sequence[bytes]:
    return [key for key in row.keys if group_idx_of(key) == group.group_idx]
