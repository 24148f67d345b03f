"""`kvtier watch`: what the daemon does, as it does it."""

import time
from typing import Annotated

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import checked_text, seconds
from kvtier.cli.output.grid import Styled
from kvtier.cli.output.streams import Output
from kvtier.library.values.proof_values import Event
from kvtier.printable import printable_json

_STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
_MAX_SECONDS = 1e11


def watch(
    context: typer.Context,
    events: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EVENT]...",
            help="Names of events, as in docs/logs.md (default: all)",
            show_default=False,
            callback=checked_text,
        ),
    ] = None,
    timeout: Annotated[float, seconds("End after this time; 0: never", 0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each event")] = False,
) -> None:
    """Show what the daemon does from now on: the events of its log, without any text of prompts.

    Ctrl-C ends it, with exit code 0.
    """
    output = Output(json=as_json)
    try:
        with connect(context) as client, client.watch_events(*events or (), timeout_s=timeout or None) as stream:
            for event in stream:
                output.stream(event, event_line(event))
    except KeyboardInterrupt:
        raise typer.Exit from None


def event_line(event: Event) -> Styled:
    """Return an event as a line of the daemon's log shows it, with the time of day here."""
    at = time.strftime("%H:%M:%S", time.localtime(event.unix_s)) if abs(event.unix_s) < _MAX_SECONDS else "?"
    fields = [f"{name}={_shown(event.fields[name])}" for name in sorted(event.fields)]
    return Styled(" ".join([at, event.level, event.name, *fields]), _STYLES.get(event.level, ""))


def _shown(value: str) -> str:
    is_plain = value and not any(character.isspace() or character in '"=' for character in value)
    return value if is_plain else printable_json(value)
