"""`kvtier doctor`: problems and their remedies. The checks are in `kvtier.doctor`."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.cli_client import OPTION_NAMES
from kvtier.cli.context import require_socket, settings_of
from kvtier.cli.options import AsJson, api_key_option, url_option
from kvtier.cli.output.grid import Grid, Styled, column
from kvtier.cli.output.streams import Output
from kvtier.doctor import CheckResult, Status, run_checks
from kvtier.library.rendering.vllm_client import VllmClient
from kvtier.process import ExitCode

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIPPED: "dim"}


def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="KVTIER_CONFIG", help="The daemon's TOML file", show_default=False),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Interpreter that vLLM runs with (default: this one)", show_default=False),
    ] = None,
    url: Annotated[str | None, url_option(help_text="A running vLLM, to be checked too")] = None,
    api_key: Annotated[str | None, api_key_option()] = None,
    as_json: AsJson = False,
) -> None:
    """Check machine, settings, daemon, vLLM and pins, and print remedies.

    Changes nothing, and works without a daemon and without vLLM.
    The import of vLLM, if installed, takes some seconds.

    Exit codes: 0 no check failed (there may be warnings), 1 a check failed.
    """
    require_socket(context, "doctor")
    output = Output(json=as_json)
    vllm = VllmClient(url, api_key, OPTION_NAMES) if url else nullcontext()
    with vllm as server, output.working("running the checks ..."):
        socket, daemon_uid = settings_of(context).socket, settings_of(context).daemon_uid
        findings = run_checks(socket, daemon_uid, config_path=config, python=python, server=server)
    output.answer([asdict(finding) for finding in findings], findings_table(findings), "", _summary(findings))
    if any(finding.status is Status.FAIL for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def findings_table(findings: Iterable[CheckResult]) -> Grid:
    """Return one row per finding; the remedy stands below it."""
    table = Grid(column(wraps=True), column("CHECK"), column("WHAT, AND WHAT TO DO", wraps=True))
    for finding in findings:
        style = _STYLES[finding.status]
        lines = (finding.found, f"-> {finding.remedy}") if finding.remedy else (finding.found,)
        what = Styled(lines, style if finding.status is Status.SKIPPED else "")
        table.row(Styled(finding.status.value, style), finding.id, what)
    return table


def _summary(findings: Sequence[CheckResult]) -> str:
    """Return how many checks have each status, and which of them need action."""
    parts = []
    for status in Status:
        ids = [finding.id for finding in findings if finding.status is status]
        named = f" ({', '.join(dict.fromkeys(ids))})" if status in (Status.WARN, Status.FAIL) else ""
        parts += [f"{len(ids)} {status.value}{named}"] if ids else []
    return ", ".join(parts)
