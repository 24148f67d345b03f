"""`kvtier fsck`: asks the daemon; without one, runs the offline check of the daemon in a separate process."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.context import connect, interruptible, settings_of
from kvtier.cli.options import AsJson
from kvtier.cli.output.grid import Grid, Part, Styled, column
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.config.units import format_size
from kvtier.errors import (
    DaemonSilentError,
    DaemonUnreachableError,
    InvalidArgumentError,
    ServerUnreachableError,
)
from kvtier.library.values.public_values import FsckFinding, FsckReport
from kvtier.printable import printable
from kvtier.process import ExitCode

NOTE_PREFIX = "note-"
_OFFLINE_CHECK = "kvtier.daemon.offline_check"


def fsck(
    context: typer.Context,
    repair: Annotated[bool, typer.Option("--repair", help="Repair what can be repaired")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read and verify every stored byte")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Check the folder itself; no daemon may run")] = False,
    disk_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --offline: the disk folder (disk.dir)", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --offline: the daemon's TOML file", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare ledger, packs and arenas; with --repair make them agree.

    The running daemon checks itself and serves meanwhile.
    If none runs, or with --offline, the command checks the disk folder that the settings name.
    That folder may belong to another daemon than --socket or --server names: if that one does not answer, nothing is
    checked.
    No intact chunk is deleted.

    Exit codes: 0 nothing is wrong, or all was repaired, 1 something is wrong,
    3 no daemon answers and the folder cannot be checked either.
    """
    output = Output(json=as_json)
    if (disk_dir or config) and not offline:
        option, value = ("--disk-dir", disk_dir) if disk_dir else ("--config", config)
        raise InvalidArgumentError(option, str(value), "is for --offline only; a running daemon knows its own")
    with interruptible(output, "what was repaired so far stays repaired"):
        checked = _checked_offline(repair, deep, disk_dir, config) if offline else _checked(context, repair, deep)
    report, folder = checked
    options = ["--repair"]
    if offline:
        options += ["--offline", *(["--config", str(config)] if config else []), "--disk-dir", str(folder)]
    parts = _parts(report, folder, shlex.join(["kvtier", "fsck", *options]), repair=repair, deep=deep)
    output.answer(to_jsonable(report) | {"offline_folder": folder}, *parts)
    if _remaining(report):
        raise typer.Exit(ExitCode.FAILED)


_Checked = tuple[FsckReport, str | None]
"""A report, and the disk folder of an offline check."""


def _checked(context: typer.Context, repair: bool, deep: bool) -> _Checked:
    try:
        with connect(context) as client:
            return client.fsck(repair=repair, deep=deep), None
    except DaemonUnreachableError as error:
        options = settings_of(context)
        if options.is_named or options.server is not None:
            has_remedy = isinstance(error, DaemonSilentError | ServerUnreachableError)
            where = "" if options.server is None else " (on its host)"
            Output().fail(
                f"no kvtier-daemon answers at {error.address} ({error.problem}), so nothing was checked; "
                f"{error.remedy if has_remedy else 'start it'}, or check its disk folder without it{where}: "
                "kvtier fsck --offline --disk-dir DIR"
            )
            raise typer.Exit(ExitCode.UNREACHABLE) from error
        what = "checking the disk folder of the local settings, offline"
        Output().warn(f"no daemon answers at {error.address}: {what}")
    try:
        return _checked_offline(repair, deep, None, None)
    except typer.Exit as ended:
        raise typer.Exit(ExitCode.UNREACHABLE if ended.exit_code == ExitCode.USAGE else ended.exit_code) from None


def _checked_offline(repair: bool, deep: bool, disk_dir: Path | None, config: Path | None) -> _Checked:
    command = [sys.executable, "-m", _OFFLINE_CHECK]
    command += [option for option, given in (("--repair", repair), ("--deep", deep)) if given]
    command += ["--disk-dir", str(disk_dir)] if disk_dir else []
    command += ["--config", str(config)] if config else []
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        # The last line of a traceback says what happened too.
        Output().fail(said[-1] if said else f"the offline check ended with status {done.returncode}")
        raise typer.Exit(done.returncode if done.returncode > 0 else ExitCode.FAILED)
    fields = json.loads(done.stdout)
    folder = fields.pop("folder")
    findings = []
    for finding in fields.pop("findings"):
        # A path may hold bytes that are not UTF-8, which JSON and a terminal refuse.
        shown: dict[str, Any] = {k: printable(v) if isinstance(v, str) else v for k, v in finding.items()}
        findings.append(FsckFinding(**shown))
    return FsckReport(findings=tuple(findings), **fields), folder


def _remaining(report: FsckReport) -> list[FsckFinding]:
    return [finding for finding in report.findings if not finding.repaired and not finding.code.startswith(NOTE_PREFIX)]


def _parts(report: FsckReport, folder: str | None, how_to_repair: str, *, repair: bool, deep: bool) -> Iterator[Part]:
    """Yield what people read."""
    if report.findings:
        yield _table(report)
    verified = f", {format_size(report.verified_bytes)} verified" if deep else ""
    where = "" if folder is None else f" offline: {folder}"
    yield f"checked{where}: {report.num_packs} packs, {report.num_chunks} chunks{verified}"
    if num_repaired := sum(finding.repaired for finding in report.findings):
        yield f"repaired: {num_repaired}"
    if remaining := _remaining(report):
        yield f"found: {len(remaining)}" + ("" if repair else f"; repair with: {how_to_repair}")
    else:
        yield "clean now" if num_repaired else "clean"


def _table(report: FsckReport) -> Grid:
    where, what = column("WHERE", wraps=True, max_width=34), column("WHAT", wraps=True)
    table = Grid(column(wraps=True), column("CODE"), where, what)
    for finding in report.findings:
        note = finding.code.startswith(NOTE_PREFIX)
        mark = "fixed" if finding.repaired else "note" if note else "found"
        table.row(
            Styled(mark, {"fixed": "green", "note": "dim", "found": "bold red"}[mark]),
            finding.code.removeprefix(NOTE_PREFIX),
            finding.subject,
            finding.detail,
        )
    return table
