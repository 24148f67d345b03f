"""The calls of CacheService that are about prompts."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.access.caller import Door, current_caller
from kvtier.access.caller_shares import CallerShares
from kvtier.concurrency.pauses import POLL_S
from kvtier.concurrency.turns import Breather
from kvtier.core import limits
from kvtier.errors import InvalidArgumentError, PromptNotBoundError, PromptNotFoundError, PromptUnrenderedError
from kvtier.fleet.fleet import Fleet
from kvtier.ledger import PromptRow
from kvtier.prompts.book import PinUpdate, RequestedPin
from kvtier.prompts.planned_pins import check_expected
from kvtier.prompts.states.status import PromptView, chunk_map
from kvtier.prompts.states.watched_views import WatchedViews
from kvtier.prompts.versions import old_version
from kvtier.rpc.convert import fields_of, message_of, prompt_status
from kvtier.rpc.doors.owner_rules import OwnerRules
from kvtier.rpc.error_statuses import Context
from kvtier.rpc.list_pages import fill_page, page_size
from kvtier.rpc.pin_requests import CONTENT_FIELDS, AppliedPins, how_of_request, read_apply, requested_pin
from kvtier.service import Cache
from kvtier.tiering.command_eviction import EvictTier

_TIERS: dict[int, EvictTier] = {
    pb.TIER_ANY: EvictTier.ANY,
    pb.TIER_HOST: EvictTier.HOST,
    pb.TIER_DISK: EvictTier.DISK,
}


MAX_WATCHES = 256
"""Of prompts at a time, over TCP and HTTP."""
MAX_WATCHES_EACH = 32
"""Of one caller."""


class PromptServicer(cache_pb2_grpc.CacheServiceServicer):
    """Pin, list, change, unpin and evict; see `CacheServicer`. A caller with an owner has that owner's prompts only."""

    def __init__(self, cache: Cache, fleet: Fleet | None = None) -> None:
        self._cache, self._fleet = cache, fleet
        self._owners = OwnerRules(cache.prompts)
        self._watched = WatchedViews(cache.pins.view_of)
        self._prompt_watches = CallerShares("prompts are watched", MAX_WATCHES, MAX_WATCHES_EACH)
        most, most_each = limits.MAX_OPEN_APPLIED_BYTES, limits.MAX_OPEN_APPLIED_BYTES_EACH
        self._applied_bytes = CallerShares("bytes of applies are open", most, most_each)

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PromptStatus:
        limits.check_count("tokens", len(request.tokens), limits.MAX_TOKENS)
        limits.check_chosen_name("name", request.name)
        limits.check_users_labels("labels", request.labels.values)
        if request.adopt or request.version:
            for name in CONTENT_FIELDS:
                if getattr(request, name):
                    raise InvalidArgumentError(name, getattr(request, name), "comes from the prompt that is named")
            return await (self._adopt(request) if request.adopt else self._roll_back(request))
        return await self._pin(await requested_pin(request))

    async def _pin(self, requested: RequestedPin) -> pb.PromptStatus:
        owned = replace(requested, owner=self._owners.owner_for("Pin", requested.owner))
        (made,) = await self._apply(AppliedPins(pins=[owned]))
        return self._status(await self._cache.pins.view_of(made))

    async def _apply(self, wanted: AppliedPins) -> list[PromptRow]:
        check_names = self._owners.check_names([pin.name for pin in wanted.pins], wanted.unpinned)

        def check() -> None:
            if check_names is not None:
                check_names()
            check_expected(self._cache.prompts, wanted.expected, wanted.pins, wanted.unpinned)

        if self._cache.pins.ask_fleet is not None:
            await self._cache.pins.ask_fleet()
        return await self._cache.pins.apply(wanted.pins, wanted.unpinned, dry_run=wanted.dry_run, precondition=check)

    async def ApplyPrompts(
        self, request_iterator: AsyncIterator[pb.ApplyMessage], context: Context
    ) -> pb.ApplyResponse:
        with self._applied_bytes.taking(current_caller().grant_id) as take_bytes:
            wanted = await read_apply(request_iterator, take_bytes)
            owner_for = self._owners.owner_for
            wanted.pins = [replace(pin, owner=owner_for("ApplyPrompts", pin.owner)) for pin in wanted.pins]
            made = await self._apply(wanted)
        pairs = zip(wanted.pins, made, strict=True)
        applied = [pb.AppliedPrompt(name=pin.name, made=row.name, pin_id=row.pin_id) for pin, row in pairs]
        return pb.ApplyResponse(pins=applied)

    async def RenamePrompt(self, request: pb.RenamePromptRequest, context: Context) -> pb.PromptStatus:
        limits.check_chosen_name("new_name", limits.check_name(request.new_name, "new_name"))
        precondition = self._owners.check_names([request.new_name], [request.name])
        view = await self._cache.renames.rename(request.name, request.new_name, precondition=precondition)
        return self._status(view)

    async def _adopt(self, request: pb.PinRequest) -> pb.PromptStatus:
        limits.check_name(request.adopt)
        self._owners.check_visible(request.adopt)  # automatic pins are no one's: they come from everyone's requests
        return self._status(await self._cache.auto_pins.adopt(request.adopt, request.name, **how_of_request(request)))

    async def _roll_back(self, request: pb.PinRequest) -> pb.PromptStatus:
        old = old_version(self._cache.prompts, request.name, request.version, self._owners.may_see)
        content = {name: getattr(old, name) for name in CONTENT_FIELDS}
        requested = RequestedPin(name=request.name, **content, **how_of_request(request))
        return await self._pin(requested)

    async def ListPrompts(self, request: pb.ListPromptsRequest, context: Context) -> pb.ListPromptsResponse:
        if request.page_token and not limits.is_name(request.page_token):
            raise InvalidArgumentError("page_token", request.page_token[:40], "give next_page_token of a page")
        size = page_size(request.page_size)
        after, watch = request.page_token, self._cache.pins.watch
        listed = (
            [prompt for prompt in watch.unfinished() if prompt.name > after and self._owners.may_see(prompt)][
                : size + 1
            ]
            if request.unfinished
            else await self._owners.visible_after(after, size + 1)
        )
        prompts, token = await fill_page(self._listed(listed, for_refresh=request.unfinished), size)
        return pb.ListPromptsResponse(prompts=prompts, next_page_token=token)

    async def _listed(
        self, prompts: Sequence[PromptRow], *, for_refresh: bool
    ) -> AsyncIterator[tuple[str, pb.PromptStatus]]:
        breather = Breather()
        for prompt in prompts:
            await breather.pause()
            view = await self._cache.pins.view_of(prompt)
            status = self._status(view, with_recipe=False)
            if for_refresh and self._fleet is not None:
                status.computed_elsewhere = self._fleet.kv.is_computed_elsewhere(prompt)
            yield prompt.name, status

    async def GetPrompt(self, request: pb.GetPromptRequest, context: Context) -> pb.PromptStatus:
        status = self._status(await self._cache.pins.view_of(self._prompt_of(request)))
        if (use := self._cache.auto_pins.use_of(status.name)) is not None:
            status.use.CopyFrom(message_of(pb.PinUse, use))
        return status

    def _status(self, view: PromptView, *, with_recipe: bool = True) -> pb.PromptStatus:
        usage, sees_text = self._cache.outcomes.usage_of(view.prompt.pin_id), current_caller().sees_text
        status = prompt_status(view, usage, with_recipe=with_recipe and sees_text)
        if not sees_text:
            status.ClearField("cache_salt")
        return status

    def _prompt_of(self, request: pb.GetPromptRequest) -> PromptRow:
        if bool(request.name) == bool(request.pin_id):
            raise InvalidArgumentError("name", request.name, "give either a name or a pin_id")
        if request.name:
            self._owners.check_visible(request.name)
            return self._cache.prompts.get(request.name)
        limits.TEXT.check("pin_id", request.pin_id)
        prompt = self._cache.prompts.by_pin_id(request.pin_id)
        if prompt is None or not self._owners.may_see(prompt):
            raise PromptNotFoundError(request.pin_id)
        return prompt

    async def GetTokens(self, request: pb.GetTokensRequest, context: Context) -> pb.PromptTokens:
        self._owners.check_visible(request.name)
        prompt = self._cache.prompts.get(request.name)
        if not prompt.tokens:
            raise PromptUnrenderedError(prompt.name)
        return pb.PromptTokens(tokens=prompt.token_ids.to_list())

    async def GetChunkMap(self, request: pb.GetChunkMapRequest, context: Context) -> pb.ChunkMap:
        self._owners.check_visible(request.name)
        wanted = limits.TEXT.check("namespace_id", request.namespace_id)
        prompt = self._cache.prompts.get(request.name)
        bound = {namespace.namespace_id: (namespace, row) for namespace, row in self._cache.pins.bound(prompt)}
        namespace, row = bound.get(wanted or next(reversed(bound), ""), (None, None))
        if namespace is None or row is None:
            raise PromptNotBoundError(prompt.name, wanted)
        return pb.ChunkMap(
            name=prompt.name,
            namespace_id=namespace.namespace_id,
            chunks=await chunk_map(namespace, row),
            covered_tokens=row.covered_tokens,
        )

    async def WatchPrompt(self, request: pb.GetPromptRequest, context: Context) -> AsyncIterator[pb.PromptStatus]:
        caller = current_caller()
        with nullcontext() if caller.door is Door.SOCKET else self._prompt_watches.holding(caller.grant_id):
            last: PromptView | None = None
            since_s = time.monotonic()
            while True:
                view = await self._watched.view_since(self._prompt_of(request), since_s)
                if view != last:
                    last = view
                    yield self._status(view)
                await asyncio.sleep(POLL_S)
                since_s = time.monotonic() - POLL_S

    async def UpdatePrompt(self, request: pb.UpdatePromptRequest, context: Context) -> pb.PromptStatus:
        given = fields_of(request)
        set_labels, removed_labels = dict(given.pop("set_labels")), list(given.pop("removed_labels"))
        limits.check_users_labels("set_labels", set_labels)
        if given.get("owner") is not None:
            given["owner"] = self._owners.owner_for("UpdatePrompt", given["owner"])
        update = PinUpdate(**given, set_labels=set_labels, removed_labels=removed_labels)
        precondition = self._owners.check_names([], [request.name])
        return self._status(await self._cache.pins.update(update, precondition=precondition))

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.PromptStatus:
        self._owners.check_visible(request.name)
        precondition = self._owners.check_names([], [request.name])
        return self._status(
            await self._cache.pins.unpin(request.name, forget=request.forget, precondition=precondition)
        )

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
            precondition = self._owners.check_names([], [request.name])
            done = await self._cache.evictions.evict(
                request.name, force=request.force, tier=tier, precondition=precondition
            )
        await self._cache.quarantines.end_emptied()
        return message_of(pb.EvictResponse, done)
