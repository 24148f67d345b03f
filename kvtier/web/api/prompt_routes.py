"""Prompts, looked at."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import Response

from kvtier.errors import InvalidArgumentError
from kvtier.library.client import Client
from kvtier.library.values.plain_json import to_jsonable
from kvtier.library.values.public_values import ChunkMap, Prompt, PromptPage, PromptState
from kvtier.web.api.daemon_calls import Daemon
from kvtier.web.api.json_schemas import answers

router = APIRouter(prefix="/prompts", tags=["prompts"])

ESCAPED_SLASH = "%2F"
"""As `request_guard` leaves it in a path, so that a name with slashes is one part of it."""


async def _name_in(name: Annotated[str, Path(description="Of a prompt; a slash in it is written %2F.")]) -> str:
    return name.replace(ESCAPED_SLASH, "/")


PromptName = Annotated[str, Depends(_name_in)]


@router.get("", **answers(PromptPage))
async def list_prompts(
    daemon: Daemon,
    selector: Annotated[str, Query(description="By labels: team=support,tier!=1,canary,!draft")] = "",
    owner: Annotated[str | None, Query(description="Only those of this owner; empty: of none.")] = None,
    state: Annotated[list[str] | None, Query(description="Only in this state; may come several times.")] = None,
    page_size: Annotated[int, Query(ge=1, le=1000)] = 100,
    page_token: Annotated[str, Query(description="next_page_token of the page before.")] = "",
) -> Response:
    """Return prompts by name, a page at a time: ask again with `next_page_token` until it is empty."""
    states = frozenset(map(_state_of, state or ()))
    return await daemon.answer(
        lambda client: client.list_page(
            selector=selector, owner=owner, states=states, page_size=page_size, page_token=page_token
        )
    )


@router.get("/{name}", **answers(Prompt))
async def get_prompt(daemon: Daemon, name: PromptName) -> Response:
    """Return a prompt with its source, as `kvtier show --json`."""
    return await daemon.answer(lambda client: to_jsonable(client.get(name), with_recipe=True))


@router.get("/{name}/versions", **answers(None, versions=tuple[Prompt, ...]))
async def list_versions(daemon: Daemon, name: PromptName) -> Response:
    """Return the versions of a prompt, the oldest first; the one without a number serves."""
    return await daemon.answer(lambda client: {"versions": [to_jsonable(each) for each in client.history(name)]})


@router.get("/{name}/tokens", **answers(None, tokens=tuple[int, ...]))
async def get_tokens(daemon: Daemon, name: PromptName) -> Response:
    """Return a prompt's token ids."""

    def tokens(client: Client) -> dict[str, Any]:
        return {"tokens": list(client.tokens(name))}

    return await daemon.answer(tokens)


@router.get("/{name}/chunks", **answers(ChunkMap))
async def get_chunks(daemon: Daemon, name: PromptName, namespace_id: str = "") -> Response:
    """Return where each chunk lies, in two hexadecimal digits: 00 nowhere, 01 disk, 02 host memory, 03 both."""
    return await daemon.answer(lambda client: client.chunks(name, namespace_id=namespace_id))


def _state_of(text: str) -> PromptState:
    known = {each.name: each for each in PromptState if each is not PromptState.UNKNOWN}
    if text.upper() not in known:
        raise InvalidArgumentError("state", text, f"use one of {', '.join(known)}")
    return known[text.upper()]
