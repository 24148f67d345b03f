"""What all commands share: the socket of the daemon, the exit codes, and the way from errors to the shell."""

import errno
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from kvtier.cli.cli_client import CliClient
from kvtier.cli.output.streams import Output, discard
from kvtier.client.over_tcp.server_access import SERVER_VARIABLE
from kvtier.errors import DaemonUnreachableError, InvalidArgumentError, KvtierError
from kvtier.process import ExitCode
from kvtier.usage_errors import PrintableGroup

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class GlobalOptions:
    """The daemon's socket, and another uid that it may run as, besides ours and root; or its address over TCP.

    Attributes:
        server: `HOST:PORT`; None: the socket is used.
        credentials: For `server`, as far as the command line names them: arguments of the library's client.
        is_named: The command line names the socket, so the settings of this environment may be of another daemon.
    """

    socket: Path
    daemon_uid: int | None = None
    is_named: bool = False
    server: str | None = None
    credentials: Mapping[str, Any] = field(default_factory=dict)


def settings_of(context: typer.Context) -> GlobalOptions:
    """Return the global options of a command's context."""
    options: GlobalOptions = context.obj
    return options


def connect(context: typer.Context, url: str | None = None, api_key: str | None = None) -> CliClient:
    """Return a client of the daemon that the global options name, and of this vLLM; the caller closes it."""
    options = settings_of(context)
    if options.server is not None:
        return CliClient(url=url, api_key=api_key, server=options.server, **options.credentials)
    # Credentials are for a daemon over TCP: the client says so.
    return CliClient(options.socket, daemon_uid=options.daemon_uid, url=url, api_key=api_key, **options.credentials)


def require_socket(context: typer.Context, what: str) -> None:
    """Raise a usage error when a command that looks at this machine is to ask a daemon over TCP."""
    if settings_of(context).server is not None:
        problem = f"{what} looks at the daemon of this machine; run it there, without --server ({SERVER_VARIABLE})"
        raise typer.BadParameter(problem, param_hint="--server")


@contextmanager
def interruptible(output: Output, consequence: str) -> Iterator[None]:
    """At Ctrl-C say what was done so far, and end with the exit code for it."""
    try:
        yield
    except KeyboardInterrupt:
        output.warn(f"interrupted; {consequence}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _exit_code(error: KvtierError) -> int:
    if isinstance(error, DaemonUnreachableError):
        return ExitCode.UNREACHABLE
    return ExitCode.USAGE if isinstance(error, InvalidArgumentError) else ExitCode.FAILED


class ErrorReportingGroup(PrintableGroup):
    """Turns kvtier's errors into one line on stderr and an exit code, for every command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvtierError as exc:
            Output().fail(str(exc))
            raise typer.Exit(_exit_code(exc)) from exc
        except BrokenPipeError as exc:
            # `kvtier watch | head` is no error; Python must not write at exit either.
            discard(sys.stdout)
            raise typer.Exit(0) from exc
        except OSError as exc:
            if exc.errno not in _FULL or exc.filename is not None:
                raise
            discard(sys.stdout)
            Output().fail(
                f"the answer cannot be written to stdout: {exc.strerror}; free some space, or write to another file"
            )
            raise typer.Exit(ExitCode.FAILED) from exc
