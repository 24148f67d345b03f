"""`kvtier`: the commands."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvtier._pb.cache_pb2 import TIER_ANY, TIER_DISK, TIER_HOST
from kvtier.cli.commands.doctor import doctor
from kvtier.cli.commands.export_import import export, import_
from kvtier.cli.commands.fsck import fsck
from kvtier.cli.commands.pin import pin
from kvtier.cli.commands.trace_files import trace
from kvtier.cli.commands.warm import warm
from kvtier.cli.completion import complete_prompt_name
from kvtier.cli.context import ErrorReportingGroup, Settings, settings_of
from kvtier.cli.options import checked_text
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import daemon_details, prompt_details, prompts_list
from kvtier.client.address import DAEMON_UID_VARIABLE, MAX_UID, SOCKET_VARIABLE, default_socket_path
from kvtier.client.admin import AdminClient, RemoteError
from kvtier.config.units import format_size
from kvtier.process import prepare_process
from kvtier.version import __version__

app = typer.Typer(
    cls=ErrorReportingGroup,
    no_args_is_help=True,
    # A traceback with local variables would print prompts and keys.
    pretty_exceptions_enable=False,
    help="Pin system prompts in a self-hosted vLLM, so that their KV cache outlives GPU pressure and restarts.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon answers.",
)

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


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _globals(
    context: typer.Context,
    socket: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            envvar=SOCKET_VARIABLE,
            help="The daemon's unix socket",
            show_default=False,
            readable=False,  # a socket that one may not connect to is a matter for those who try, with a better reason
        ),
    ] = None,
    daemon_uid: Annotated[
        int | None,
        typer.Option(
            metavar="UID",
            envvar=DAEMON_UID_VARIABLE,
            min=0,
            max=MAX_UID,
            help="As whom the daemon may run, besides you and root",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    source = context.get_parameter_source("socket")
    is_named = source is not None and source.name == "COMMANDLINE"
    context.obj = Settings(socket=socket or default_socket_path(), daemon_uid=daemon_uid, is_named=is_named)


# In the order in which --help lists them: what a newcomer needs first.
app.command()(pin)


@app.command("list")
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


@app.command()
def show(context: typer.Context, name: _Name, as_json: _Json = False) -> None:
    """Show one prompt: where its chunks are, and its source."""
    output = Output(json=as_json)
    with settings_of(context).connect() as client:
        status = client.get(name)
    if as_json:
        output.answer(to_jsonable(status, with_recipe=True))
    else:
        output.show(*prompt_details(status))


@app.command()
def unpin(context: typer.Context, name: _Name, as_json: _Json = False) -> None:
    """End a pin. The chunks stay as cache until evicted."""
    output = Output(json=as_json)
    with settings_of(context).connect() as client:
        status = client.unpin(name)
    if as_json:
        output.answer(to_jsonable(status))
        return
    output.say(f"unpinned: {name}")
    output.say(f"its chunks stay until there is pressure; drop them now with: kvtier evict {name}")


class _Tier(StrEnum):
    HOST = "host"
    DISK = "disk"


_TIERS = {None: TIER_ANY, _Tier.HOST: TIER_HOST, _Tier.DISK: TIER_DISK}


@app.command()
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
    every: Annotated[bool, typer.Option("--all", help="Every chunk that no pinned prompt has")] = False,
    tier: Annotated[
        _Tier | None, typer.Option(help="Out of this tier only [default: both]", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Pinned ones too; the pins themselves stay")] = False,
    as_json: _Json = False,
) -> None:
    """Drop a prompt's chunks, or all, from host memory and disk.

    A prompt that is not pinned is forgotten with its chunks, unless --tier is given.
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


@app.command()
def status(
    context: typer.Context,
    as_json: _Json = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing: for probes, which ask for the exit code")
    ] = False,
) -> None:
    """Show the daemon: tiers, attached engines, namespaces, counters."""
    output = Output(json=as_json)
    with settings_of(context).connect() as client:
        daemon = client.status()
        if as_json and not quiet:
            del daemon.namespaces[:]
            daemon.namespaces.extend(client.namespaces())  # the same, with their fingerprints
    if quiet:
        return
    if as_json:
        output.answer(to_jsonable(daemon))
    else:
        output.show(*daemon_details(daemon))


app.command()(warm)
app.command()(doctor)
app.command()(export)
app.command("import")(import_)
app.command()(fsck)
app.command()(trace)


def main() -> None:
    """Entry point of the console script."""
    prepare_process("error")
    sys.exit(app())
