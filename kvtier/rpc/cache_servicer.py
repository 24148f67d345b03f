"""CacheService: what operators ask, as proto/kvtier/v1/cache.proto says it."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.bundles import export_bundle, import_bundle
from kvtier.concurrency.turns import Breather, slices
from kvtier.core import limits
from kvtier.core.tokens import TokenIds
from kvtier.errors import InvalidArgumentError, PromptUnrenderedError
from kvtier.maintenance.online import OnlineFsck
from kvtier.prompts.status import EvictionView, PromptView
from kvtier.rpc.convert import daemon_status, fsck_report, namespace_status, prompt_status
from kvtier.rpc.error_statuses import Context, translated
from kvtier.rpc.metrics import MetricsState
from kvtier.rpc.paging import fill_page, page_size
from kvtier.rpc.parsing import parse_import_start, parse_pin
from kvtier.service import Cache
from kvtier.tiering.command_eviction import EvictTier

_WATCH_POLL_S = 0.1
_TOKENS_TAKEN_IN_A_TURN = 65_536
_TIERS: dict[int, EvictTier] = {
    pb.TIER_ANY: EvictTier.ANY,
    pb.TIER_HOST: EvictTier.HOST,
    pb.TIER_DISK: EvictTier.DISK,
}


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Every method is one call of the service between two translations."""

    def __init__(self, cache: Cache, metrics: MetricsState) -> None:
        self._cache, self._metrics = cache, metrics
        self._fsck = OnlineFsck(cache)

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PromptStatus:
        """Make a prompt a pinned one."""
        async with translated(context):
            limits.check_count("tokens", len(request.tokens), limits.MAX_TOKENS)
            requested = parse_pin(request, await _token_ids(request.tokens))
            view = await self._cache.pins.pin(requested)
        return prompt_status(view)

    async def ListPrompts(self, request: pb.ListPromptsRequest, context: Context) -> pb.ListPromptsResponse:
        """Return a page of all prompts, by name."""
        async with translated(context):
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
            yield prompt.name, prompt_status(view, with_recipe=False)

    async def GetPrompt(self, request: pb.GetPromptRequest, context: Context) -> pb.PromptStatus:
        """Return one prompt."""
        async with translated(context):
            view = await self._cache.pins.view(request.name)
        return prompt_status(view)

    async def GetTokens(self, request: pb.GetTokensRequest, context: Context) -> pb.PromptTokens:
        """Return a prompt's token ids."""
        async with translated(context):
            prompt = self._cache.prompts.get(request.name)
            if not prompt.tokens:
                raise PromptUnrenderedError(prompt.name)
        return pb.PromptTokens(tokens=prompt.token_ids.to_list())

    async def WatchPrompt(self, request: pb.GetPromptRequest, context: Context) -> AsyncIterator[pb.PromptStatus]:
        """Return one prompt now and whenever it changes."""
        last: PromptView | None = None
        while True:
            async with translated(context):
                view = await self._cache.pins.view(request.name)
            if view != last:
                last = view
                yield prompt_status(view)
            await asyncio.sleep(_WATCH_POLL_S)

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.PromptStatus:
        """End a promise."""
        async with translated(context):
            view = await self._cache.pins.unpin(request.name)
        return prompt_status(view)

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        """Drop a prompt's chunks, or all."""
        async with translated(context):
            done = await self._evict(request)
        return pb.EvictResponse(
            num_chunks=done.num_chunks,
            host_bytes=done.host_bytes,
            disk_bytes=done.disk_bytes,
            num_shared_chunks=done.num_shared_chunks,
        )

    async def _evict(self, request: pb.EvictRequest) -> EvictionView:
        tier = _TIERS.get(request.tier)
        if tier is None:
            raise InvalidArgumentError("tier", request.tier, f"use one of {', '.join(pb.Tier.keys())}")
        if request.all == bool(request.name):
            raise InvalidArgumentError("name", request.name, "give either the name of a prompt, or `all`")
        if request.all:
            return await self._cache.pins.evict_all(force=request.force, tier=tier)
        return await self._cache.pins.evict(request.name, force=request.force, tier=tier)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.DaemonStatus:
        """Return tiers, sessions, namespaces and counters."""
        return daemon_status(self._cache, self._metrics)

    async def ListNamespaces(self, request: pb.ListNamespacesRequest, context: Context) -> pb.ListNamespacesResponse:
        """Return a page of all namespaces, by id."""
        size = page_size(request.page_size)
        namespaces, token = await fill_page(self._listed_namespaces(request.page_token), size)
        return pb.ListNamespacesResponse(namespaces=namespaces, next_page_token=token)

    async def _listed_namespaces(self, after: str) -> AsyncIterator[tuple[str, pb.NamespaceStatus]]:
        for namespace_id, namespace in sorted(self._cache.namespaces.items()):
            if namespace_id > after:
                yield namespace_id, namespace_status(namespace, with_fingerprint=True)

    async def Fsck(self, request: pb.FsckRequest, context: Context) -> pb.FsckReport:
        """Compare ledger, packs and memory."""
        async with translated(context):
            report = await self._fsck.run(repair=request.repair, deep=request.deep)
        return fsck_report(report)

    async def Export(self, request: pb.ExportRequest, context: Context) -> AsyncIterator[pb.BundlePiece]:
        """Send a prompt as a bundle."""
        bundle = export_bundle(self._cache, request.name, request.namespace_id, decoded=request.decoded)
        async with translated(context), aclosing(bundle) as pieces:
            async for data in pieces:
                yield pb.BundlePiece(data=data)

    async def Import(self, request_iterator: AsyncIterator[pb.ImportMessage], context: Context) -> pb.PromptStatus:
        """Take a bundle in."""
        async with translated(context):
            requested = parse_import_start(await anext(request_iterator, None))
            view = await import_bundle(self._cache, requested, _pieces(request_iterator))
        return prompt_status(view)


async def _token_ids(tokens: Sequence[int]) -> TokenIds:
    """Return a message's tokens; it may have millions."""
    ids = array("I")
    for part in slices(tokens, _TOKENS_TAKEN_IN_A_TURN):
        ids.extend(part)
        await asyncio.sleep(0)
    return TokenIds(ids)


async def _pieces(messages: AsyncIterator[pb.ImportMessage]) -> AsyncIterator[bytes]:
    async for message in messages:
        if message.WhichOneof("kind") != "piece":
            raise InvalidArgumentError("message", message.WhichOneof("kind"), "pieces follow ImportStart, nothing else")
        yield message.piece.data
