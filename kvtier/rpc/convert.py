"""Messages of proto/kvtier/v1 to checked values, and values to messages. Fields of both have one name where possible.

Lists are refused for their length before they are copied, and long ones are copied in turns of the event loop.
"""

import asyncio
import os
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from kvtier._pb import cache_pb2, engine_pb2
from kvtier.bundles import RequestedImport
from kvtier.client.address import PROTOCOL_VERSION
from kvtier.concurrency.turns import Breather, slices
from kvtier.core import limits
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.tokens import TokenIds
from kvtier.discovery.auto_pins import NamespaceAdvice
from kvtier.discovery.choices import PrefixChoice
from kvtier.discovery.namespace_traffic import ChangingPlace
from kvtier.discovery.seen import MAX_PREFIXES, PrefixTokens, SeenPrefix, SeenRequest
from kvtier.errors import InvalidArgumentError
from kvtier.ledger import PromptRow
from kvtier.maintenance import Report
from kvtier.maintenance.prompt_verification import VerifyReport
from kvtier.outcomes.explain import Explanation, NearBinding
from kvtier.outcomes.outcome_book import bounded_end
from kvtier.outcomes.pin_usage import PinUsage
from kvtier.outcomes.recent_requests import EndedRequest
from kvtier.prompts.by_request.request_pins import AskedPins, AskedPrefix
from kvtier.prompts.readiness import Readiness, ReadyWhere
from kvtier.prompts.states.status import PromptView
from kvtier.rpc.http_serving import HttpState
from kvtier.service import Cache
from kvtier.service.metrics_reading import read_gauges
from kvtier.sessions.engine_peer import EngineHello
from kvtier.sessions.session import Session
from kvtier.tiering.namespace import Namespace
from kvtier.version import __version__

MAX_ADVISED = 256
"""Prefixes of a namespace that advice names."""
ITEMS_PER_TURN = 32_768
"""Keys or tokens of a message that are copied in one turn of the loop: some milliseconds."""

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def message_of(kind: type[M], source: object, **fields: Any) -> M:
    """Return a message with these fields; all others are the attributes of `source` with their names."""
    return kind(**_all_fields(kind, source, fields))


def _all_fields(kind: type[Message], source: object, fields: dict[str, Any]) -> dict[str, Any]:
    others = {name: getattr(source, name) for name in _field_names(kind.DESCRIPTOR) if name not in fields}
    return fields | others


def fields_of(message: Message, *, without: str = "") -> dict[str, Any]:
    """Return the fields of a message by name, except one; None for an optional value that is not set."""
    optional = _optional_fields(message.DESCRIPTOR)
    return {
        name: None if name in optional and not message.HasField(name) else getattr(message, name)
        for name in _field_names(message.DESCRIPTOR)
        if name != without
    }


@cache
def _field_names(descriptor: Descriptor) -> tuple[str, ...]:
    return tuple(descriptor.fields_by_name)


@cache
def _optional_fields(descriptor: Descriptor) -> frozenset[str]:
    return frozenset(
        name for name, field in descriptor.fields_by_name.items() if field.has_presence and field.message_type is None
    )


async def in_turns_of(items: Sequence[T], num_items: int = ITEMS_PER_TURN) -> AsyncIterator[Sequence[T]]:
    """Yield parts of a message's list, each in a turn of the loop of its own."""
    for number, part in enumerate(slices(items, num_items)):
        if number:
            await asyncio.sleep(0)
        yield part


async def listed(field: str, items: Sequence[T]) -> list[T]:
    """Return a message's items; InvalidArgumentError if there are more than a message may have."""
    limits.check_count(field, len(items), limits.MAX_KEYS)
    if len(items) <= ITEMS_PER_TURN:
        return list(items)
    copied: list[T] = []
    async for part in in_turns_of(items):
        copied += part
    return copied


def _first(message: Any, kind: str, expected: str) -> Any:
    found = message.WhichOneof("kind") if message is not None else "nothing"
    if found != kind:
        raise InvalidArgumentError("message", found, f"the first message of {expected}")
    return getattr(message, kind)


