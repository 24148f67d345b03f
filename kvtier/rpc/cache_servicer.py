"""CacheService: what operators ask, as proto/kvtier/v1/cache.proto says it."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.bundles import export_bundle, import_bundle
from kvtier.concurrency.pauses import POLL_S
from kvtier.concurrency.turns import Breather
from kvtier.core import limits
from kvtier.core.tokens import TokenIds
from kvtier.errors import InvalidArgumentError, PromptNotFoundError, PromptUnrenderedError
from kvtier.ledger import PromptRow
from kvtier.maintenance.online import OnlineFsck
from kvtier.maintenance.prompt_verification import PromptVerification
from kvtier.obs.event_watches import EventWatches
from kvtier.prompts.book import CONTENT, PinUpdate, RequestedPin
from kvtier.prompts.status import PromptView
from kvtier.rpc.convert import (
    daemon_status,
    fields_of,
    fsck_report,
    in_turns_of,
    message_of,
    namespace_advice,
    namespace_status,
    parse_import_start,
    parse_ready_request,
    prompt_status,
    readiness_message,
    verify_report,
)
from kvtier.rpc.error_statuses import Context
from kvtier.rpc.metrics import MetricsState
from kvtier.service import Cache
from kvtier.tiering.command_eviction import EvictTier

MAX_PAGE_SIZE = 1000
_TIERS: dict[int, EvictTier] = {
    pb.TIER_ANY: EvictTier.ANY,
    pb.TIER_HOST: EvictTier.HOST,
    pb.TIER_DISK: EvictTier.DISK,
}

_CONTENT = (*CONTENT, "recipe_json")
_HOW = ("ttl_s", "sliding", "priority", "replace", "public", "owner")

M = TypeVar("M", bound=Message)


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Each method is one call of the service; `ErrorStatuses` makes statuses of its errors."""

    def __init__(self, cache: Cache, metrics: MetricsState) -> None:
        self._cache, self._metrics = cache, metrics
        self._fsck, self._verification = OnlineFsck(cache), PromptVerification(cache)
        self._watches = EventWatches()

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PromptStatus:
        limits.check_count("tokens", len(request.tokens), limits.MAX_TOKENS)
        limits.check_chosen_name("name", request.name)
        if request.adopt or request.version:
            for name in _CONTENT:
                if getattr(request, name):
                    raise InvalidArgumentError(name, getattr(request, name), "comes from the prompt that is named")
            return await (self._adopt(request) if request.adopt else self._roll_back(request))
        return prompt_status(await self._cache.pins.pin(await _requested_pin(request)))

    async def ApplyPrompts(
        self, request_iterator: AsyncIterator[pb.ApplyMessage], context: Context
    ) -> pb.ApplyResponse:
        wanted = await read_apply(request_iterator)
        made = await self._cache.pins.apply(wanted.pins, wanted.unpinned, dry_run=wanted.dry_run)
        pairs = zip(wanted.pins, made, strict=True)
        applied = [pb.AppliedPrompt(name=pin.name, made=row.name, pin_id=row.pin_id) for pin, row in pairs]
        return pb.ApplyResponse(pins=applied)

    async def RenamePrompt(self, request: pb.RenamePromptRequest, context: Context) -> pb.PromptStatus:
        limits.check_chosen_name("new_name", limits.check_name(request.new_name))
        return prompt_status(await self._cache.pins.rename(request.name, request.new_name))

    async def _adopt(self, request: pb.PinRequest) -> pb.PromptStatus:
        limits.check_name(request.adopt)
        return prompt_status(await self._cache.auto_pins.adopt(request.adopt, request.name, **_how(request)))

    async def _roll_back(self, request: pb.PinRequest) -> pb.PromptStatus:
        old = self._cache.prompts.get(limits.version_name(request.name, request.version))
        content = {name: getattr(old, name) for name in _CONTENT}
        requested = RequestedPin(name=request.name, **content, **_how(request))
        return prompt_status(await self._cache.pins.pin(requested))

    async def GetAdvice(self, request: pb.GetAdviceRequest, context: Context) -> pb.Advice:
        config = self._cache.config.cache
        return pb.Advice(
            mode=config.auto_pin,
            max_bytes=request.max_bytes or config.auto_pin_max_bytes,
            namespaces=[namespace_advice(each) for each in await self._cache.auto_pins.advise(request.max_bytes)],
        )

    async def ListPrompts(self, request: pb.ListPromptsRequest, context: Context) -> pb.ListPromptsResponse:
        if request.page_token and not limits.is_name(request.page_token):
            raise InvalidArgumentError("page_token", request.page_token[:40], "give next_page_token of a page")
        size = page_size(request.page_size)
        after, watch = request.page_token, self._cache.pins.watch
        listed = (
            [prompt for prompt in watch.unfinished() if prompt.name > after][: size + 1]
            if request.unfinished
            else self._cache.prompts.after(after, size + 1)
        )
        prompts, token = await fill_page(self._listed(listed), size)
        return pb.ListPromptsResponse(prompts=prompts, next_page_token=token)

    async def _listed(self, prompts: Sequence[PromptRow]) -> AsyncIterator[tuple[str, pb.PromptStatus]]:
        breather = Breather()
        for prompt in prompts:
            await breather.pause()
            view = await self._cache.pins.view_of(prompt)
            yield prompt.name, prompt_status(view, with_recipe=False)

    async def GetPrompt(self, request: pb.GetPromptRequest, context: Context) -> pb.PromptStatus:
        status = prompt_status(await self._view_of(request))
        if (use := self._cache.auto_pins.use_of(status.name)) is not None:
            status.use.CopyFrom(message_of(pb.PinUse, use))
        return status

    async def _view_of(self, request: pb.GetPromptRequest) -> PromptView:
        if bool(request.name) == bool(request.pin_id):
            raise InvalidArgumentError("name", request.name, "give either a name or a pin_id")
        if request.name:
            return await self._cache.pins.view(request.name)
        limits.TEXT.check("pin_id", request.pin_id)
        prompt = self._cache.prompts.by_pin_id(request.pin_id)
        if prompt is None:
            raise PromptNotFoundError(request.pin_id)
        return await self._cache.pins.view_of(prompt)

    async def GetTokens(self, request: pb.GetTokensRequest, context: Context) -> pb.PromptTokens:
        prompt = self._cache.prompts.get(request.name)
        if not prompt.tokens:
            raise PromptUnrenderedError(prompt.name)
        return pb.PromptTokens(tokens=prompt.token_ids.to_list())

    async def WatchPrompt(self, request: pb.GetPromptRequest, context: Context) -> AsyncIterator[pb.PromptStatus]:
        last: PromptView | None = None
        while True:
            view = await self._view_of(request)
            if view != last:
                last = view
                yield prompt_status(view)
            await asyncio.sleep(POLL_S)

    async def UpdatePrompt(self, request: pb.UpdatePromptRequest, context: Context) -> pb.PromptStatus:
        given = fields_of(request)
        set_labels, removed_labels = dict(given.pop("set_labels")), list(given.pop("removed_labels"))
        update = PinUpdate(**given, set_labels=set_labels, removed_labels=removed_labels)
        return prompt_status(await self._cache.pins.update(update))

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.PromptStatus:
        return prompt_status(await self._cache.pins.unpin(request.name))

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        tier = _TIERS.get(request.tier)
        if tier is None:
            raise InvalidArgumentError("tier", request.tier, f"use one of {', '.join(pb.Tier.keys())}")
        if request.all == bool(request.name):
            raise InvalidArgumentError("name", request.name, "give either the name of a prompt, or `all`")
        if request.namespace_id and not request.all:
            raise InvalidArgumentError("namespace_id", request.namespace_id, "give it with `all`")
        if request.all:
            done = await self._cache.evictions.evict_all(
                force=request.force, tier=tier, namespace_id=request.namespace_id
            )
        else:
            done = await self._cache.evictions.evict(request.name, force=request.force, tier=tier)
        await self._cache.quarantines.end_emptied()
        return message_of(pb.EvictResponse, done)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.DaemonStatus:
        return daemon_status(self._cache, self._metrics)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Context) -> pb.ListNamespacesResponse:
        size = page_size(request.page_size)
        namespaces, token = await fill_page(self._listed_namespaces(request.page_token), size)
        return pb.ListNamespacesResponse(namespaces=namespaces, next_page_token=token)

    async def _listed_namespaces(self, after: str) -> AsyncIterator[tuple[str, pb.NamespaceStatus]]:
        for namespace_id, namespace in sorted(self._cache.namespaces.items()):
            if namespace_id > after:
                yield namespace_id, namespace_status(namespace, with_fingerprint=True)

    async def Fsck(self, request: pb.FsckRequest, context: Context) -> pb.FsckReport:
        return fsck_report(await self._fsck.run(repair=request.repair, deep=request.deep))

    async def Export(self, request: pb.ExportRequest, context: Context) -> AsyncIterator[pb.BundlePiece]:
        bundle = export_bundle(self._cache, request.name, request.namespace_id, decoded=request.decoded)
        async with aclosing(bundle) as pieces:
            async for data in pieces:
                yield pb.BundlePiece(data=data)

    async def Import(self, request_iterator: AsyncIterator[pb.ImportMessage], context: Context) -> pb.PromptStatus:
        requested = parse_import_start(await anext(request_iterator, None))
        return prompt_status(await import_bundle(self._cache, requested, _pieces(request_iterator)))

    async def VerifyPrompt(self, request: pb.VerifyPromptRequest, context: Context) -> pb.VerifyReport:
        limits.TEXT.check("namespace_id", request.namespace_id)
        return verify_report(await self._verification.run(request.name, request.namespace_id))

    async def QuarantineNamespace(self, request: pb.QuarantineNamespaceRequest, context: Context) -> pb.NamespaceStatus:
        return namespace_status(await self._cache.quarantines.begin(request.namespace_id, request.reason))

    async def ReleaseNamespace(self, request: pb.ReleaseNamespaceRequest, context: Context) -> pb.NamespaceStatus:
        return namespace_status(await self._cache.quarantines.end(request.namespace_id))

    async def CheckReady(self, request: pb.ReadyRequest, context: Context) -> pb.Readiness:
        names, where = parse_ready_request(request)
        return readiness_message(await self._cache.readiness.check(names, where))

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Context) -> AsyncIterator[pb.Event]:
        limits.check_count("names", len(request.names), limits.MAX_READY_NAMES)
        with self._watches.watching(request.names) as watch:
            await context.send_initial_metadata(())  # from now on no event is missed
            async for event in watch.events():
                yield message_of(pb.Event, event)


