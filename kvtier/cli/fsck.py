"""`kvtier fsck`: asks the daemon; when there is none, the daemon's own offline check in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier._pb.cache_pb2 import FsckFinding, FsckReport, FsckRequest
from kvtier.cli.context import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE, EXIT_USAGE, settings_of
from kvtier.cli.grid import Column, Grid, Styled
from kvtier.cli.output import Output, to_jsonable
from kvtier.config.units import format_size
from kvtier.errors import DaemonUnreachableError, InvalidArgumentError

NOTE_PREFIX = "note-"
_OFFLINE_CHECK = "kvtier.daemon.fsck"


def fsck(
    context: typer.Context,
    repair: Annotated[bool, typer.Option("--repair", help="Put right what can be put right")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read and verify every stored byte")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Check the directory itself; no daemon may run")] = False,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --offline: the state directory", show_default=False)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --offline: the daemon's TOML file", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Compare ledger, packs and arenas; with --repair make them agree.

    Asks the running daemon, which serves on meanwhile.
    When none runs, or with --offline, the directory itself is checked.
    Nothing that reads right is deleted.

    Exit codes: 0 nothing is wrong (any more), 1 something is,
    3 no daemon answers and the directory cannot be checked either.
    """
    output = Output(json=as_json)
    if (state_dir or config) and not offline:
        option = "--state-dir" if state_dir else "--config"
        raise InvalidArgumentError(option, str(state_dir or config), "is for --offline; the daemon knows its own")
    try:
        report = _checked_offline(repair, deep, state_dir, config) if offline else _checked(context, repair, deep)
    except KeyboardInterrupt:
        output.warn("interrupted; what was repaired so far stays repaired")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        output.answer(to_jsonable(report))
    else:
        _show(output, report, repair=repair, deep=deep)
    if _remaining(report):
        raise typer.Exit(EXIT_FAILED)


def _checked(context: typer.Context, repair: bool, deep: bool) -> FsckReport:
    try:
        with settings_of(context).connect() as client:
            return client.fsck(FsckRequest(repair=repair, deep=deep))
    except DaemonUnreachableError as error:
        Output().warn(f"no daemon answers at {error.address}: checking its directory offline")
    try:
        return _checked_offline(repair, deep, None, None)
    except typer.Exit as ended:
        raise typer.Exit(EXIT_UNREACHABLE if ended.exit_code == EXIT_USAGE else ended.exit_code) from None


def _checked_offline(repair: bool, deep: bool, state_dir: Path | None, config: Path | None) -> FsckReport:
    command = [sys.executable, "-m", _OFFLINE_CHECK]
    command += ["--repair"] if repair else []
    command += ["--deep"] if deep else []
    command += ["--state-dir", str(state_dir)] if state_dir else []
    command += ["--config", str(config)] if config else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        Output().fail(done.stderr.strip() or f"the offline check ended with status {done.returncode}")
        raise typer.Exit(done.returncode if done.returncode > 0 else EXIT_FAILED)
    fields = json.loads(done.stdout)
    findings = [FsckFinding(**finding) for finding in fields.pop("findings")]
    return FsckReport(findings=findings, **fields)


def _remaining(report: FsckReport) -> list[FsckFinding]:
    return [finding for finding in report.findings if not finding.repaired and not finding.code.startswith(NOTE_PREFIX)]


def _show(output: Output, report: FsckReport, *, repair: bool, deep: bool) -> None:
    if report.findings:
        output.show(_table(report))
        output.say()
    checked = f"{report.num_packs} packs, {report.num_chunks} chunks"
    if deep:
        checked += f", {format_size(report.verified_bytes)} verified"
    output.say(f"checked: {checked}")
    remaining, num_repaired = _remaining(report), sum(finding.repaired for finding in report.findings)
    if num_repaired:
        output.say(f"repaired: {num_repaired}")
    if not remaining:
        output.say("clean" if not num_repaired else "clean now")
        return
    output.say(f"found: {len(remaining)}" + ("" if repair else "; repair with: kvtier fsck --repair"))


def _table(report: FsckReport) -> Grid:
    where, what = Column(title="WHERE", wraps=True, max_width=34), Column(title="WHAT", wraps=True)
    table = Grid(Column(wraps=True), Column(title="CODE"), where, what)
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