def parse_import_start(message: cache_pb2.ImportMessage | None) -> RequestedImport:
    """Check the first message of an import; InvalidArgumentError if it is not a usable ImportStart."""
    start: cache_pb2.ImportStart = _first(message, "start", "an import is ImportStart")
    if start.name:
        limits.check_name(start.name)
    return RequestedImport(
        name=start.name,
        replace=start.replace,
        ttl_s=limits.TTL_S.check("ttl_s", start.ttl_s),
        public=start.public,
    )


def parse_hello(message: engine_pb2.EngineMessage | None) -> EngineHello:
    """Check the first message of a session; InvalidArgumentError if it is not a usable Hello."""
    hello: engine_pb2.Hello = _first(message, "hello", "a session is Hello")
    if hello.protocol != PROTOCOL_VERSION:
        remedy = f"this daemon speaks {PROTOCOL_VERSION}; run daemon and connector of one version"
        raise InvalidArgumentError("hello.protocol", hello.protocol, remedy)
    limits.ENGINE_TEXT.check("hello.kvtier_version", hello.kvtier_version)
    limits.NUM_MODEL_NAMES.check("number of hello.model_names", len(hello.model_names))
    return EngineHello(
        engine_id=limits.ENGINE_ID.check("hello.engine_id", hello.engine_id),
        pid=hello.pid,
        vllm_version=limits.ENGINE_TEXT.check("hello.vllm_version", hello.vllm_version),
        model_names=tuple(limits.MODEL_NAME.check("hello.model_names", name) for name in hello.model_names),
        fingerprint=limits.check_fingerprint("hello.fingerprint", hello.fingerprint),
        layout=_layout(hello.layout),
        store_credits=limits.STORE_CREDITS.check("hello.store_credits", hello.store_credits),
        ephemeral=hello.ephemeral,
        report_residency=hello.report_residency,
        takes_joined_keys=hello.takes_joined_keys,
    )


async def parse_request_pins(message: engine_pb2.RequestPins) -> AskedPins:
    """Check what a request asks to pin; InvalidArgumentError if it cannot be used."""
    limits.check_count("request_pins.prefixes", len(message.prefixes), limits.NUM_REQUESTED_PREFIXES.most)
    limits.check_count("request_pins.tokens", len(message.tokens), limits.MAX_TOKENS)
    ids = array("I")
    async for part in in_turns_of(message.tokens):
        ids.extend(part)
    return AskedPins(
        ask_id=message.id,
        prefixes=tuple(AskedPrefix(**fields_of(prefix)) for prefix in message.prefixes),
        tokens=TokenIds(ids),
        priority=message.priority,
        name=message.name,
        owner=message.owner,
        lora_name=message.lora_name,
        lora_path=message.lora_path,
        cache_salt=message.cache_salt,
    )


def _layout(message: engine_pb2.KVLayout) -> KVLayout:
    limits.NUM_GROUPS.check("number of hello.layout.groups", len(message.groups))
    groups = [fields_of(group) for group in message.groups]
    return limits.read_layout("hello.layout", fields_of(message, without="groups"), groups)


def seen_request(message: engine_pb2.SeenRequest) -> SeenRequest:
    """Return what a request began with; InvalidArgumentError if that cannot be."""
    limits.check_count("requests_seen.prefixes", len(message.prefixes), MAX_PREFIXES)
    prefixes = []
    for prefix in message.prefixes:
        limits.check_digest("requests_seen.digest", prefix.digest)
        prefixes.append(SeenPrefix(prefix.digest, prefix.num_tokens, prefix.is_system_prompt))
    return SeenRequest(prefixes, message.prompt_digest, message.num_tokens)