async def _requested_pin(request: pb.PinRequest) -> RequestedPin:
    """Check a pin that is asked for by its content; its tokens are copied in turns of the loop."""
    ids = array("I")
    async for part in in_turns_of(request.tokens):
        ids.extend(part)
    content = {name: getattr(request, name) for name in _CONTENT if name != "tokens"}
    return RequestedPin(name=request.name, tokens=TokenIds(ids), **content, **_how(request))


@dataclass
class _Applied:
    """What an ApplyPrompts asks for."""

    dry_run: bool
    pins: list[RequestedPin] = field(default_factory=list)
    unpinned: list[str] = field(default_factory=list)


async def read_apply(messages: AsyncIterator[pb.ApplyMessage]) -> _Applied:
    """Read all that is to be applied.

    Raises:
        InvalidArgumentError: It does not begin with ApplyStart, has too much, a name twice, or a pin that cannot be.
    """
    first = await anext(messages, None)
    if first is None or first.WhichOneof("kind") != "start":
        found = "nothing" if first is None else first.WhichOneof("kind")
        raise InvalidArgumentError("message", found, "the first message of an apply is ApplyStart")
    wanted, names, num_bytes = _Applied(first.start.dry_run), set[str](), 0
    async for message in messages:
        num_bytes += message.ByteSize()
        limits.check_count("messages", len(names) + 1, limits.MAX_APPLIED)
        if num_bytes > limits.MAX_APPLIED_BYTES:
            remedy = f"at most {limits.MAX_APPLIED_BYTES} bytes are applied at once; split them"
            raise InvalidArgumentError("messages", f"{num_bytes} bytes", remedy)
        name = await _take_applied(wanted, message)
        if name in names:
            raise InvalidArgumentError("name", name, "comes twice; name each prompt once")
        names.add(name)
    return wanted


