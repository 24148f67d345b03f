"""`kvtier`: the global options, and the commands in the order in which --help lists them."""

import atexit
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

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
from kvtier.cli.commands.operations.token_grants import token
from kvtier.cli.commands.operations.verify_prompts import verify
from kvtier.cli.commands.pin import pin
from kvtier.cli.commands.prompts import evict, list_prompts, rename, set_, show, unpin
from kvtier.cli.commands.trace_files import trace
from kvtier.cli.commands.warm import warm
from kvtier.cli.context import ErrorReportingGroup, GlobalOptions
from kvtier.cli.options import checked_given
from kvtier.client.address import DAEMON_UID_VARIABLE, MAX_UID, SOCKET_VARIABLE, default_socket_path
from kvtier.client.over_tcp.server_access import (
    CA_VARIABLE,
    CERT_VARIABLE,
    KEY_VARIABLE,
    SERVER_VARIABLE,
    TOKEN_FILE_VARIABLE,
)
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


def _file(help_text: str, variable: str) -> Any:
    # The library reads it: its error names the option and the remedy.
    return typer.Option(metavar="FILE", envvar=variable, help=help_text, show_default=False, readable=False)


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
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar=SERVER_VARIABLE,
            help="A daemon on another host, instead of the socket (its server.listen)",
            show_default=False,
            callback=checked_given,
        ),
    ] = None,
    token_file: Annotated[Path | None, _file("Token for --server (or in KVTIER_TOKEN)", TOKEN_FILE_VARIABLE)] = None,
    ca_file: Annotated[Path | None, _file("PEM of the authority that signs for --server", CA_VARIABLE)] = None,
    client_cert_file: Annotated[Path | None, _file("PEM of your certificate for --server", CERT_VARIABLE)] = None,
    client_key_file: Annotated[Path | None, _file("PEM of its key", KEY_VARIABLE)] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    credentials = {
        "token_file": token_file,
        "ca_file": ca_file,
        "client_cert_file": client_cert_file,
        "client_key_file": client_key_file,
    }
    is_named = _is_named(context, "socket")
    if is_named and _is_named(context, "server"):
        raise typer.BadParameter("a daemon is reached at its socket or over TCP; give one", param_hint="--server")
    context.obj = GlobalOptions(
        socket=socket or default_socket_path(),
        daemon_uid=daemon_uid,
        is_named=is_named,
        server=None if is_named else server or None,
        # Those of the environment the library reads: without --server they stand for nothing.
        credentials={name: value for name, value in credentials.items() if _is_named(context, name)},
    )


def _is_named(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


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
    "token": token,
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
