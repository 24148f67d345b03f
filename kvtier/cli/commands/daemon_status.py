"""`kvtier status`: the daemon, its tiers and its engines."""

from typing import Annotated

import typer

from kvtier.cli.context import settings_of
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import daemon_details


def status(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing, for probes that need only the exit code")
    ] = False,
) -> None:
    """Show the daemon: tiers, attached engines, namespaces, counters."""
    output = Output(json=as_json)
    with settings_of(context).connect() as client:
        daemon = client.status()
        if as_json and not quiet:
            del daemon.namespaces[:]
            daemon.namespaces.extend(client.namespaces())  # the same list, with fingerprints
    if quiet:
        return
    if as_json:
        output.answer(to_jsonable(daemon))
    else:
        output.show(*daemon_details(daemon))