async def _take_applied(wanted: _Applied, message: pb.ApplyMessage) -> str:
    match message.WhichOneof("kind"):
        case "pin":
            pin = message.pin
            limits.check_count("tokens", len(pin.tokens), limits.MAX_TOKENS)
            limits.check_chosen_name("name", pin.name)
            if pin.adopt or pin.version:
                raise InvalidArgumentError(
                    "adopt, version", pin.name, "pins that are applied have content of their own"
                )
            wanted.pins.append(replace(await _requested_pin(pin), replace=True))
            return pin.name
        case "unpin":
            wanted.unpinned.append(message.unpin)
            return message.unpin
        case kind:
            raise InvalidArgumentError("message", kind, "pins and names to unpin follow ApplyStart, nothing else")


async def _pieces(messages: AsyncIterator[pb.ImportMessage]) -> AsyncIterator[bytes]:
    async for message in messages:
        if message.WhichOneof("kind") != "piece":
            raise InvalidArgumentError("message", message.WhichOneof("kind"), "pieces follow ImportStart, nothing else")
        yield message.piece.data


def page_size(requested: int) -> int:
    """Return the largest number of messages on a page; 0 is a client without a preference."""
    return min(requested or MAX_PAGE_SIZE, MAX_PAGE_SIZE)


async def fill_page(messages: AsyncIterator[tuple[str, M]], max_messages: int) -> tuple[Sequence[M], str]:
    """Take messages for one page; return them, and the token of the next page, which is empty after the last.

    A token is the name of the last message listed (https://google.aip.dev/158), so the daemon keeps nothing between two
    pages. Rejected: one stream. A client that stops in the middle would hold it open.

    Args:
        messages: Each with its name, from the first that belongs on the page, and one more if there is a next page.
        max_messages: See `page_size`.
    """
    taken: list[M] = []
    last, num_bytes = "", 0
    async for name, message in messages:
        num_bytes += message.ByteSize()
        if taken and (len(taken) == max_messages or num_bytes > limits.PIECE_BYTES):
            return taken, last
        taken.append(message)
        last = name
    return taken, ""


def _how(request: pb.PinRequest) -> dict[str, Any]:
    """Return what a request says of how it is to be pinned."""
    labels = dict(request.labels.values) if request.HasField("labels") else None
    return {name: value for name, value in fields_of(request).items() if name in _HOW} | {"labels": labels}
