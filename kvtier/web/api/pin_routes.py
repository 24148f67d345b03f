"""Prompts, pinned and changed; and sets of them, applied."""

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from kvtier.errors import InvalidArgumentError
from kvtier.library.values.proof_values import VerifyResult
from kvtier.library.values.public_values import Evicted, Prompt
from kvtier.web.api.daemon_calls import Daemon, json_bytes, json_response
from kvtier.web.api.json_schemas import answers
from kvtier.web.api.prompt_routes import PromptName
from kvtier.web.api.request_bodies import (
    AdoptBody,
    Body,
    EvictBody,
    PinBody,
    RenameBody,
    RollbackBody,
    SetBody,
    VerifyBody,
    body_of,
    described,
)
from kvtier.web.problems import Problem

router = APIRouter(tags=["changes"])

_PROMPT = "/prompts/{name}"


@router.put(_PROMPT, **answers(Prompt), **described(PinBody))
async def pin(daemon: Daemon, name: PromptName, request: Request) -> Response:
    """Pin a prompt, as `kvtier pin`: vLLM renders and computes it; answered when it is durable, or the time is up.

    Look at `state` and `name` of the answer: a replacement has a version's name until it is durable.
    """
    body = await body_of(daemon, request, PinBody)
    return await daemon.answer(lambda client: client.pin(name, **_given(body())))


@router.patch(_PROMPT, **answers(Prompt), **described(SetBody))
async def set_prompt(daemon: Daemon, name: PromptName, request: Request) -> Response:
    """Change how a prompt is pinned; what is left out stays as it is."""
    body = await body_of(daemon, request, SetBody)
    return await daemon.answer(lambda client: client.set(name, **_given(body())))


@router.post(f"{_PROMPT}/unpin", **answers(Prompt))
async def unpin(daemon: Daemon, name: PromptName) -> Response:
    """End a pin. The chunks stay as cache until they are evicted."""
    return await daemon.answer(lambda client: client.unpin(name))


@router.post(f"{_PROMPT}/evict", **answers(Evicted), **described(EvictBody, is_required=False))
async def evict(daemon: Daemon, name: PromptName, request: Request) -> Response:
    """Drop a prompt's chunks, except those that other pinned prompts have; forget it if it is not pinned."""
    body = await body_of(daemon, request, EvictBody)
    return await daemon.answer(lambda client: client.evict(name, **_given(body())))


@router.post(f"{_PROMPT}/rename", **answers(Prompt), **described(RenameBody))
async def rename(daemon: Daemon, name: PromptName, request: Request) -> Response:
    """Give a prompt another name; its versions go with it."""
    body = await body_of(daemon, request, RenameBody)
    return await daemon.answer(lambda client: client.rename(name, body().new_name))


@router.post(f"{_PROMPT}/rollback", **answers(Prompt), **described(RollbackBody, is_required=False))
async def rollback(daemon: Daemon, name: PromptName, request: Request) -> Response:
    """Replace a prompt with a version that it has replaced."""
    body = await body_of(daemon, request, RollbackBody)
    return await daemon.answer(lambda client: client.rollback(name, body().version))


@router.post(f"{_PROMPT}/adopt", **answers(Prompt), **described(AdoptBody))
async def adopt(daemon: Daemon, name: PromptName, request: Request) -> Response:
    """Give an automatic pin this name; it stays from then on."""
    body = await body_of(daemon, request, AdoptBody)
    return await daemon.answer(lambda client: client.adopt(name, **_given(body())))


@router.post(f"{_PROMPT}/verify", **answers(VerifyResult), **described(VerifyBody, is_required=False))
async def verify(daemon: Daemon, name: PromptName, request: Request) -> Response:
    """Compare a prompt's bytes with their checksums, and its answers with vLLM's own."""
    body = await body_of(daemon, request, VerifyBody)
    return await daemon.answer(lambda client: client.verify(name, **_given(body())).to_dict())


@router.post(
    "/apply",
    **answers(
        None,
        changes=tuple[Any, ...],
        num_unchanged=int,
        unrendered=tuple[str, ...],
        incomplete=tuple[str, ...],
        errors=tuple[Any, ...],
        not_in_files=tuple[str, ...],
        refused=tuple[Any, ...],
    ),
    openapi_extra={"requestBody": {"required": True, "content": {"application/yaml": {}, "application/json": {}}}},
)
async def apply(
    daemon: Daemon,
    request: Request,
    dry_run: Annotated[bool, Query(description="Only say what differs.")] = False,
    prune: Annotated[bool, Query(description="End pins of the same sets that the body does not name.")] = False,
    take_over: Annotated[bool, Query(description="Move prompts of other sets to this one.")] = False,
    warm: Annotated[bool, Query(description="Have vLLM compute what is new, and wait for it.")] = True,
    timeout_s: Annotated[float, Query(ge=1, le=3600, description="For each prompt that is computed.")] = 600.0,
) -> Response:
    """Make prompts what the body says, all at once or not at all: the text of a file as in docs/apply.md.

    It may not name other files. All its mistakes are in `errors` of the problem.
    """
    raw = await daemon.receive_body(request)
    # Here, because its checks take a fifth of a second to load.
    from kvtier.library.declared import DeclaredErrors, applied_to_jsonable, mistakes_to_jsonable

    def applied() -> Response:
        how: dict[str, Any] = {"dry_run": dry_run, "prune": prune, "take_over": take_over, "warm": warm}
        try:
            done = daemon.client.apply(text=_text_of(raw), timeout_s=timeout_s, **how)
        except DeclaredErrors as exc:
            mistakes = {"errors": mistakes_to_jsonable(exc.errors)["errors"]}
            return Problem(
                status=HTTPStatus.BAD_REQUEST, title="DeclaredErrors", detail=str(exc), more=mistakes
            ).response()
        return json_response(json_bytes(applied_to_jsonable(done)))

    return await daemon.run(applied)


def _text_of(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as exc:
        raise InvalidArgumentError("body", f"{len(raw)} bytes", f"is not UTF-8 text (byte {exc.start})") from exc


def _given(body: Body) -> dict[str, Any]:
    """Return the fields that a client gave, as arguments."""
    return {name: getattr(body, name) for name in body.model_fields_set}
