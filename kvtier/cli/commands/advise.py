"""`kvtier advise`: which prompts are worth a pin, by what requests begin with, and which to change."""

from typing import Annotated

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import AsJson
from kvtier.cli.output.advice import advice_details
from kvtier.cli.output.streams import Output
from kvtier.config.units import parse_size
from kvtier.errors import InvalidArgumentError

_MAX_BUDGET_BYTES = 2**60


def advise(
    context: typer.Context,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Disk space for the pins, like 20GiB; without it, that of automatic pins"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which prompts are worth a pin, and which change in the middle, from live traffic.

    Counts requests of about the last day. What they save is seconds of prefill, if vLLM's prefix cache had none of it.
    """
    max_bytes = _budget(budget)
    with connect(context) as client:
        advice = client.advise(max_bytes=max_bytes)
    Output(json=as_json).answer(advice, *advice_details(advice))


def _budget(text: str | None) -> int:
    if text is None:
        return 0
    try:
        num_bytes = parse_size(text)
    except ValueError as exc:
        raise InvalidArgumentError("--budget", text, str(exc)) from exc
    if not 0 < num_bytes <= _MAX_BUDGET_BYTES:
        raise InvalidArgumentError("--budget", text, "use 1B to 1048576TiB")
    return num_bytes
