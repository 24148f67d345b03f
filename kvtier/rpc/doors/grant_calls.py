"""The calls of CacheService that are about grants."""

import time
from collections.abc import Callable
from typing import TypeVar

from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.access.caller import parse_role
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.access.grants import GrantBook, GrantRow, WantedGrant
from kvtier.concurrency.thread_calls import begin_in_thread
from kvtier.errors import TierIOError
from kvtier.rpc.error_statuses import Context

T = TypeVar("T")


class GrantCalls(cache_pb2_grpc.CacheServiceServicer):
    """Make, list and end grants; see `CacheServicer`. Files are written in threads."""

    def __init__(self, gatekeeper: Gatekeeper) -> None:
        self._gatekeeper = gatekeeper

    async def CreateGrant(self, request: pb.CreateGrantRequest, context: Context) -> pb.CreatedGrant:
        wanted = WantedGrant(
            name=request.name,
            role=parse_role(request.role),
            owner=request.owner,
            ttl_s=request.ttl_s,
            certificate=request.certificate,
        )
        grant, token = await self._in_thread(lambda grants: grants.create(wanted, time.time()))
        return pb.CreatedGrant(grant=_message(grant), token=token)

    async def ListGrants(self, request: pb.ListGrantsRequest, context: Context) -> pb.ListGrantsResponse:
        return pb.ListGrantsResponse(grants=map(_message, self._gatekeeper.grants.all()))

    async def RevokeGrant(self, request: pb.RevokeGrantRequest, context: Context) -> pb.Grant:
        ended = await self._in_thread(lambda grants: grants.revoke(request.name))
        self._gatekeeper.end_streams()
        return _message(ended)

    async def _in_thread(self, call: Callable[[GrantBook], T]) -> T:
        """Make a call that a disk which hangs may hold up: the end of the process does not wait for it."""
        grants = self._gatekeeper.grants
        try:
            return await begin_in_thread("kvtier-grant", lambda: call(grants))
        except OSError as exc:  # there is no thread for it
            raise TierIOError(grants.path, "work on", exc) from exc


def _message(grant: GrantRow) -> pb.Grant:
    return pb.Grant(
        name=grant.name,
        role=grant.role.value,
        owner=grant.owner,
        certificate=grant.certificate,
        created_unix_s=grant.created_unix_s,
        expires_unix_s=grant.expires_unix_s,
        grant_id=grant.grant_id,
    )