async def prefix_of(message: engine_pb2.PrefixTokens) -> PrefixTokens:
    """Return a prefix that an engine sends, its tokens copied in turns of the loop; InvalidArgumentError as above."""
    limits.check_digest("prefix_tokens.digest", message.digest)
    texts = {name: getattr(message, name) for name in ("lora_name", "lora_path", "cache_salt")}
    for name, text in texts.items():
        limits.TEXT.check(f"prefix_tokens.{name}", text)
    ids = array("I")
    async for part in in_turns_of(message.tokens):
        ids.extend(part)
    return PrefixTokens(digest=message.digest, tokens=TokenIds(ids), **texts)


def changing_place(message: engine_pb2.ChangingMiddle) -> ChangingPlace:
    """Return where prompts begin to differ; InvalidArgumentError if that cannot be."""
    return ChangingPlace.checked(**fields_of(message), seen_unix_s=time.time())


def pin_fields(prompt: PromptRow, keys: Sequence[ChunkKey] = (), are_joined: bool = False) -> dict[str, Any]:
    """Return a Pin by field names: a prompt as engines receive it, with the keys that their namespace has for it."""
    if are_joined:
        return {
            "pin_id": prompt.pin_id,
            "name": prompt.name,
            "pinned": prompt.pinned,
            "priority": prompt.priority,
            "joined_keys": b"".join(keys),
            "num_tokens": len(prompt.tokens),
        }
    own = {"tokens": prompt.token_ids.to_list(), "keys": keys, "joined_keys": b"", "num_tokens": 0}
    return _all_fields(engine_pb2.Pin, prompt, own)


def namespace_advice(advice: NamespaceAdvice) -> cache_pb2.NamespaceAdvice:
    """Return what is worth a pin in a namespace as operators receive it."""
    selection, namespace = advice.selection, advice.namespace
    return cache_pb2.NamespaceAdvice(
        namespace_id=namespace.namespace_id,
        model=namespace.model,
        requests_per_hour=advice.requests_per_hour,
        prompt_tokens_per_hour=advice.prompt_tokens_per_hour,
        chosen_bytes=selection.total_bytes,
        saved_s_per_hour=selection.saved_s_per_hour,
        saved_share=selection.saved_share,
        prefixes=[_advised_prefix(choice, advice) for choice in selection.choices[:MAX_ADVISED]],
        places=[message_of(cache_pb2.ChangingPlace, place) for place in advice.places],
    )


def _advised_prefix(choice: PrefixChoice, advice: NamespaceAdvice) -> cache_pb2.AdvisedPrefix:
    verdict = "NAMED" if choice.digest in advice.covered else choice.verdict.name
    return message_of(
        cache_pb2.AdvisedPrefix,
        choice,
        verdict=cache_pb2.AdvisedPrefix.Verdict.Value(verdict),
        pin_name=advice.pin_names.get(choice.digest, ""),
        last_seen_unix_s=choice.last_seen_s,
    )


def ended_request(message: engine_pb2.RequestEnded, namespace_id: str) -> EndedRequest:
    """Return how a request ended; InvalidArgumentError if that cannot be."""
    fields = fields_of(message) | {"ended_unix_s": bounded_end(message.ended_unix_s)}
    outcome = parse_outcome("requests_ended.outcome", message.outcome)
    return EndedRequest(**fields | {"outcome": outcome, "namespace_id": namespace_id})


def parse_outcome(field: str, value: int) -> RequestOutcome:
    """Return an outcome; InvalidArgumentError if it is none that this version knows."""
    known = engine_pb2.RequestOutcome.DESCRIPTOR.values_by_number.get(value)
    outcome = RequestOutcome.__members__.get(known.name) if known is not None else None
    if outcome is None:
        raise InvalidArgumentError(field, value, "is no outcome; run daemon and connector of one version")
    return outcome


def recent_request(request: EndedRequest, pin_name: str) -> cache_pb2.RecentRequest:
    """Return a request as operators receive it."""
    return message_of(cache_pb2.RecentRequest, request, outcome=request.outcome.name, pin_name=pin_name)


