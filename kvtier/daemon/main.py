"""`kvtier-daemon`: the command line."""

import faulthandler
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, get_args

import typer

from kvtier.config.load import LoadedConfig, load_config
from kvtier.config.model import OFF, LogFormat, LogLevel, OwnerQuota
from kvtier.config.settings import KEYS
from kvtier.errors import ConfigError, ConfigErrors, KvtierError
from kvtier.obs.log import setup_logging
from kvtier.printable import printable
from kvtier.process import ExitCode, exit_on_sigterm, forbid_core_dumps, prepare_grpc, prepare_process
from kvtier.usage_errors import PrintableCommand
from kvtier.version import __version__

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _any(values: object) -> str:
    return f"<{'|'.join(get_args(values))}>"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier-daemon {__version__}")
        raise typer.Exit


@app.command(cls=PrintableCommand)
def daemon(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="KVTIER_CONFIG", help="TOML file [~/.config/kvtier/kvtier.toml, if any]"),
    ] = None,
    socket: Annotated[str | None, typer.Option(metavar="PATH", help="Unix socket to listen on")] = None,
    host_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory for KV caches: 64GiB, 25%, auto")
    ] = None,
    disk_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Disk space for KV caches: 500GiB, 50%, auto")
    ] = None,
    disk_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of packs and ledger (disk.dir)")] = None,
    arena_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the arenas, on a tmpfs")] = None,
    http_listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address for metrics and the HTTP API, or off")
    ] = None,
    log_level: Annotated[str | None, typer.Option(metavar=_any(LogLevel), help="Least severe level")] = None,
    log_format: Annotated[str | None, typer.Option(metavar=_any(LogFormat), help="Log lines as text or JSON")] = None,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Print the merged settings, check this machine for them, and exit")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Keep pinned prompts' KV caches for vLLM, in host memory and on disk.

    Runs without any option. Every setting can stand in a TOML file or in the environment
    (KVTIER_HOST_BYTES=64GiB); flags win. Stop it with SIGTERM.

    Exit codes: 0 stopped (--check-config: would start), 1 failed, 2 wrong usage or setting.
    """
    flags = {
        "server.socket": socket,
        "host.bytes": host_bytes,
        "host.arena_dir": arena_dir,
        "disk.dir": disk_dir,
        "disk.bytes": disk_bytes,
        "http.listen": http_listen,
        "log.level": log_level,
        "log.format": log_format,
    }
    try:
        loaded = load_config(path=config, flags=flags)
        if check_config:
            _check(loaded)
            return
        if loaded.config.disk.key_file is not None:
            forbid_core_dumps()
        setup_logging(loaded.config.log.level, loaded.config.log.format)
        # Here, so that --help and --check-config need neither asyncio nor gRPC.
        from kvtier.daemon.lifecycle import run

        # A crash prints its stack: SIGBUS, when another process truncates an arena while a row of it is copied.
        with suppress(OSError, RuntimeError):  # no stderr
            faulthandler.enable()
        run(loaded.config)
    except KvtierError as exc:
        for error in exc.errors if isinstance(exc, ConfigErrors) else [exc]:
            typer.echo(printable(f"kvtier-daemon: {error}"), err=True)
        raise typer.Exit(ExitCode.USAGE if isinstance(exc, ConfigError | ConfigErrors) else ExitCode.FAILED) from exc


def _check(loaded: LoadedConfig) -> None:
    """Print the settings as TOML to stdout, and what this machine lacks for them to stderr (then exit with 1)."""
    from kvtier.doctor import Status, check_environment

    typer.echo(render_config(loaded))
    findings = check_environment(loaded.config)
    for finding in findings:
        if finding.status in (Status.WARN, Status.FAIL):
            line = f"{finding.status.value} {finding.id}: {finding.found}; {finding.remedy}"
            typer.echo(printable(line), err=True)
    if any(finding.status is Status.FAIL for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def render_config(loaded: LoadedConfig) -> str:
    """Return the merged settings as TOML, each with its source."""
    lines: list[str] = []
    table = ""
    for key in KEYS:
        if not key.startswith(f"{table}."):
            table = key.partition(".")[0]
            lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
        name = key.partition(".")[2]
        section = getattr(loaded.config, table)
        value = getattr(section, f"{table}_{name}" if hasattr(section, f"{table}_{name}") else name)
        lines.append(f"{name} = {_toml(value)}  # {printable(loaded.sources[key])}")
        if key == "owners.default":
            lines += [f"{_toml(owner)} = {_toml(quota)}" for owner, quota in loaded.config.owners.named.items()]
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, OwnerQuota):
        limits = (f"{name} = {limit}" for name, limit in vars(value).items() if limit is not None)
        return f"{{ {', '.join(limits)} }}" if not value.is_unlimited else "{}"
    if not isinstance(value, str | Path | None):
        return str(value)
    quoted = (OFF if value is None else str(value)).replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in quoted)
    return f'"{escaped}"'


def main() -> None:
    """Entry point of the console script."""
    prepare_process("kvtier-daemon")
    exit_on_sigterm()
    prepare_grpc()
    sys.exit(app())


if __name__ == "__main__":
    main()
