"""CacheService: what operators ask, as proto/kvtier/v1/cache.proto says it."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import islice

from kvtier._pb import cache_pb2 as pb
from kvtier.access.caller import Door, current_caller
from kvtier.access.caller_shares import CallerShares
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.bundles import export_bundle, import_bundle
from kvtier.core import limits
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.errors import InvalidArgumentError, TooManyWatchersError
from kvtier.fleet.fleet import Fleet
from kvtier.maintenance.online import OnlineFsck
from kvtier.maintenance.prompt_verification import PromptVerification
from kvtier.obs.event_watches import watching_events
from kvtier.outcomes.explain import AskedPrompt
from kvtier.rpc.convert import (
    daemon_status,
    explanation_message,
    fsck_report,
    message_of,
    namespace_advice,
    namespace_status,
    parse_import_start,
    parse_outcome,
    parse_ready_request,
    readiness_message,
    recent_request,
    verify_report,
)
from kvtier.rpc.doors.grant_calls import GrantCalls
from kvtier.rpc.error_statuses import Context
from kvtier.rpc.http_serving import HttpState
from kvtier.rpc.list_pages import fill_page, page_size
from kvtier.rpc.pin_requests import tokens_of
from kvtier.rpc.prompt_servicer import PromptServicer
from kvtier.rpc.remote_message import remote_status
from kvtier.service import Cache

MAX_WATCHERS = 64
"""Of events over TCP and HTTP, and as many at the socket: no one elsewhere takes the places of its operators."""
MAX_WATCHERS_EACH = 16
"""Of one caller elsewhere."""
_LISTED_REQUESTS = 100


class CacheServicer(PromptServicer, GrantCalls):
    """Each method is one call of the service; `ErrorStatuses` makes statuses of its errors."""

    def __init__(self, cache: Cache, http: HttpState, gatekeeper: Gatekeeper, fleet: Fleet | None = None) -> None:
        PromptServicer.__init__(self, cache, fleet)
        GrantCalls.__init__(self, gatekeeper)
        self._http = http
        self._fsck, self._verification = OnlineFsck(cache), PromptVerification(cache)
        too_many = TooManyWatchersError
        self._local_watches = CallerShares("clients watch events at the socket", MAX_WATCHERS, MAX_WATCHERS, too_many)
        self._far_watches = CallerShares("clients watch events", MAX_WATCHERS, MAX_WATCHERS_EACH, too_many)

    async def GetAdvice(self, request: pb.GetAdviceRequest, context: Context) -> pb.Advice:
        max_bytes, advice = await self._cache.auto_pins.advise(request.max_bytes)
        return pb.Advice(
            mode=self._cache.config.cache.auto_pin,
            max_bytes=max_bytes,
            namespaces=[namespace_advice(self._owners.shown_advice(each)) for each in advice],
        )

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.DaemonStatus:
        return await self._owners.shown_status(await daemon_status(self._cache, self._http))

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
        bundle = export_bundle(
            self._cache, request.name, request.namespace_id, decoded=request.decoded, may_see=self._owners.may_see
        )
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
            return explanation_message(self._cache.explainer.explain_request(request.request_id, self._owners.may_see))
        limits.check_count("tokens", len(request.tokens), limits.MAX_TOKENS)
        names = {name: getattr(request, name) for name in ("model", "lora_name", "cache_salt")}
        for name, value in names.items():
            limits.TEXT.check(name, value)
        wanted = AskedPrompt(tokens=await tokens_of(request.tokens), **names)
        return explanation_message(await self._cache.explainer.explain(wanted, self._owners.may_see))

    async def ListRecentRequests(
        self, request: pb.ListRecentRequestsRequest, context: Context
    ) -> pb.ListRecentRequestsResponse:
        most = limits.MAX_LISTED_REQUESTS.check("max_requests", request.max_requests) or _LISTED_REQUESTS
        limits.check_count("outcomes", len(request.outcomes), len(RequestOutcome))
        outcomes = {parse_outcome("outcomes", each) for each in request.outcomes}
        kept = len(self._cache.outcomes.recent)
        last = self._cache.outcomes.recent.last(kept, outcomes, misses_only=request.misses_only)
        by_pin_id = self._cache.prompts.by_pin_id
        found = islice((each for each in last if self._owners.may_see(by_pin_id(each.pin_id))), most)
        name_of = self._cache.explainer.name_of
        return pb.ListRecentRequestsResponse(requests=[recent_request(each, name_of(each.pin_id)) for each in found])

    async def VerifyPrompt(self, request: pb.VerifyPromptRequest, context: Context) -> pb.VerifyReport:
        limits.TEXT.check("namespace_id", request.namespace_id)
        may_see = self._owners.may_see
        return verify_report(await self._verification.run(request.name, request.namespace_id, may_see=may_see))

    async def QuarantineNamespace(self, request: pb.QuarantineNamespaceRequest, context: Context) -> pb.NamespaceStatus:
        return namespace_status(await self._cache.quarantines.begin(request.namespace_id, request.reason))

    async def ReleaseNamespace(self, request: pb.ReleaseNamespaceRequest, context: Context) -> pb.NamespaceStatus:
        return namespace_status(await self._cache.quarantines.end(request.namespace_id))

    async def CheckReady(self, request: pb.ReadyRequest, context: Context) -> pb.Readiness:
        names, where = parse_ready_request(request)
        return readiness_message(await self._cache.readiness.check(names, where, may_see=self._owners.may_see))

    async def GetRemote(self, request: pb.GetRemoteRequest, context: Context) -> pb.RemoteStatus:
        if self._fleet is None:
            return pb.RemoteStatus()
        hosts = await self._fleet.clock.hosts() if request.with_hosts else ()
        return await remote_status(self._fleet, hosts, current_caller().may_see)

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Context) -> AsyncIterator[pb.Event]:
        limits.check_count("names", len(request.names), limits.MAX_READY_NAMES)
        caller = current_caller()
        watches = self._local_watches if caller.door is Door.SOCKET else self._far_watches
        with watches.holding(caller.grant_id), watching_events(request.names) as watch:
            await context.send_initial_metadata(())  # from now on no event is missed
            async for event in watch.events():
                if self._owners.is_visible_event(event):
                    yield message_of(pb.Event, event)


async def _pieces(messages: AsyncIterator[pb.ImportMessage]) -> AsyncIterator[bytes]:
    async for message in messages:
        if message.WhichOneof("kind") != "piece":
            raise InvalidArgumentError("message", message.WhichOneof("kind"), "pieces follow ImportStart, nothing else")
        yield message.piece.data
