"""Requests of users: what they got, and why not more."""

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from kvtier.errors import InvalidArgumentError
from kvtier.library.client import Client
from kvtier.library.values.outcome_values import Explained, RecentRequest, RequestOutcome
from kvtier.library.values.plain_json import to_jsonable
from kvtier.web.api.daemon_calls import Daemon
from kvtier.web.api.json_schemas import answers
from kvtier.web.api.prompt_routes import ESCAPED_SLASH
from kvtier.web.api.request_bodies import ExplainBody, body_of, described

router = APIRouter(tags=["requests"])


@router.get("/requests", **answers(None, requests=tuple[RecentRequest, ...]))
async def list_requests(
    daemon: Daemon,
    limit: Annotated[int, Query(ge=1, le=4096)] = 100,
    outcome: Annotated[list[str] | None, Query(description="Only with this outcome; may come several times.")] = None,
    misses_only: Annotated[bool, Query(description="Only those that kvtier has, or should have, part of.")] = False,
) -> Response:
    """Return requests that ended lately, the last one first; no text, no tokens."""
    outcomes = list(map(_outcome_of, outcome or ()))

    def recent(client: Client) -> dict[str, Any]:
        found = client.recent_requests(limit=limit, outcomes=outcomes, misses_only=misses_only)
        return {"requests": [to_jsonable(each) for each in found]}

    return await daemon.answer(recent)


@router.get("/requests/{request_id}", **answers(Explained))
async def explain_request(daemon: Daemon, request_id: str) -> Response:
    """Return why a recent request was restored what it was, by the id of vLLM's answer."""
    return await daemon.answer(lambda client: client.explain_request(request_id.replace(ESCAPED_SLASH, "/")))


@router.post("/explain", **answers(Explained), **described(ExplainBody))
async def explain(daemon: Daemon, request: Request) -> Response:
    """Return what a request would be restored now, and why not more. Stores nothing, and computes nothing."""
    body = await body_of(daemon, request, ExplainBody)

    def explained(client: Client) -> Explained:
        asked = body()
        return client.explain(
            asked.request,
            tokens=asked.tokens,
            model=asked.model,
            lora_name=asked.lora_name,
            cache_salt=asked.cache_salt,
        )

    return await daemon.answer(explained)


def _outcome_of(text: str) -> RequestOutcome:
    known = {each.name: each for each in RequestOutcome if each is not RequestOutcome.UNRECOGNIZED}
    if text.upper() not in known:
        raise InvalidArgumentError("outcome", text, f"use one of {', '.join(known)}")
    return known[text.upper()]
