"""`kvtier list`, `show`, `unpin` and `evict`: the prompts of the daemon."""

from enum import StrEnum
from typing import Annotated

import typer

from kvtier._pb.cache_pb2 import TIER_ANY, TIER_DISK, TIER_HOST
from kvtier.cli.completion import complete_prompt_name
from kvtier.cli.context import settings_of
from kvtier.cli.options import checked_text
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import prompt_details, prompts_list
from kvtier.client.admin import AdminClient, RemoteError
from kvtier.config.units import format_size

_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name of the prompt",
        show_default=False,
        autocompletion=complete_prompt_name,
        callback=checked_text,
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON")]


def list_prompts(context: typer.Context, as_json: _Json = False) -> None:
    """List the prompts."""
    output = Output(json=as_json)
    with settings_of(context).connect() as client:
        prompts = client.list()
    if as_json:
        output.answer([to_jsonable(status) for status in prompts])
    elif prompts:
        output.show(*prompts_list(prompts, output.console.width))
    else:
        output.say("no prompts yet; pin one with: kvtier pin NAME --system FILE")


def show(context: typer.Context, name: _Name, as_json: _Json = False) -> None:
    """Show one prompt: where its chunks are, and its source."""
    output = Output(json=as_json)
    with settings_of(context).connect() as client:
        status = client.get(name)
    if as_json:
        output.answer(to_jsonable(status, with_recipe=True))
    else:
        output.show(*prompt_details(status))


def unpin(context: typer.Context, name: _Name, as_json: _Json = False) -> None:
    """End a pin. The chunks stay as cache until evicted."""
    output = Output(json=as_json)
    with settings_of(context).connect() as client:
        status = client.unpin(name)
    if as_json:
        output.answer(to_jsonable(status))
        return
    output.say(f"unpinned: {name}")
    output.say(f"its chunks stay until their space is needed; drop them now with: kvtier evict {name}")


class _Tier(StrEnum):
    HOST = "host"
    DISK = "disk"


_TIERS = {None: TIER_ANY, _Tier.HOST: TIER_HOST, _Tier.DISK: TIER_DISK}


def evict(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Name of the prompt",
            show_default=False,
            autocompletion=complete_prompt_name,
            callback=checked_text,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All chunks that no pinned prompt has")] = False,
    tier: Annotated[_Tier | None, typer.Option(help="From this tier only [default: both]", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Pinned chunks too; the pins themselves stay")] = False,
    as_json: _Json = False,
) -> None:
    """Drop a prompt's chunks, or all, from host memory and disk.

    A prompt that is not pinned is forgotten together with its chunks, unless --tier is given.
    """
    if every == (name is not None):
        raise typer.BadParameter("give the name of a prompt, or --all", param_hint="NAME")
    with settings_of(context).connect() as client:
        if name is None:
            response = client.evict_all(force=force, tier=_TIERS[tier])
        else:
            response = client.evict(name, force=force, tier=_TIERS[tier])
        is_forgotten = name is not None and _is_unknown(client, name)
    output = Output(json=as_json)
    if as_json:
        output.answer(to_jsonable(response) | {"forgotten": is_forgotten})
        return
    output.say(
        f"evicted: {response.num_chunks} chunks, {format_size(response.host_bytes)} of host memory, "
        f"{format_size(response.disk_bytes)} of disk"
    )
    if response.num_shared_chunks:
        whose = "pinned prompts have" if every else "other pinned prompts share"
        output.say(f"kept: {response.num_shared_chunks} chunks that {whose}")
    if is_forgotten:
        output.say(f"forgotten: {name}, which was not pinned")


def _is_unknown(client: AdminClient, name: str) -> bool:
    try:
        client.get(name)
    except RemoteError as exc:
        return exc.code == "NOT_FOUND"
    return False