def explanation_message(explanation: Explanation) -> cache_pb2.Explanation:
    """Return why a request was, or would be, restored what it was, as operators receive it."""
    request, last_request, pin_name = explanation.request, explanation.last_request, explanation.pin_name
    return cache_pb2.Explanation(
        outcome=explanation.outcome.name,
        reason=explanation.reason,
        prompts=[
            message_of(
                cache_pb2.NearPrompt,
                near.prompt,
                num_tokens=len(near.prompt.tokens),
                shared_tokens=near.shared_tokens,
                differs_at=near.differs_at,
                differs_in=near.differs_in,
                bindings=[_near_binding(binding) for binding in near.bindings],
            )
            for near in explanation.prompts
        ],
        request=None if request is None else recent_request(request, pin_name),
        last_request=None if last_request is None else recent_request(last_request, pin_name),
    )


def _near_binding(binding: NearBinding) -> cache_pb2.NearBinding:
    missing = [message_of(cache_pb2.MissingChunks, each, cause=each.cause.name) for each in binding.missing]
    return message_of(cache_pb2.NearBinding, binding, missing=missing)


def _usage_message(usage: PinUsage) -> cache_pb2.PinUsage:
    others = [
        cache_pb2.OutcomeCount(outcome=outcome.name, num_requests=num) for outcome, num in sorted(usage.others.items())
    ]
    return message_of(cache_pb2.PinUsage, usage, others=others)


def prompt_status(
    view: PromptView, usage: PinUsage | None = None, *, with_recipe: bool = True
) -> cache_pb2.PromptStatus:
    """Return a prompt as operators receive it; recipes may be long, so lists have none."""
    prompt = view.prompt
    return message_of(
        cache_pb2.PromptStatus,
        prompt,
        state=cache_pb2.PromptStatus.State.Value(view.state.name),
        num_tokens=len(prompt.tokens),
        bindings=[message_of(cache_pb2.PromptBinding, binding) for binding in view.bindings],
        recipe_json=prompt.recipe_json if with_recipe else "",
        num_engines=view.num_engines,
        num_confirmed=view.num_confirmed,
        tokens_digest=prompt.token_ids.digest,
        error=view.error,
        replacement=view.replacement,
        use=None,
        labels=dict(prompt.labels),
        source_digest=prompt.source_digest,
        usage=None if usage is None else _usage_message(usage),
        computed_elsewhere=False,
    )


async def daemon_status(cache: Cache, http: HttpState) -> cache_pb2.DaemonStatus:
    """Return the whole daemon as a message."""
    disk_keys = await _key_usage(cache)
    gauges = read_gauges(cache)
    return cache_pb2.DaemonStatus(
        version=__version__,
        pid=os.getpid(),
        started_unix_s=cache.started_unix_s,
        socket=str(cache.config.server.socket),
        host=cache_pb2.TierStatus(
            location=str(cache.config.host.arena_dir),
            used_bytes=gauges.host_pinned_bytes + gauges.host_unpinned_bytes,
            limit_bytes=gauges.host_limit_bytes,
            num_chunks=gauges.host_pinned_chunks + gauges.host_unpinned_chunks,
            pinned_bytes=gauges.host_pinned_bytes,
        ),
        disk=cache_pb2.TierStatus(
            location=str(cache.config.disk.disk_dir),
            used_bytes=gauges.disk_used_bytes,
            limit_bytes=gauges.disk_limit_bytes,
            num_chunks=gauges.disk_pinned_chunks + gauges.disk_unpinned_chunks,
            pinned_bytes=gauges.disk_pinned_bytes,
            breaker_open_reason=cache.resources.disk_health.breaker_open_reason,
        ),
        sessions=[_session(session) for session in cache.sessions],
        namespaces=[namespace_status(namespace) for namespace in cache.namespaces.values()],
        num_prompts=gauges.prompts,
        num_pinned=cache.prompts.num_pinned,
        counters=cache.resources.counters.as_dict(),
        store=cache.config.cache.store,
        http_url=http.url,
        http_problem=http.problem,
        prompt_bytes=cache.prompts.num_bytes,
        disk_keys=disk_keys,
    )


