"""`kvtier list`, `show`, `set`, `unpin` and `evict`: the prompts of the daemon."""

from enum import StrEnum
from typing import Annotated

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import NAME, PRIORITY_HELP, PUBLIC_HELP, AsJson, PromptName
from kvtier.cli.output.durations import format_expiry
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import prompt_details, prompts_list
from kvtier.config.units import format_size
from kvtier.core.ttl import parse_duration
from kvtier.errors import PromptNotFoundError
from kvtier.library.client import Client
from kvtier.library.prompt_calls import TierName


def list_prompts(context: typer.Context, as_json: AsJson = False) -> None:
    """List the prompts."""
    output = Output(json=as_json)
    with connect(context) as client:
        prompts = client.list()
    parts = prompts_list(prompts, output.console.width)
    output.answer(
        [to_jsonable(status) for status in prompts],
        *(parts if prompts else ["no prompts yet; pin one with: kvtier pin NAME --system FILE"]),
    )


def show(context: typer.Context, name: PromptName, as_json: AsJson = False) -> None:
    """Show one prompt: where its chunks are, and its source."""
    with connect(context) as client:
        status = client.get(name)
    Output(json=as_json).answer(to_jsonable(status, with_recipe=True), *prompt_details(status))


def set_(
    context: typer.Context,
    name: PromptName,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="End the pin after this time from now: 12h, 7d, never")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(metavar="N", min=-100, max=100, help=PRIORITY_HELP, show_default=False)
    ] = None,
    public: Annotated[bool | None, typer.Option("--public/--no-public", help=PUBLIC_HELP, show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Change how a prompt is pinned. Needs no vLLM; what is not given stays as it is."""
    if (ttl, priority, public) == (None, None, None):
        raise typer.BadParameter("say what to change: --ttl, --priority, --public or --no-public", param_hint="NAME")
    ttl_s = None if ttl is None else parse_duration("--ttl", ttl)
    with connect(context) as client:
        status = client.set(name, ttl_s=ttl_s, priority=priority, public=public)
    how = [f"ends: {format_expiry(status.expires_unix_s)}", f"priority: {status.priority}"]
    how += ["public"] if status.public else []
    Output(json=as_json).answer(to_jsonable(status), f"set: {name} ({', '.join(how)})")


def unpin(context: typer.Context, name: PromptName, as_json: AsJson = False) -> None:
    """End a pin. The chunks stay as cache until evicted."""
    with connect(context) as client:
        status = client.unpin(name)
    hint = f"its chunks stay until their space is needed; drop them now with: kvtier evict {name}"
    Output(json=as_json).answer(status, f"unpinned: {name}", hint)


class _Tier(StrEnum):
    HOST = "host"
    DISK = "disk"


_TIERS: dict[_Tier | None, TierName | None] = {None: None, _Tier.HOST: "host", _Tier.DISK: "disk"}


def evict(
    context: typer.Context,
    name: Annotated[str | None, NAME] = None,
    every: Annotated[bool, typer.Option("--all", help="All chunks that no pinned prompt has")] = False,
    tier: Annotated[_Tier | None, typer.Option(help="From this tier only [default: both]", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Pinned chunks too; the pins themselves stay")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop a prompt's chunks, or all, from host memory and disk.

    A prompt that is not pinned is forgotten together with its chunks, unless --tier is given.
    """
    if every == (name is not None):
        raise typer.BadParameter("give the name of a prompt, or --all", param_hint="NAME")
    with connect(context) as client:
        if name is None:
            response = client.evict_all(force=force, tier=_TIERS[tier])
        else:
            response = client.evict(name, force=force, tier=_TIERS[tier])
        is_forgotten = name is not None and _is_unknown(client, name)
    lines = [
        f"evicted: {response.num_chunks} chunks, {format_size(response.host_bytes)} of host memory, "
        f"{format_size(response.disk_bytes)} of disk"
    ]
    if response.num_shared_chunks:
        whose = "pinned prompts have" if every else "other pinned prompts share"
        lines.append(f"kept: {response.num_shared_chunks} chunks that {whose}")
    if is_forgotten:
        lines.append(f"forgotten: {name}, which was not pinned")
    Output(json=as_json).answer(to_jsonable(response) | {"forgotten": is_forgotten}, *lines)


def _is_unknown(client: Client, name: str) -> bool:
    try:
        client.get(name)
    except PromptNotFoundError:
        return True
    return False
