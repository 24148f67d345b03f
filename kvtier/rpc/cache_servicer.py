"""CacheService: what operators ask, as proto/kvtier/v1/cache.proto says it."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.bundles import export_bundle, import_bundle
from kvtier.concurrency.pauses import POLL_S
from kvtier.concurrency.turns import Breather
from kvtier.core import limits
from kvtier.core.outcomes import RequestOutcome
from kvtier.core.tokens import TokenIds
from kvtier.errors import InvalidArgumentError, PromptNotFoundError, PromptUnrenderedError
from kvtier.maintenance.online import OnlineFsck
from kvtier.outcomes.explain import AskedPrompt
from kvtier.prompts.book import CONTENT, PinUpdate, RequestedPin
from kvtier.prompts.status import PromptView
from kvtier.rpc.convert import (
    daemon_status,
    explanation_message,
    fields_of,
    fsck_report,
    in_turns_of,
    message_of,
    namespace_advice,
    namespace_status,
    parse_import_start,
    parse_outcome,
    prompt_status,
    recent_request,
)
from kvtier.rpc.error_statuses import Context
from kvtier.rpc.metrics import MetricsState
from kvtier.service import Cache
from kvtier.tiering.command_eviction import EvictTier

MAX_PAGE_SIZE = 1000
_LISTED_REQUESTS = 100
_TIERS: dict[int, EvictTier] = {
    pb.TIER_ANY: EvictTier.ANY,
    pb.TIER_HOST: EvictTier.HOST,
    pb.TIER_DISK: EvictTier.DISK,
}

_CONTENT = (*CONTENT, "recipe_json")
_HOW = ("ttl_s", "priority", "replace", "public")
_PINNED = {"name", *_CONTENT, *_HOW} - {"tokens"}

M = TypeVar("M", bound=Message)


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Each method is one call of the service; `ErrorStatuses` makes statuses of its errors."""

    def __init__(self, cache: Cache, metrics: MetricsState) -> None:
        self._cache, self._metrics = cache, metrics
        self._fsck = OnlineFsck(cache)

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PromptStatus:
        limits.check_count("tokens", len(request.tokens), limits.MAX_TOKENS)
        limits.check_chosen_name("name", request.name)
        if request.adopt or request.version:
            for field in _CONTENT:
                if getattr(request, field):
                    raise InvalidArgumentError(field, getattr(request, field), "comes from the prompt that is named")
            return await (self._adopt(request) if request.adopt else self._roll_back(request))
        tokens = await _tokens_of(request.tokens)
        requested = RequestedPin(**_chosen(request, _PINNED), tokens=tokens)
        return self._status(await self._cache.pins.pin(requested))

    async def _adopt(self, request: pb.PinRequest) -> pb.PromptStatus:
        limits.check_name(request.adopt)
        return self._status(await self._cache.auto_pins.adopt(request.adopt, request.name, **_chosen(request, _HOW)))

    async def _roll_back(self, request: pb.PinRequest) -> pb.PromptStatus:
        old = self._cache.prompts.get(limits.version_name(request.name, request.version))
        content = {field: getattr(old, field) for field in _CONTENT}
        requested = RequestedPin(name=request.name, **content, **_chosen(request, _HOW))
        return self._status(await self._cache.pins.pin(requested))

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
        prompts, token = await fill_page(self._listed(request.page_token, size), size)
        return pb.ListPromptsResponse(prompts=prompts, next_page_token=token)

    async def _listed(self, after: str, size: int) -> AsyncIterator[tuple[str, pb.PromptStatus]]:
        breather = Breather()
        for prompt in self._cache.prompts.after(after, size + 1):
            await breather.pause()
            view = await self._cache.pins.view_of(prompt)
            yield prompt.name, self._status(view, with_recipe=False)

    async def GetPrompt(self, request: pb.GetPromptRequest, context: Context) -> pb.PromptStatus:
        status = self._status(await self._view_of(request))
        if (use := self._cache.auto_pins.use_of(status.name)) is not None:
            status.use.CopyFrom(message_of(pb.PinUse, use))
        return status

    def _status(self, view: PromptView, *, with_recipe: bool = True) -> pb.PromptStatus:
        usage = self._cache.outcomes.usage_of(view.prompt.pin_id)
        return prompt_status(view, usage, with_recipe=with_recipe)

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
                yield self._status(view)
            await asyncio.sleep(POLL_S)

    async def UpdatePrompt(self, request: pb.UpdatePromptRequest, context: Context) -> pb.PromptStatus:
        return self._status(await self._cache.pins.update(PinUpdate(**fields_of(request))))

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.PromptStatus:
        return self._status(await self._cache.pins.unpin(request.name))

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        tier = _TIERS.get(request.tier)
        if tier is None:
            raise InvalidArgumentError("tier", request.tier, f"use one of {', '.join(pb.Tier.keys())}")
        if request.all == bool(request.name):
            raise InvalidArgumentError("name", request.name, "give either the name of a prompt, or `all`")
        if request.all:
            done = await self._cache.evictions.evict_all(force=request.force, tier=tier)
        else:
            done = await self._cache.evictions.evict(request.name, force=request.force, tier=tier)
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
        return self._status(await import_bundle(self._cache, requested, _pieces(request_iterator)))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.Explanation:
        if bool(request.tokens) == bool(request.request_id):
            raise InvalidArgumentError("tokens", len(request.tokens), "give either token ids or a request_id")
        if request.request_id:
            limits.REQUEST_ID.check("request_id", request.request_id)
            return explanation_message(self._cache.explainer.explain_request(request.request_id))
        limits.check_count("tokens", len(request.tokens), limits.MAX_TOKENS)
        names = {field: getattr(request, field) for field in ("model", "lora_name", "cache_salt")}
        for field, value in names.items():
            limits.TEXT.check(field, value)
        wanted = AskedPrompt(tokens=await _tokens_of(request.tokens), **names)
        return explanation_message(await self._cache.explainer.explain(wanted))

    async def ListRecentRequests(
        self, request: pb.ListRecentRequestsRequest, context: Context
    ) -> pb.ListRecentRequestsResponse:
        most = limits.MAX_LISTED_REQUESTS.check("max_requests", request.max_requests) or _LISTED_REQUESTS
        limits.check_count("outcomes", len(request.outcomes), len(RequestOutcome))
        outcomes = {parse_outcome("outcomes", each) for each in request.outcomes}
        found = self._cache.outcomes.recent.last(most, outcomes, misses_only=request.misses_only)
        name_of = self._cache.explainer.name_of
        return pb.ListRecentRequestsResponse(requests=[recent_request(each, name_of(each.pin_id)) for each in found])


async def _tokens_of(tokens: Sequence[int]) -> TokenIds:
    ids = array("I")
    async for part in in_turns_of(tokens):
        ids.extend(part)
    return TokenIds(ids)


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


def _chosen(request: pb.PinRequest, names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in fields_of(request).items() if name in names}
