"""`kvtier status`: the daemon, its tiers and its engines."""

from dataclasses import replace
from typing import Annotated

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import AsJson
from kvtier.cli.output.streams import Output
from kvtier.cli.output.tables import daemon_details


def status(
    context: typer.Context,
    as_json: AsJson = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing, for probes that need only the exit code")
    ] = False,
) -> None:
    """Show the daemon: tiers, attached engines, namespaces, counters."""
    output = Output(json=as_json)
    with connect(context) as client:
        daemon = client.status()
        if as_json and not quiet:
            daemon = replace(daemon, namespaces=tuple(client.namespaces()))  # the same list, with fingerprints
    if not quiet:
        output.answer(daemon, *daemon_details(daemon))
