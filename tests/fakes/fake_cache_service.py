"""The operators' half of a daemon, which keeps prompts in a dict; passes `tests/contract`. Engines: `FakeDaemon`."""

import logging
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import xxhash

from kvtier._pb import cache_pb2_grpc, engine_pb2
from kvtier._pb.cache_pb2 import (
    TIER_ANY,
    Advice,
    AppliedPrompt,
    ApplyMessage,
    ApplyResponse,
    ChunkMap,
    DaemonStatus,
    Event,
    EvictRequest,
    EvictResponse,
    ExplainRequest,
    Explanation,
    GetAdviceRequest,
    GetChunkMapRequest,
    GetPromptRequest,
    GetRemoteRequest,
    GetTokensRequest,
    ListNamespacesResponse,
    ListPromptsResponse,
    ListRecentRequestsRequest,
    ListRecentRequestsResponse,
    MissingChunks,
    NamespaceStatus,
    NearBinding,
    NearPrompt,
    OutcomeCount,
    PinRequest,
    PromptBinding,
    PromptStatus,
    PromptTokens,
    QuarantineNamespaceRequest,
    Readiness,
    ReadyRequest,
    RecentRequest,
    ReleaseNamespaceRequest,
    RemoteStatus,
    RenamePromptRequest,
    TierStatus,
    UnpinRequest,
    UpdatePromptRequest,
    VerifiedNamespace,
    VerifiedTier,
    VerifyPromptRequest,
    VerifyReport,
    WaitingPrompt,
)
from kvtier.core.limits import check_users_labels, parse_version, version_name
from kvtier.core.tokens import TokenIds
from kvtier.errors import (
    InvalidArgumentError,
    KvtierError,
    NamespaceNotFoundError,
    PromptExistsError,
    PromptNotBoundError,
    PromptNotFoundError,
    PromptNotPinnedError,
    PromptPinnedError,
    PromptUnrenderedError,
    RequestNotFoundError,
)

CHUNK_TOKENS = 16
CHUNK_BYTES = 1 << 20
FINGERPRINT = {"weights": '{"mode":"sampled"}', "dtype": '"torch.bfloat16"', "odd": "{not JSON"}
_STATUS = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    PromptNotFoundError: grpc.StatusCode.NOT_FOUND,
    NamespaceNotFoundError: grpc.StatusCode.NOT_FOUND,
    PromptNotBoundError: grpc.StatusCode.FAILED_PRECONDITION,
    RequestNotFoundError: grpc.StatusCode.NOT_FOUND,
    PromptExistsError: grpc.StatusCode.ALREADY_EXISTS,
    PromptNotPinnedError: grpc.StatusCode.FAILED_PRECONDITION,
    PromptPinnedError: grpc.StatusCode.FAILED_PRECONDITION,
    PromptUnrenderedError: grpc.StatusCode.FAILED_PRECONDITION,
}


_HOW = ("ttl_s", "priority", "public", "owner", "sliding")


def _end_of(ttl_s: float) -> float:
    return time.time() + ttl_s if ttl_s else 0.0


def _keep(request: PinRequest, old: PromptStatus) -> None:
    """Give a request what it has not, as the pin of its name has it."""
    kept = {
        "ttl_s": max(1, round(old.expires_unix_s - time.time())) if old.expires_unix_s else 0,
        "priority": old.priority,
        "public": old.public and not request.cache_salt,
        "owner": old.owner,
        "sliding": old.sliding,
    }
    if not request.HasField("labels"):
        request.labels.values.update(old.labels)
    for field in _HOW:
        if not request.HasField(field):
            setattr(request, field, kept[field])


