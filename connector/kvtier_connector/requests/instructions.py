"""Carries out what requests ask: `kv_transfer_params["kvtier"]` of clients, `kv_hints` of orchestrators."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.core.layout import ChunkKey
from kvtier.core.limits import MAX_KEYS, MAX_TOKENS, TEXT
from kvtier.core.requests.request_instructions import (
    PARAMETER,
    Breakpoint,
    InstructionEnd,
    RequestInstructions,
    longer_ttl,
    read_instructions,
)
from kvtier.errors import InvalidArgumentError
from kvtier_connector.engine.chunk_keys import GroupShape, reachable_keys
from kvtier_connector.engine.lora.adapter_digests import Adapter
from kvtier_connector.metrics.declared import KV_HINTS, REQUEST_INSTRUCTIONS
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.outcomes.request_account import RequestAccount
from kvtier_connector.requests.kv_hints import Action, Hint, Outcome, read_hints
from kvtier_connector.requests.pin_asks import AskEnd, PinAsk, PinAsks
from kvtier_connector.requests.prefixes import Prefix, chunks_of, prefix_of

logger = logging.getLogger(__name__)

WAITING = "waiting"
"""In an answer: the daemon has not agreed yet."""
_LOG_PERIOD_S = 10.0
_PARAMETER_ENDS = {
    AskEnd.PINNED: InstructionEnd.PINNED,
    AskEnd.REFUSED: InstructionEnd.REFUSED,
    AskEnd.UNANSWERED: InstructionEnd.UNANSWERED,
}
_HINT_OUTCOMES = {
    AskEnd.PINNED: Outcome.ACCEPTED,
    AskEnd.REFUSED: Outcome.REJECTED,
    AskEnd.UNANSWERED: Outcome.DEFERRED,
}


@dataclass(eq=False)
class _RequestedChunks:
    """Chunks of prefixes for which an ask is on its way, or has been answered."""

    ask: PinAsk
    prefixes: tuple[Prefix, ...]
    find: Callable[[], frozenset[ChunkKey]]
    found: frozenset[ChunkKey] | None = None

    def has(self, key: ChunkKey, is_pinned: Callable[[ChunkKey], bool]) -> bool:
        """Return whether a chunk is one of them, as long as the pins are not bound: then the mirror knows them."""
        if not self.ask.wants_chunks or all(is_pinned(prefix.last_key) for prefix in self.prefixes):
            return False
        if self.found is None:
            self.found = self.find()
        return key in self.found


@dataclass(eq=False)
class Instructed:
    """What one request asks, and what has become of it. Scheduler thread only.

    Attributes:
        request: vLLM's.
        adapter: Its LoRA adapter.
        instructions: As a client wrote them; None without, or if they are invalid.
        hints: Actions that can be tried.
        begun: They were tried.
        requested: The chunks of what is to be pinned.
        result: What became of the instructions, so far.
        device_tokens: Of the prompt, in vLLM's prefix cache when it was last looked up.
        cached_tokens: Tokens of the prompt that vLLM did not compute, by vLLM's name for their source; None before its
            first admission.
    """

    request: Any
    adapter: Adapter | None
    instructions: RequestInstructions | None = None
    hints: Sequence[Hint] = ()
    begun: bool = False
    requested: list[_RequestedChunks] = field(default_factory=list)
    result: InstructionEnd | None = None
    device_tokens: int = 0
    cached_tokens: Mapping[str, int] | None = None

    def admitted(self, from_connector: Mapping[str, int]) -> None:
        """vLLM has allocated the request's blocks; what comes after a preemption is not counted."""
        if self.cached_tokens is None:
            counts = {"device": self.device_tokens, **from_connector}
            self.cached_tokens = {source: num_tokens for source, num_tokens in counts.items() if num_tokens}

    def load_failed(self) -> None:
        """vLLM computes what the connector was to load."""
        if self.cached_tokens is not None:
            self.cached_tokens = {source: num for source, num in self.cached_tokens.items() if source == "device"}

    @property
    def no_store(self) -> bool:
        """Whether nothing of the request is stored."""
        return self.instructions is not None and self.instructions.no_store

    def report(self, account: RequestAccount) -> dict[str, Any] | None:
        """Return what the request's answer says of this, and of what it got, in `kv_transfer_params`; None: nothing.

        The parameters of another connector's protocol go from one vLLM to the next, and are left alone.
        """
        params = self.request.kv_transfer_params
        if not isinstance(params, dict) or params.keys() != {PARAMETER}:
            return None
        report: dict[str, Any] = {"cached_tokens": dict(self.cached_tokens or {})}
        if self.result is not None or self.instructions is None or self.instructions.pins:
            report["result"] = WAITING if self.result is None else self.result.value
        if self.instructions is not None and self.instructions.report:
            report |= {
                "outcome": None if account.outcome is None else account.outcome.value,
                "shared_tokens": 0 if account.share is None else account.share.num_tokens,
                "saved_tokens": account.loaded_tokens,
            }
        return {PARAMETER: report}

    def wants(self, key: ChunkKey, is_pinned: Callable[[ChunkKey], bool]) -> bool:
        """Return whether the chunk is to be stored although no pin has it yet: that is on its way."""
        return any(chunks.has(key, is_pinned) for chunks in self.requested)


