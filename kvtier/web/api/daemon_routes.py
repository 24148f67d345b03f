"""The daemon as a whole: status, tiers, engines, namespaces, advice, readiness, checks."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from kvtier.library.client import Client
from kvtier.library.values.plain_json import to_jsonable
from kvtier.library.values.proof_values import Readiness
from kvtier.library.values.public_values import (
    Advice,
    DaemonStatus,
    EngineStatus,
    Evicted,
    FsckReport,
    Namespace,
    Tier,
)
from kvtier.library.values.remote_values import RemoteStatus
from kvtier.library.values.savings import Savings
from kvtier.version import __version__
from kvtier.web.api.daemon_calls import Daemon, json_bytes, json_response
from kvtier.web.api.json_schemas import answers
from kvtier.web.api.request_bodies import EvictAllBody, FsckBody, QuarantineBody, body_of, described

router = APIRouter(tags=["daemon"])


@router.get("/whoami", **answers(None, name=str, role=str, owner=str, address=str, version=str))
async def whoami(daemon: Daemon) -> Response:
    """Say who asks, as the daemon sees it."""
    caller = daemon.caller
    who = {"name": caller.name, "role": caller.role.value, "owner": caller.owner, "address": caller.address}
    return json_response(json_bytes(who | {"version": __version__}))


@router.get("/status", **answers(DaemonStatus))
async def get_status(daemon: Daemon) -> Response:
    """Return the daemon's status, as `kvtier status --json`."""
    return await daemon.answer(lambda client: client.status())


@router.get("/tiers", **answers(None, host=Tier, disk=Tier))
async def get_tiers(daemon: Daemon) -> Response:
    """Return host memory and disk."""

    def tiers(client: Client) -> dict[str, Any]:
        status = client.status()
        return {"host": to_jsonable(status.host), "disk": to_jsonable(status.disk)}

    return await daemon.answer(tiers)


@router.get("/engines", **answers(None, engines=tuple[EngineStatus, ...]))
async def list_engines(daemon: Daemon) -> Response:
    """Return the engines that are attached."""
    return await daemon.answer(lambda client: {"engines": [to_jsonable(each) for each in client.status().sessions]})


@router.get("/namespaces", **answers(None, namespaces=tuple[Namespace, ...]))
async def list_namespaces(daemon: Daemon) -> Response:
    """Return every namespace with its fingerprint, by id."""
    return await daemon.answer(lambda client: {"namespaces": [to_jsonable(each) for each in client.namespaces()]})


@router.post("/namespaces/{namespace_id}/quarantine", **answers(Namespace), **described(QuarantineBody))
async def quarantine(daemon: Daemon, namespace_id: str, request: Request) -> Response:
    """Stop a namespace whose KV is not trusted: it serves and stores nothing. Nothing is deleted."""
    body = await body_of(daemon, request, QuarantineBody)
    return await daemon.answer(lambda client: client.quarantine(namespace_id, body().reason))


@router.post("/namespaces/{namespace_id}/release", **answers(Namespace))
async def release(daemon: Daemon, namespace_id: str) -> Response:
    """Let a namespace serve and store again."""
    return await daemon.answer(lambda client: client.release(namespace_id))


@router.get("/advice", **answers(Advice))
async def get_advice(daemon: Daemon, max_bytes: Annotated[int, Query(ge=0, le=2**60)] = 0) -> Response:
    """Return what is worth a pin by live traffic, on at most `max_bytes` of disk; 0: those of automatic pins."""
    return await daemon.answer(lambda client: client.advise(max_bytes=max_bytes))


@router.get("/readiness", **answers(Readiness))
async def get_readiness(
    daemon: Daemon,
    name: Annotated[list[str] | None, Query()] = None,
    selector: str = "",
    tier: Literal["device", "host", "disk"] = "disk",
) -> Response:
    """Return whether pinned prompts can be restored now; `name` may come several times."""
    return await daemon.answer(lambda client: client.check_ready(*(name or ()), selector=selector, tier=tier))


@router.get("/remote", **answers(RemoteStatus))
async def get_remote(daemon: Daemon, with_hosts: bool = False) -> Response:
    """Return how the daemon stands with the store that hosts share."""
    return await daemon.answer(lambda client: client.remote(with_hosts=with_hosts))


@router.get("/savings", **answers(Savings))
async def get_savings(daemon: Daemon) -> Response:
    """Return what requests got since the daemon's start, and what prompts saved since they were pinned."""
    return await daemon.answer(lambda client: client.savings())


@router.post("/fsck", **answers(FsckReport), **described(FsckBody, is_required=False))
async def fsck(daemon: Daemon, request: Request) -> Response:
    """Compare ledger, packs and arenas, which takes as long as the disk needs."""
    body = await body_of(daemon, request, FsckBody)

    def check(client: Client) -> FsckReport:
        how = body()
        return client.fsck(repair=how.repair, deep=how.deep)

    return await daemon.answer(check)


@router.post("/evict-all", **answers(Evicted), **described(EvictAllBody, is_required=False))
async def evict_all(daemon: Daemon, request: Request) -> Response:
    """Drop every chunk that no pinned prompt has; with `force` those of pinned prompts too, which stay pinned."""
    body = await body_of(daemon, request, EvictAllBody)

    def evict(client: Client) -> Evicted:
        how = body()
        return client.evict_all(tier=how.tier, force=how.force, namespace_id=how.namespace_id)

    return await daemon.answer(evict)
