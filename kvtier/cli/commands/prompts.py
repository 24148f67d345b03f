"""`kvtier list`, `show`, `set`, `rename`, `unpin` and `evict`: the prompts of the daemon."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import (
    OWNER_HELP,
    PRIORITY_HELP,
    PUBLIC_HELP,
    SLIDING_HELP,
    AsJson,
    PromptName,
    PromptNames,
    Selectors,
    checked_text,
    complete_namespace,
    parse_labels,
)
from kvtier.cli.output.durations import format_expiry
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import format_labels, prompt_details, prompts_list
from kvtier.config.units import format_size
from kvtier.core.ttl import parse_duration
from kvtier.errors import KvtierError, PromptNotFoundError
from kvtier.library.client import Client
from kvtier.library.prompt_calls import TierName
from kvtier.library.values.public_values import Evicted, Prompt

T = TypeVar("T")
_NO_PROMPTS = "no prompts yet; pin one with: kvtier pin NAME --system FILE"


def list_prompts(
    context: typer.Context,
    selector: Selectors = None,
    owner: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Prompts of this owner", show_default=False, callback=checked_text),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the prompts.

    CHUNKS: on disk, of all; HOST: chunks in host memory; DISK: bytes on disk, in KiB (K), MiB (M) or GiB (G). A * marks
    a prompt some of whose chunks other pinned prompts have too: they are stored once, and count in each of the rows.
    """
    output = Output(json=as_json)
    with connect(context) as client:
        prompts = client.list(selector=",".join(selector or ()), owner=owner)
    are_all = not selector and owner is None
    parts = prompts_list(prompts, output.console.width, are_all=are_all)
    none = _NO_PROMPTS if are_all else "no such prompt"
    output.answer([to_jsonable(status) for status in prompts], *(parts if prompts else [none]))


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
    sliding: Annotated[
        bool | None, typer.Option("--sliding/--no-sliding", help=SLIDING_HELP, show_default=False)
    ] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="NAME", help=OWNER_HELP, show_default=False, callback=checked_text)
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            metavar="KEY=VALUE",
            help="Add or change a label; KEY- removes it; repeatable",
            show_default=False,
            callback=checked_text,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change how a prompt is pinned. Needs no vLLM; what is not given stays as it is."""
    if (ttl, priority, public, sliding, owner) == (None,) * 5 and not label:
        raise typer.BadParameter(
            "say what to change: --ttl, --priority, --public, --sliding, --owner or --label", param_hint="NAME"
        )
    ttl_s = None if ttl is None else parse_duration("--ttl", ttl)
    labels = parse_labels(label or (), may_remove=True)
    with connect(context) as client:
        status = client.set(
            name, ttl_s=ttl_s, priority=priority, public=public, sliding=sliding, owner=owner, labels=labels
        )
    how = [f"ends: {format_expiry(status.expires_unix_s)}", f"priority: {status.priority}"]
    how += ["each use begins the time again"] if status.sliding else []
    how += ["public"] if status.public else []
    how += [f"owner: {status.owner}"] if status.owner else []
    how += [f"labels: {format_labels(status.labels)}"] if status.labels else []
    Output(json=as_json).answer(to_jsonable(status), f"set: {name} ({', '.join(how)})")


def rename(
    context: typer.Context,
    name: PromptName,
    new_name: Annotated[
        str, typer.Argument(metavar="NEW_NAME", help="Its new name", show_default=False, callback=checked_text)
    ],
    as_json: AsJson = False,
) -> None:
    """Give a prompt another name. Its versions go with it; chunks and engines are not touched."""
    with connect(context) as client:
        status = client.rename(name, new_name)
    Output(json=as_json).answer(status, f"renamed: {name} is {status.name} now")


def unpin(
    context: typer.Context,
    names: PromptNames = None,
    selector: Selectors = None,
    every: Annotated[bool, typer.Option("--all", help="All pins of operators")] = False,
    as_json: AsJson = False,
) -> None:
    """End pins. The chunks stay as cache until evicted.

    Labels that no pinned prompt has are no failure: nothing is unpinned, and the exit code is 0.
    """
    output = Output(json=as_json)
    with connect(context) as client:
        chosen = _chosen(client, names, selector, every=every, is_wanted=lambda prompt: prompt.pinned)
        done = _each(output, chosen, client.unpin, lambda prompt: f"unpinned: {prompt.name}")
    hint = "their chunks stay until their space is needed; drop them now with: kvtier evict NAME"
    if len(done) == 1:
        hint = f"its chunks stay until their space is needed; drop them now with: kvtier evict {done[0].name}"
    if names and len(names) == 1:
        output.answer(done[0], hint)
    else:
        which = f"no pinned prompt has the labels {','.join(selector)}" if selector else "no prompt is pinned"
        output.answer([to_jsonable(each) for each in done], hint if done else f"nothing was unpinned: {which}")


def _chosen(
    client: Client,
    names: list[str] | None,
    selectors: list[str] | None,
    *,
    every: bool,
    is_wanted: Callable[[Prompt], bool],
) -> list[str]:
    """Return the names of the prompts that a command is for; for all or by labels only those of operators."""
    ways = [bool(names), bool(selectors), every]
    if sum(ways) != 1:
        raise typer.BadParameter("give names of prompts, or -l LABELS, or --all", param_hint="NAME")
    if names:
        return list(dict.fromkeys(names))
    listed = client.list(selector=",".join(selectors or ()))
    return [prompt.name for prompt in listed if prompt.origin == "named" and is_wanted(prompt)]


def _each(output: Output, names: Iterable[str], call: Callable[[str], T], line: Callable[[T], str]) -> list[T]:
    """Do something for each; an error ends it, after a line for each that is done."""
    done = []
    for name in names:
        done.append(call(name))
        output.say(line(done[-1]))
    return done


class _Tier(StrEnum):
    HOST = "host"
    DISK = "disk"


_TIERS: dict[_Tier | None, TierName | None] = {None: None, _Tier.HOST: "host", _Tier.DISK: "disk"}


def evict(
    context: typer.Context,
    names: PromptNames = None,
    selector: Selectors = None,
    every: Annotated[bool, typer.Option("--all", help="All chunks that no pinned prompt has")] = False,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="All such chunks of this namespace; its id, or the beginning of it, as `kvtier status` shows it",
            show_default=False,
            autocompletion=complete_namespace,
            callback=checked_text,
        ),
    ] = None,
    tier: Annotated[_Tier | None, typer.Option(help="From this tier only [default: both]", show_default=False)] = None,
    force: Annotated[bool, typer.Option("--force", help="Pinned chunks too; the pins themselves stay")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop prompts' chunks, or all, from host memory and disk.

    A prompt that is not pinned is forgotten together with its chunks, unless --tier or --namespace is given. With -l,
    pinned prompts are left out unless --force is given. Of several prompts, --json says in `forgotten_names` which.
    """
    output = Output(json=as_json)
    if namespace is not None and (every or names or selector):
        raise typer.BadParameter("give it alone, without names, -l or --all", param_hint="--namespace")
    with connect(context) as client:
        if namespace is not None or (every and not names and not selector):
            chosen = list[str]()
            evicted = [client.evict_all(force=force, tier=_TIERS[tier], namespace_id=namespace)]
        else:
            chosen = _chosen(client, names, selector, every=every, is_wanted=lambda prompt: force or not prompt.pinned)
            evicted = []
            for name in chosen:
                try:
                    evicted.append(client.evict(name, force=force, tier=_TIERS[tier]))
                except KvtierError:
                    if done := chosen[: len(evicted)]:
                        output.warn(f"evicted before that: {', '.join(done)}")
                    raise
        forgotten = [name for name in chosen if _is_unknown(client, name)]
    total = _sum(evicted)
    lines = [
        f"evicted: {total.num_chunks} chunks, {format_size(total.host_bytes)} of host memory, "
        f"{format_size(total.disk_bytes)} of disk"
    ]
    if total.num_shared_chunks:
        whose = "other pinned prompts share" if chosen else "pinned prompts have"
        lines.append(f"kept: {total.num_shared_chunks} chunks that {whose}")
    lines += [f"forgotten: {name}, which was not pinned" for name in forgotten]
    value: dict[str, Any] = to_jsonable(total) | {"forgotten": bool(forgotten)}
    value |= {"names": chosen, "forgotten_names": forgotten} if len(chosen) > 1 else {}
    output.answer(value, *lines)


def _sum(evicted: Sequence[Evicted]) -> Evicted:
    return Evicted(
        num_chunks=sum(each.num_chunks for each in evicted),
        host_bytes=sum(each.host_bytes for each in evicted),
        disk_bytes=sum(each.disk_bytes for each in evicted),
        num_shared_chunks=sum(each.num_shared_chunks for each in evicted),
    )


def _is_unknown(client: Client, name: str) -> bool:
    try:
        client.get(name)
    except PromptNotFoundError:
        return True
    return False