async def _key_usage(cache: Cache) -> list[cache_pb2.KeyUsage]:
    """Return what each key seals, the one that writes first; nothing while no pack is sealed, and none will be.

    With turns of the loop in between: there may be a hundred thousand packs.
    """
    disk, usage = cache.resources.disk, cache.resources.disk_usage
    num_packs, num_bytes, breather = Counter[str](), Counter[str](), Breather()
    for namespace in list(cache.namespaces.values()):
        packs = namespace.index.packs
        for part in slices(list(packs)):
            for pack_id in part:
                name = packs.key_of(pack_id)
                num_packs[name] += 1
                num_bytes[name] += usage.file_bytes(pack_id)
            await breather.pause()
    if not disk.writes_with and not any(num_packs):
        return []
    names = {disk.writes_with, *num_packs}
    return [
        cache_pb2.KeyUsage(
            name=name,
            writes=name == disk.writes_with,
            is_missing=not disk.can_open(name),
            num_packs=num_packs[name],
            num_bytes=num_bytes[name],
        )
        for name in sorted(names, key=lambda name: (name != disk.writes_with, name))
    ]


def _session(session: Session) -> cache_pb2.SessionStatus:
    return message_of(
        cache_pb2.SessionStatus,
        session,
        engine_id=session.hello.engine_id,
        pid=session.hello.pid,
        model_names=session.hello.model_names,
        num_leases=session.loads.num_leases,
        num_acquires=session.loads.num_acquires,
        num_store_grants=session.stores.num_grants,
        quarantined=session.ended,
    )


def namespace_status(namespace: Namespace, *, with_fingerprint: bool = False) -> cache_pb2.NamespaceStatus:
    """Return a namespace as a message; a fingerprint is some kilobytes."""
    return message_of(
        cache_pb2.NamespaceStatus,
        namespace,
        model=namespace.row.model,
        num_host_chunks=namespace.table.host.num_chunks,
        num_disk_chunks=namespace.table.disk.num_chunks,
        disk_bytes=namespace.table.disk.num_bytes,
        row_bytes=namespace.layout.row_bytes,
        fingerprint=namespace.fingerprint if with_fingerprint else {},
        quarantine_reason=namespace.quarantine.reason if namespace.quarantine is not None else "",
        quarantined_unix_s=namespace.quarantine.since_unix_s if namespace.quarantine is not None else 0.0,
    )


def parse_ready_request(message: cache_pb2.ReadyRequest) -> tuple[list[str], ReadyWhere]:
    """Return whose readiness is asked for, and where; InvalidArgumentError if that cannot be answered."""
    limits.check_count("names", len(message.names), limits.MAX_READY_NAMES)
    if message.where not in cache_pb2.ReadyRequest.Where.values():
        raise InvalidArgumentError("where", message.where, "use one of DISK, HOST, DEVICE")
    return list(message.names), ReadyWhere[cache_pb2.ReadyRequest.Where.Name(message.where)]


def readiness_message(readiness: Readiness) -> cache_pb2.Readiness:
    """Return whether prompts are ready as a message."""
    waiting = [
        message_of(cache_pb2.WaitingPrompt, each, state=cache_pb2.PromptStatus.State.Value(each.state.name))
        for each in readiness.waiting
    ]
    return message_of(cache_pb2.Readiness, readiness, waiting=waiting)


def verify_report(report: VerifyReport) -> cache_pb2.VerifyReport:
    """Return a verification's report as a message."""
    namespaces = [
        message_of(
            cache_pb2.VerifiedNamespace,
            each,
            host=message_of(cache_pb2.VerifiedTier, each.host),
            disk=message_of(cache_pb2.VerifiedTier, each.disk),
        )
        for each in report.namespaces
    ]
    return message_of(cache_pb2.VerifyReport, report, namespaces=namespaces)


def fsck_report(report: Report) -> cache_pb2.FsckReport:
    """Return a check's report as a message."""
    findings = [message_of(cache_pb2.FsckFinding, finding) for finding in report.findings]
    return message_of(cache_pb2.FsckReport, report, findings=findings)