class Instructions:
    """What requests ask, carried out in the current session. Scheduler thread only; never waits.

    Args:
        groups: The engine's KV cache groups.
        asks: Asks the daemon for pins.
        stats: Counts outcomes.
        is_held: Whether the daemon holds a chunk, or may hold it.
        shared_tokens: How much of a request's prompt others may share; None while that is not known yet.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape],
        asks: PinAsks,
        stats: ConnectorStats,
        is_held: Callable[[ChunkKey], bool],
        shared_tokens: Callable[[Any], int | None] = lambda request: request.num_prompt_tokens,
    ) -> None:
        self.asks = asks
        self._groups, self._stats = groups, stats
        self._is_held = is_held
        self._shared_tokens = shared_tokens
        self._attachment: Attachment | None = None
        self._log_due_s, self._num_unlogged = 0.0, 0

    def attach(self, attachment: Attachment | None) -> None:
        """Another session is up, or none."""
        self._attachment = attachment
        self.asks.attach(attachment)

    def read(self, request: Any, adapter: Adapter | None, now_s: float) -> Instructed | None:
        """Return what the request asks; None if it asks nothing, which costs two lookups."""
        params, envelope = request.kv_transfer_params, getattr(request, "kv_hints", None)
        is_asking = isinstance(params, dict) and PARAMETER in params
        if not is_asking and envelope is None:
            return None
        instructed = Instructed(request, adapter)
        if is_asking:
            try:
                instructed.instructions = read_instructions(params[PARAMETER])
            except InvalidArgumentError as error:
                self._invalid(instructed, str(error), now_s)
        if instructed.no_store:
            self._ended(instructed, InstructionEnd.NO_STORE)
        if envelope is not None:
            instructed.hints = self._usable(read_hints(envelope))
        return instructed

    def _usable(self, hints: Iterable[Hint]) -> list[Hint]:
        usable = list[Hint]()
        for hint in hints:
            if hint.problem:
                self._count_hint(hint, Outcome.REJECTED, hint.problem)
            else:
                usable.append(hint)
        return usable

    def begin(self, instructed: Instructed, adapter_digest: bytes | None, now_s: float) -> None:
        """Carry it out, once, as soon as it is known what is meant. The digest is that of the request's adapter."""
        instructions, end = instructed.instructions, instructed.request.num_prompt_tokens
        if instructions is not None and instructions.pins and not instructions.breakpoints and self._attachment:
            end = self._shared_tokens(instructed.request)
        if end is None:
            return
        instructed.begun = True
        if instructions is not None and instructions.pins:
            self._pin_as_instructed(instructed, instructions, end, adapter_digest, now_s)
        for hint in instructed.hints:
            match hint.action:
                case Action.PIN | Action.RETAIN if instructed.no_store:
                    self._count_hint(hint, Outcome.REJECTED, "the request asks that nothing of it is stored")
                case Action.PIN | Action.RETAIN:
                    self._pin_as_hinted(instructed, hint, adapter_digest, now_s)
                case Action.PREFETCH:
                    self._prefetch(instructed, hint, adapter_digest)
                case Action.DEMOTE:
                    self._demote(instructed, hint, adapter_digest)

    def finish(self, instructed: Instructed) -> None:
        """End what was not begun: vLLM has forgotten the request, or its adapter's content will never be known."""
        if instructed.begun:
            return
        instructed.begun = True
        if instructed.instructions is not None and instructed.instructions.pins:
            self._ended(instructed, InstructionEnd.UNANSWERED)
        for hint in instructed.hints:
            self._count_hint(hint, Outcome.DEFERRED, "the content of its LoRA adapter was not known")

    # Pins

    def _pin_as_instructed(
        self, instructed: Instructed, wanted: RequestInstructions, end: int, digest: bytes | None, now_s: float
    ) -> None:
        num_tokens = instructed.request.num_prompt_tokens
        if wanted.breakpoints and (last := wanted.breakpoints[-1].num_tokens) > num_tokens:
            problem = f"the prompt has {num_tokens} tokens; count those of the rendered prompt"
            field = f"kv_transfer_params.{PARAMETER}.breakpoints[].num_tokens"
            self._invalid(instructed, str(InvalidArgumentError(field, last, problem)), now_s)
            return
        breakpoints = wanted.breakpoints or (Breakpoint(num_tokens=end, ttl_s=wanted.ttl_s),)

        def report(how: AskEnd) -> None:
            self._ended(instructed, _PARAMETER_ENDS[how])

        if not self._ask(instructed, breakpoints, digest, now_s, report, wanted.priority, wanted.name, wanted.owner):
            self._ended(instructed, InstructionEnd.TOO_SHORT)

    def _pin_as_hinted(self, instructed: Instructed, hint: Hint, digest: bytes | None, now_s: float) -> None:
        num_tokens = min(instructed.request.num_prompt_tokens, MAX_TOKENS)
        ends = [instructed.request.num_prompt_tokens if each.end is None else each.end for each in hint.prefixes]
        is_clipped = hint.is_clipped or max(ends) > num_tokens
        breakpoints = [
            Breakpoint(num_tokens=min(end, num_tokens), ttl_s=each.ttl_s)
            for end, each in zip(ends, hint.prefixes, strict=True)
        ]

        def report(end: AskEnd) -> None:
            outcome = _HINT_OUTCOMES[end]
            self._count_hint(hint, Outcome.CLIPPED if is_clipped and outcome is Outcome.ACCEPTED else outcome)

        priority = max(each.priority for each in hint.prefixes)
        if not self._ask(instructed, breakpoints, digest, now_s, report, priority):
            self._count_hint(hint, Outcome.MISSING, "the prompt has no whole chunk")

    def _ask(
        self,
        instructed: Instructed,
        breakpoints: Iterable[Breakpoint],
        digest: bytes | None,
        now_s: float,
        report: Callable[[AskEnd], None],
        priority: int = 0,
        name: str = "",
        owner: str = "",
    ) -> bool:
        """Ask for the pins of prefixes; return False if none has a whole chunk."""
        request, ttls = instructed.request, dict[Prefix, int]()
        most = _num_plain_tokens(request)
        for each in breakpoints:
            prefix = prefix_of(self._groups, request.block_hashes, min(each.num_tokens, most), digest)
            if prefix is not None:
                ttls[prefix] = longer_ttl(ttls.get(prefix, each.ttl_s), each.ttl_s)
        prefixes = tuple(sorted(ttls))
        if not prefixes:
            return False
        if not TEXT.takes(request.cache_salt or ""):
            report(AskEnd.REFUSED)
            return True
        ask = PinAsk(
            prefixes=tuple(
                pb.RequestedPrefix(digest=each.digest, num_tokens=each.num_tokens, ttl_s=ttls[each])
                for each in prefixes
            ),
            tokens=request.prompt_token_ids,
            priority=priority,
            name=name,
            owner=owner,
            adapter=instructed.adapter,
            cache_salt=request.cache_salt or "",
            reports=[report],
        )
        find = partial(chunks_of, self._groups, request.block_hashes, prefixes, digest)
        instructed.requested.append(_RequestedChunks(self.asks.ask(ask, now_s), prefixes, find))
        return True

    # Other hints

    def _prefetch(self, instructed: Instructed, hint: Hint, digest: bytes | None) -> None:
        held = [key for key in self._keys(instructed, hint, digest) if self._is_held(key)]
        if self._attachment is None or self._attachment.is_behind:
            self._count_hint(hint, Outcome.DEFERRED, "no daemon, or it does not keep up")
        elif not held:
            self._count_hint(hint, Outcome.MISSING, "nothing of the prompt is held")
        else:
            self._attachment.send(pb.EngineMessage(prefetch=pb.Prefetch(keys=held)))
            self._count_hint(hint, Outcome.ACCEPTED)

    def _demote(self, instructed: Instructed, hint: Hint, digest: bytes | None) -> None:
        request, end = instructed.request, hint.prefixes[0].end or instructed.request.num_prompt_tokens
        prefix = prefix_of(self._groups, request.block_hashes, min(end, _num_plain_tokens(request)), digest)
        held = [key for key in self._keys(instructed, hint, digest) if self._is_held(key)]
        if self._attachment is None or self._attachment.is_behind:
            self._count_hint(hint, Outcome.DEFERRED, "no daemon, or it does not keep up")
        elif not held or prefix is None:
            self._count_hint(hint, Outcome.MISSING, "nothing of the prompt is held")
        else:
            self._attachment.send(pb.EngineMessage(demote=pb.Demote(keys=held, digest=prefix.digest)))
            self.asks.forget(prefix.digest, "")
            self._count_hint(hint, Outcome.ACCEPTED)

    def _keys(self, instructed: Instructed, hint: Hint, digest: bytes | None) -> Sequence[ChunkKey]:
        request, end = instructed.request, hint.prefixes[0].end or instructed.request.num_prompt_tokens
        num_tokens = min(end, request.num_prompt_tokens)
        return reachable_keys(self._groups, request.block_hashes, num_tokens, digest).keys[:MAX_KEYS]

    # What is counted and logged

    def _count_hint(self, hint: Hint, outcome: Outcome, why: str = "") -> None:
        self._stats.count(KV_HINTS, hint.action.value, outcome.value)
        logger.debug("kvtier: KV hint action=%s outcome=%s %s", hint.action, outcome, why)

    def _ended(self, instructed: Instructed, how: InstructionEnd) -> None:
        instructed.result = how
        self._stats.count(REQUEST_INSTRUCTIONS, how.value)

    def _invalid(self, instructed: Instructed, problem: str, now_s: float) -> None:
        """Count it, and log the first in ten seconds."""
        self._ended(instructed, InstructionEnd.INVALID)
        self._num_unlogged += 1
        if now_s >= self._log_due_s:
            logger.warning(
                "kvtier: what a request asks is ignored: %s (%d such requests since the last line like this)",
                problem,
                self._num_unlogged,
            )
            self._log_due_s, self._num_unlogged = now_s + _LOG_PERIOD_S, 0


def _num_plain_tokens(request: Any) -> int:
    """Return how many tokens a pin may have: those before the first image, or other part that tokens do not say."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return 0
    offsets = (feature.mm_position.offset for feature in request.mm_features)
    return min(int(min(offsets, default=request.num_prompt_tokens)), MAX_TOKENS)
