"""`kvtier`: the global options, and the commands in the order in which --help lists them."""

import atexit
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.commands.advise import advise
from kvtier.cli.commands.apply import apply, export_config
from kvtier.cli.commands.daemon_status import status
from kvtier.cli.commands.doctor import doctor
from kvtier.cli.commands.export_import import export, import_
from kvtier.cli.commands.fsck import fsck
from kvtier.cli.commands.history_rollback import history, rollback
from kvtier.cli.commands.operations.event_watch import watch
from kvtier.cli.commands.operations.explain_requests import explain
from kvtier.cli.commands.operations.live_view import top
from kvtier.cli.commands.operations.namespace_quarantine import quarantine
from kvtier.cli.commands.operations.ready_check import ready
from kvtier.cli.commands.operations.remote_store import remote
from kvtier.cli.commands.operations.verify_prompts import verify
from kvtier.cli.commands.pin import pin
from kvtier.cli.commands.prompts import evict, list_prompts, rename, set_, show, unpin
from kvtier.cli.commands.trace_files import trace
from kvtier.cli.commands.warm import warm
from kvtier.cli.context import ErrorReportingGroup, GlobalOptions
from kvtier.client.address import DAEMON_UID_VARIABLE, MAX_UID, SOCKET_VARIABLE, default_socket_path
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
            readable=False,  # connecting gives a better reason than Typer's own check of the path
        ),
    ] = None,
    daemon_uid: Annotated[
        int | None,
        typer.Option(
            metavar="UID",
            envvar=DAEMON_UID_VARIABLE,
            min=0,
            max=MAX_UID,
            help="Uid that the daemon may run as, besides yours and root",
            show_default=False,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    source = context.get_parameter_source("socket")
    is_named = source is not None and source.name == "COMMANDLINE"
    context.obj = GlobalOptions(socket=socket or default_socket_path(), daemon_uid=daemon_uid, is_named=is_named)


# In the order in which --help lists them: what a newcomer needs first.
_COMMANDS: dict[str, Callable[..., None]] = {
    "pin": pin,
    "list": list_prompts,
    "show": show,
    "set": set_,
    "rename": rename,
    "apply": apply,
    "export-config": export_config,
    "history": history,
    "rollback": rollback,
    "unpin": unpin,
    "evict": evict,
    "explain": explain,
    "advise": advise,
    "status": status,
    "top": top,
    "watch": watch,
    "ready": ready,
    "warm": warm,
    "verify": verify,
    "quarantine": quarantine,
    "remote": remote,
    "doctor": doctor,
    "export": export,
    "import": import_,
    "fsck": fsck,
    "trace": trace,
}
for name, command in _COMMANDS.items():
    # `apply` names the option that a path was meant for.
    app.command(name, context_settings={"allow_extra_args": command is apply})(command)


def main() -> None:
    """Entry point of the console script."""
    prepare_process("error")
    # What a command reads lives until it ends. Searched for garbage, 10,000 prompts took twice as long to read.
    gc.set_threshold(200_000, 50, 50)
    atexit.register(gc.freeze)
    sys.exit(app())