class FakeCacheService(cache_pb2_grpc.CacheServiceServicer):
    """Knobs and state. An attached engine binds every prompt at once.

    Attributes:
        num_engines: Engines attached.
        bind_error: Said by them instead of binding.
        prompts: By name.
        tokens: By pin id.
        pins: Every PinRequest.
        counters: For the status.
        breaker_open_reason: Why the disk tier is off.
        evictions: Every EvictRequest.
        evicted: How many chunks an eviction took of a prompt that stayed, and when, by pin id.
        advice: What is answered to GetAdvice.
        budgets: Of every GetAdviceRequest.
        remote: What is answered to GetRemote; without a store to begin with.
        quarantine_reasons: Of the namespaces that are quarantined.
        damaged_chunks: On disk, of each prompt that is verified.
        events: What watchers of events get, and then wait.
        requests: That ended, the last one at the end.
    """

    def __init__(self) -> None:
        self.num_engines = 0
        self.bind_error = ""
        self.over_quota = False
        self.prompts: dict[str, PromptStatus] = {}
        self.tokens: dict[str, list[int]] = {}
        self.pins: list[PinRequest] = []
        self.counters: dict[str, int] = {}
        self.breaker_open_reason = ""
        self.evictions: list[EvictRequest] = []
        self.evicted: dict[str, tuple[int, float]] = {}
        self.advice = Advice(mode="off")
        self.remote = RemoteStatus()
        self.budgets: list[int] = []
        self.quarantine_reasons: dict[str, str] = {}
        self.damaged_chunks = 0
        self.events: list[Event] = []
        self.requests: list[RecentRequest] = []
        self._changed = threading.Condition()

    def capture(self, num_chunks: int | None = None) -> None:
        """Make this many chunks of every prompt durable (None: all), as a warm request would."""
        with self._changed:
            for status in self.prompts.values():
                for binding in status.bindings:
                    held = binding.num_chunks if num_chunks is None else min(num_chunks, binding.num_chunks)
                    binding.num_host_chunks = binding.num_durable_chunks = held
                    binding.durable_raw_bytes = held * CHUNK_BYTES
                    binding.disk_bytes = binding.disk_share_bytes = held * CHUNK_BYTES * 2 // 3
                    complete = held == binding.num_chunks
                    status.state = PromptStatus.DURABLE if complete else PromptStatus.CAPTURING
                    if self.over_quota:
                        status.state = PromptStatus.OVER_QUOTA
            for name in [name for name, each in self.prompts.items() if each.replacement]:
                if self.prompts[self.prompts[name].replacement].state == PromptStatus.DURABLE:
                    self._replace(name)
            self._changed.notify_all()

    def refuse(self, name: str, error: str) -> None:
        """Let the engines answer that they cannot use a prompt."""
        with self._changed:
            status = self.prompts[name]
            status.state, status.error, status.num_confirmed = PromptStatus.REFUSED, error, 0
            del status.bindings[:]
            self._changed.notify_all()

    def _replace(self, name: str) -> None:
        old = self.prompts[name]
        new = self.prompts.pop(old.replacement)
        base, number = parse_version(new.name) or (name, 2)
        old.name, old.pinned, old.replacement = version_name(base, number - 1), False, ""
        new.name, new.origin = name, "named"
        self.prompts |= {old.name: old, name: new}

    def Pin(self, request: PinRequest, context: Any) -> PromptStatus:
        self._check_labels(request.labels.values, context)
        return self._pin(request, context)

    def _check_labels(self, keys: Iterable[str], context: Any) -> None:
        try:
            check_users_labels("labels", keys)
        except InvalidArgumentError as exc:
            self._abort(context, exc)

    def _pin(self, request: PinRequest, context: Any) -> PromptStatus:
        self.pins.append(request)
        if request.version:
            known = [name for name in self.prompts if name.startswith(f"{request.name}@")]
            if version_name(request.name, request.version) not in known:
                self._abort(context, PromptNotFoundError(version_name(request.name, request.version), known))
            rolled_back = self.GetPrompt(GetPromptRequest(name=version_name(request.name, request.version)), context)
            request.tokens[:] = self.tokens[rolled_back.pin_id]
        old = self.prompts.get(request.name)
        if " " in request.name:
            self._abort(context, InvalidArgumentError("name", request.name, "no spaces"))
        if old and old.pinned:
            _keep(request, old)
        if old and not request.tokens and request.recipe_json == old.recipe_json:
            request.tokens[:] = self.tokens[old.pin_id]
        status = self._status_of(request)
        if old and old.num_tokens and old.tokens_digest != status.tokens_digest and not request.replace:
            self._abort(context, PromptExistsError(request.name, "tokens"))
        with self._changed:
            if old and old.tokens_digest == status.tokens_digest:
                status.pin_id = old.pin_id
                if old.bindings:  # what is stored stays stored
                    status.state = old.state
                    del status.bindings[:]
                    status.bindings.extend(old.bindings)
            elif old and old.state == PromptStatus.UNRENDERED:
                status.created_unix_s = old.created_unix_s
            elif old and old.state == PromptStatus.DURABLE:
                numbers = [
                    int(name.removeprefix(f"{old.name}@")) for name in self.prompts if name.startswith(f"{old.name}@")
                ]
                old.replacement = old.replacement or version_name(old.name, max(numbers, default=0) + 2)
                status.name, status.origin = old.replacement, "replacement"
            fields = {"name": status.name, "num_tokens": str(status.num_tokens)}
            self.events.append(Event(name="pin_registered", unix_s=time.time(), level="info", fields=fields))
            self.tokens[status.pin_id] = list(request.tokens)
            self.prompts[status.name] = status
            self._changed.notify_all()
        return status

    def GetAdvice(self, request: GetAdviceRequest, context: Any) -> Advice:
        self.budgets.append(request.max_bytes)
        return self.advice

    def GetRemote(self, request: GetRemoteRequest, context: Any) -> RemoteStatus:
        return self.remote

    def ListPrompts(self, request: Any, context: Any) -> ListPromptsResponse:
        prompts = list(self.prompts.values())
        if request.unfinished:
            prompts = [each for each in prompts if each.pinned and each.state != PromptStatus.DURABLE]
        if not request.page_size:
            return ListPromptsResponse(prompts=prompts)
        rest = sorted((each for each in prompts if each.name > request.page_token), key=lambda each: each.name)
        page = rest[: request.page_size]
        return ListPromptsResponse(prompts=page, next_page_token=page[-1].name if len(rest) > len(page) else "")

    def GetPrompt(self, request: GetPromptRequest, context: Any) -> PromptStatus:
        for status in list(self.prompts.values()):
            if request.pin_id and request.pin_id == status.pin_id:
                return status
        if request.name not in self.prompts:
            self._abort(context, PromptNotFoundError(request.name))
        return self.prompts[request.name]

    def GetTokens(self, request: GetTokensRequest, context: Any) -> PromptTokens:
        if not self.GetPrompt(GetPromptRequest(name=request.name), context).num_tokens:
            self._abort(context, PromptUnrenderedError(request.name))
        pinned = (pin.tokens for pin in reversed(self.pins) if pin.name == request.name)
        return PromptTokens(tokens=self.tokens.get(self.prompts[request.name].pin_id) or next(pinned))

    def GetChunkMap(self, request: GetChunkMapRequest, context: Any) -> ChunkMap:
        status = self.GetPrompt(GetPromptRequest(name=request.name), context)
        bound = {binding.namespace_id: binding for binding in status.bindings}
        binding = bound.get(request.namespace_id or next(reversed(bound), ""))
        if binding is None:
            self._abort(context, PromptNotBoundError(request.name, request.namespace_id))
        held = range(binding.num_chunks)
        places = bytes((n < binding.num_durable_chunks) | (n < binding.num_host_chunks) << 1 for n in held)
        return ChunkMap(
            name=status.name,
            namespace_id=binding.namespace_id,
            chunks=places,
            covered_tokens=binding.covered_tokens,
        )

    def WatchPrompt(self, request: GetPromptRequest, context: Any) -> Iterator[PromptStatus]:
        pin_id, sent = self.GetPrompt(request, context).pin_id, None
        while context.is_active():
            with self._changed:
                status = PromptStatus.FromString(
                    self.GetPrompt(GetPromptRequest(pin_id=pin_id), context).SerializeToString()
                )
                if status == sent:
                    self._changed.wait(0.05)
                    continue
            sent = status
            yield status

    def UpdatePrompt(self, request: UpdatePromptRequest, context: Any) -> PromptStatus:
        status = self.GetPrompt(GetPromptRequest(name=request.name), context)
        if not status.pinned:
            self._abort(context, PromptNotPinnedError(request.name, ""))
        given = [field for field in _HOW if request.HasField(field)]
        if not given and not request.set_labels and not request.removed_labels:
            self._abort(context, InvalidArgumentError("ttl_s, priority, public", None, "give one"))
        self._check_labels(request.set_labels, context)
        if request.sliding and not (request.ttl_s if "ttl_s" in given else status.ttl_s):
            self._abort(context, InvalidArgumentError("sliding", True, "give a ttl"))
        if request.public and status.cache_salt:
            self._abort(context, InvalidArgumentError("public", True, "it has a salt"))
        with self._changed:
            if "ttl_s" in given:
                status.expires_unix_s = _end_of(request.ttl_s)
            status.priority = request.priority if "priority" in given else status.priority
            status.public = request.public if "public" in given else status.public
            status.owner = request.owner if "owner" in given else status.owner
            if "sliding" in given:
                status.sliding = request.sliding
            status.ttl_s = request.ttl_s if "ttl_s" in given else status.ttl_s
            for key in request.removed_labels:
                status.labels.pop(key, None)
            status.labels.update(request.set_labels)
            self._changed.notify_all()
        return status

    def ApplyPrompts(self, messages: Iterator[ApplyMessage], context: Any) -> ApplyResponse:
        first, *others = messages
        names = [message.pin.name or message.unpin for message in others]
        if len(set(names)) < len(names):
            self._abort(context, InvalidArgumentError("name", names, "comes twice"))
        for message in others:
            if message.unpin and message.unpin not in self.prompts and not message.HasField("expected"):
                self._abort(context, PromptNotFoundError(message.unpin))
            if " " in message.pin.name:
                self._abort(context, InvalidArgumentError("name", message.pin.name, "no spaces"))
            if message.HasField("expected"):
                self._check_expected(message, context)
        applied = []
        for message in others:
            if first.start.dry_run:
                applied += [AppliedPrompt(name=message.pin.name)] if message.pin.name else []
            elif message.unpin:
                if message.unpin in self.prompts:
                    self.Unpin(UnpinRequest(name=message.unpin), context)
            else:
                message.pin.replace = True
                made = self._pin(message.pin, context)
                applied.append(AppliedPrompt(name=message.pin.name, made=made.name, pin_id=made.pin_id))
        return ApplyResponse(pins=applied)

    def _check_expected(self, message: ApplyMessage, context: Any) -> None:
        name, seen = message.pin.name or message.unpin, message.expected
        pin = self.prompts.get(name)
        if pin is None or not pin.pinned or pin.origin != "named":
            if message.pin.name and not seen.absent:
                self._abort(context, PromptNotFoundError(name))
            return
        newest = self.prompts.get(pin.replacement, pin)
        is_seen = not seen.absent and seen.pin_id in ("", pin.pin_id, newest.pin_id)
        is_same = bool(message.pin.name) and self._has_content(newest, message.pin)
        if newest.labels.get("kvtier/set", "") != seen.set or not (is_seen or is_same):
            self._abort(context, (PromptExistsError if seen.absent else PromptNotFoundError)(name))

    def _has_content(self, status: PromptStatus, pin: PinRequest) -> bool:
        tokens = self.tokens.get(status.pin_id, [])
        is_source = status.recipe_json == pin.recipe_json and not (tokens and pin.tokens)
        has_tokens = bool(tokens) and tokens == list(pin.tokens)
        return status.cache_salt == pin.cache_salt and (is_source or has_tokens)

    def RenamePrompt(self, request: RenamePromptRequest, context: Any) -> PromptStatus:
        status = self.GetPrompt(GetPromptRequest(name=request.name), context)
        if request.new_name == request.name:
            self._abort(context, InvalidArgumentError("new_name", request.new_name, "it has this name already"))
        if request.new_name in self.prompts:
            self._abort(context, PromptExistsError(request.new_name, new_name=request.new_name))
        with self._changed:
            status.name = request.new_name
            self.prompts[request.new_name] = self.prompts.pop(request.name)
            self._changed.notify_all()
        return status

    def Unpin(self, request: UnpinRequest, context: Any) -> PromptStatus:
        status = self.GetPrompt(GetPromptRequest(name=request.name), context)
        status.pinned = False
        if status.origin == "replacement":  # what was never served is no version
            del self.prompts[request.name]
            for each in self.prompts.values():
                each.replacement = "" if each.replacement == request.name else each.replacement
        return status

    def Evict(self, request: EvictRequest, context: Any) -> EvictResponse:
        self.evictions.append(request)
        if request.all:
            return EvictResponse(num_chunks=9, host_bytes=9 << 20, num_shared_chunks=2)
        status = self.GetPrompt(GetPromptRequest(name=request.name), context)
        if status.pinned and not request.force:
            self._abort(context, PromptPinnedError(request.name))
        if not status.pinned and request.tier == TIER_ANY:
            del self.prompts[request.name]
        elif request.tier == TIER_ANY:
            num_chunks = max((each.num_host_chunks for each in status.bindings), default=0)
            self.evicted[status.pin_id] = (num_chunks, time.time())
            for binding in status.bindings:
                binding.num_host_chunks = binding.num_durable_chunks = 0
        return EvictResponse(num_chunks=3, host_bytes=3 << 20, disk_bytes=2 << 20, num_shared_chunks=1)

    def report(self, ended: engine_pb2.RequestEnded) -> None:
        """An engine reports a request; tokens of the pin cost a millisecond each."""
        fields = {each.name: value for each, value in ended.ListFields()} | {"outcome": ended.outcome}
        status = next((each for each in self.prompts.values() if each.pin_id == ended.pin_id), None)
        self.requests.append(RecentRequest(**fields, pin_name=status.name if status is not None else ""))
        if status is None:
            return
        usage = status.usage
        for source in ("device_tokens", "host_tokens", "disk_tokens"):
            setattr(usage, source, getattr(usage, source) + getattr(ended, source))
        usage.saved_prefill_s += (ended.host_tokens + ended.disk_tokens) / 1000
        if ended.outcome == engine_pb2.HIT:
            usage.num_hits += 1
            usage.last_hit_unix_s = usage.last_used_unix_s = ended.ended_unix_s
        else:
            usage.others.append(OutcomeCount(outcome=ended.outcome, num_requests=1))

    def ListRecentRequests(self, request: ListRecentRequestsRequest, context: Any) -> ListRecentRequestsResponse:
        harmless = (engine_pb2.HIT, engine_pb2.UNKNOWN, engine_pb2.TOO_SHORT)
        found = [
            each
            for each in reversed(self.requests)
            if (not request.outcomes or each.outcome in request.outcomes)
            and not (request.misses_only and each.outcome in harmless)
        ]
        return ListRecentRequestsResponse(requests=found[: request.max_requests or 100])

    def Explain(self, request: ExplainRequest, context: Any) -> Explanation:
        if bool(request.tokens) == bool(request.request_id):
            self._abort(context, InvalidArgumentError("tokens", len(request.tokens), "give one"))
        if request.tokens:
            return self._explained(list(request.tokens))
        asked = request.request_id
        ids = (asked, f"{asked}-0", f"chatcmpl-{asked}", f"cmpl-{asked}-0")
        ended = next((each for each in reversed(self.requests) if each.request_id in ids), None)
        if ended is None:
            self._abort(context, RequestNotFoundError(request.request_id, len(self.requests)))
        near = [
            NearPrompt(name=each.name, pin_id=each.pin_id, pinned=each.pinned, shared_tokens=ended.shared_tokens)
            for each in self.prompts.values()
            if each.pin_id == ended.pin_id
        ]
        return Explanation(outcome=ended.outcome, reason="so it was", prompts=near, request=ended)

    def _explained(self, tokens: list[int]) -> Explanation:
        near = sorted(
            (each for status in self.prompts.values() if (each := self._near(status, tokens)).shared_tokens),
            key=lambda each: -each.shared_tokens,
        )
        whole = [each for each in near if each.num_tokens // CHUNK_TOKENS * CHUNK_TOKENS <= each.shared_tokens]
        if not self.num_engines:
            outcome = engine_pb2.NO_SESSION
        elif len(tokens) <= CHUNK_TOKENS:
            outcome = engine_pb2.TOO_SHORT
        elif whole:
            is_held = any(not each.num_missing_chunks for each in whole[0].bindings)
            outcome = engine_pb2.HIT if is_held else engine_pb2.NOT_STORED
        elif near and near[0].shared_tokens >= CHUNK_TOKENS:
            outcome = engine_pb2.DIVERGED
        else:
            outcome = engine_pb2.UNKNOWN
        last_request = None
        if outcome in (engine_pb2.HIT, engine_pb2.NOT_STORED, engine_pb2.DIVERGED):
            decides = (whole or near)[0].pin_id
            last_request = next((each for each in reversed(self.requests) if each.pin_id == decides), None)
        return Explanation(outcome=outcome, reason="so it would be", prompts=near[:5], last_request=last_request)

    def _near(self, status: PromptStatus, tokens: list[int]) -> NearPrompt:
        pairs = zip(self.tokens[status.pin_id], tokens, strict=False)
        end = min(status.num_tokens, len(tokens))
        shared = next((index for index, (mine, its) in enumerate(pairs) if mine != its), end)
        num_chunks = shared // CHUNK_TOKENS
        bindings = [
            NearBinding(
                namespace_id=each.namespace_id,
                live=True,
                bound=True,
                shared_tokens=num_chunks * CHUNK_TOKENS,
                lost_tokens=shared - num_chunks * CHUNK_TOKENS,
                num_host_chunks=min(num_chunks, each.num_host_chunks),
                num_missing_chunks=max(0, num_chunks - each.num_host_chunks),
                missing=self._missing(status.pin_id, max(0, num_chunks - each.num_host_chunks)),
            )
            for each in status.bindings
        ]
        return NearPrompt(
            name=status.name,
            pin_id=status.pin_id,
            pinned=status.pinned,
            num_tokens=status.num_tokens,
            shared_tokens=shared,
            differs_at=shared if shared < end else None,
            bindings=bindings,
        )

    def _missing(self, pin_id: str, num_missing: int) -> list[MissingChunks]:
        num_evicted, evicted_unix_s = self.evicted.get(pin_id, (0, 0.0))
        num_evicted = min(num_evicted, num_missing)
        found = [
            MissingChunks(cause="EVICTED_BY_COMMAND", num_chunks=num_evicted, last_unix_s=evicted_unix_s),
            MissingChunks(cause="NOT_RECORDED", num_chunks=num_missing - num_evicted),
        ]
        return [each for each in found if each.num_chunks]

    def GetStatus(self, request: Any, context: Any) -> DaemonStatus:
        return DaemonStatus(
            version="0.1.0",
            pid=1,
            started_unix_s=time.time() - 90,
            socket="/run/s",
            host=TierStatus(
                location="/dev/shm/kvtier", used_bytes=1 << 30, limit_bytes=4 << 30, num_chunks=7, pinned_bytes=1 << 28
            ),
            disk=TierStatus(
                location="/var/lib/kvtier",
                used_bytes=0,
                limit_bytes=9 << 30,
                breaker_open_reason=self.breaker_open_reason,
            ),
            num_prompts=len(self.prompts),
            namespaces=[self._namespace(each) for each in self._namespace_ids()],
            counters=self.counters,
            store="all",
        )

    def _namespace_ids(self) -> list[str]:
        bound = {binding.namespace_id for status in self.prompts.values() for binding in status.bindings}
        return sorted({"n1"} | bound)

    def _namespace(self, namespace_id: str) -> NamespaceStatus:
        return NamespaceStatus(
            namespace_id=namespace_id, quarantine_reason=self.quarantine_reasons.get(namespace_id, "")
        )

    def _check_namespace(self, namespace_id: str, context: Any) -> None:
        if namespace_id not in self._namespace_ids():
            self._abort(context, NamespaceNotFoundError(namespace_id))

    def QuarantineNamespace(self, request: QuarantineNamespaceRequest, context: Any) -> NamespaceStatus:
        if not request.reason:
            self._abort(context, InvalidArgumentError("reason", "", "must not be empty"))
        self._check_namespace(request.namespace_id, context)
        self.quarantine_reasons[request.namespace_id] = request.reason
        return self._namespace(request.namespace_id)

    def ReleaseNamespace(self, request: ReleaseNamespaceRequest, context: Any) -> NamespaceStatus:
        self._check_namespace(request.namespace_id, context)
        self.quarantine_reasons.pop(request.namespace_id, None)
        return self._namespace(request.namespace_id)

    def VerifyPrompt(self, request: VerifyPromptRequest, context: Any) -> VerifyReport:
        status = self.GetPrompt(GetPromptRequest(name=request.name), context)
        report = VerifyReport(name=status.name, seconds=0.5)
        for binding in status.bindings:
            if request.namespace_id not in ("", binding.namespace_id):
                continue
            host, disk = binding.num_host_chunks, binding.num_durable_chunks - self.damaged_chunks
            report.namespaces.append(
                VerifiedNamespace(
                    namespace_id=binding.namespace_id,
                    model=binding.model,
                    num_chunks=binding.num_chunks,
                    host=VerifiedTier(
                        num_verified_chunks=host,
                        num_missing_chunks=binding.num_chunks - host,
                        verified_bytes=host * CHUNK_BYTES,
                    ),
                    disk=VerifiedTier(
                        num_verified_chunks=disk,
                        num_damaged_chunks=self.damaged_chunks,
                        num_missing_chunks=binding.num_chunks - binding.num_durable_chunks,
                        verified_bytes=binding.num_durable_chunks * CHUNK_BYTES,
                    ),
                    num_lost_chunks=binding.num_chunks - max(host, disk),
                )
            )
        if not report.namespaces:
            self._abort(context, PromptNotBoundError(request.name, request.namespace_id))
        return report

    def CheckReady(self, request: ReadyRequest, context: Any) -> Readiness:
        if request.where not in ReadyRequest.Where.values():
            self._abort(context, InvalidArgumentError("where", request.where, "use one of DISK, HOST, DEVICE"))
        if request.names:
            prompts = [self.GetPrompt(GetPromptRequest(name=name), context) for name in request.names]
        else:
            prompts = [each for each in self.prompts.values() if each.pinned and each.origin in ("", "named")]
        is_device, is_nowhere = request.where == ReadyRequest.DEVICE, not self.num_engines
        waiting = [each for each in prompts if each.state != PromptStatus.DURABLE or (is_device and is_nowhere)]
        why = "no engine is attached" if is_device and is_nowhere else "not on disk yet"
        reasons = {each.name: f"an engine cannot recognize it: {each.error}" for each in waiting if each.error}
        return Readiness(
            ready=not waiting,
            num_prompts=len(prompts),
            num_ready=len(prompts) - len(waiting),
            waiting=[
                WaitingPrompt(name=each.name, state=each.state, why=reasons.get(each.name, why))
                for each in waiting[:100]
            ],
        )

    def WatchEvents(self, request: Any, context: Any) -> Iterator[Event]:
        context.send_initial_metadata(())
        num_sent = 0
        while context.is_active():
            with self._changed:
                if num_sent == len(self.events):
                    self._changed.wait(0.05)
                new, num_sent = self.events[num_sent:], len(self.events)
            yield from (event for event in new if not request.names or event.name in request.names)

    def ListNamespaces(self, request: Any, context: Any) -> ListNamespacesResponse:
        return ListNamespacesResponse(namespaces=[NamespaceStatus(namespace_id="n1", fingerprint=FINGERPRINT)])

    def _status_of(self, request: PinRequest) -> PromptStatus:
        status = PromptStatus(
            name=request.name,
            pin_id=uuid.uuid4().hex,
            pinned=True,
            state=PromptStatus.WAITING if request.tokens else PromptStatus.UNRENDERED,
            model=request.model,
            lora_name=request.lora_name,
            cache_salt=request.cache_salt,
            num_tokens=len(request.tokens),
            created_unix_s=time.time(),
            expires_unix_s=_end_of(request.ttl_s),
            recipe_json=request.recipe_json,
            num_engines=self.num_engines if request.tokens else 0,
            priority=request.priority,
            public=request.public,
            error=self.bind_error if self.num_engines else "",
            origin="named",
            owner=request.owner,
            labels=dict(request.labels.values),
            ttl_s=request.ttl_s,
            sliding=request.sliding,
            source_digest=xxhash.xxh3_128_hexdigest(request.recipe_json.encode()) if request.recipe_json else "",
            tokens_digest=TokenIds(request.tokens).digest,
        )
        if self.num_engines and request.tokens and not self.bind_error:
            status.num_confirmed = self.num_engines
            status.state = PromptStatus.CAPTURING
            status.bindings.append(self._binding(request))
        elif self.num_engines and request.tokens:
            status.state = PromptStatus.REFUSED
        return status

    def _binding(self, request: PinRequest) -> PromptBinding:
        num_chunks = len(request.tokens) // CHUNK_TOKENS
        return PromptBinding(
            namespace_id="n" * 64,
            model=request.model,
            covered_tokens=num_chunks * CHUNK_TOKENS,
            num_chunks=num_chunks,
            raw_bytes=num_chunks * CHUNK_BYTES,
            live=True,
        )

    def _abort(self, context: Any, error: KvtierError) -> NoReturn:
        context.set_trailing_metadata((("kvtier-error", type(error).__name__),))
        context.abort(_STATUS[type(error)], str(error))
        raise AssertionError


@contextmanager
def serving(daemon: FakeCacheService, socket: Path) -> Iterator[FakeCacheService]:
    """Serve it."""
    # What it does not serve (fsck, bundles) gRPC logs with a traceback in this process; only the CLI's are sought.
    logging.getLogger("grpc._server").disabled = True
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    cache_pb2_grpc.add_CacheServiceServicer_to_server(daemon, server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield daemon
    finally:
        server.stop(0).wait()
        logging.getLogger("grpc._server").disabled = False
