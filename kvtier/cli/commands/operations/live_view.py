"""`kvtier top`: the daemon, live."""

import time
from typing import Annotated

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import seconds
from kvtier.cli.output.live_screen import live_screen
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.top_frame import Moment, top_frame
from kvtier.library.client import Client


def top(
    context: typer.Context,
    interval: Annotated[float, seconds("Time between two looks", 0.1)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one frame, and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each look")] = False,
) -> None:
    """Show the daemon live: how full host memory and disk are, engines, pins, hits and misses.

    Ctrl-C ends it, with exit code 0.
    """
    output = Output(json=as_json)
    try:
        with connect(context) as client:
            if once:
                moment = _look(client)
                output.stream(_jsonable(moment), *top_frame(moment, None, output.console.width))
            else:
                _follow(client, output, interval)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _follow(client: Client, output: Output, interval_s: float) -> None:
    before = None
    with live_screen(output) as draw:
        while True:
            now = _look(client)
            if output.json:
                output.stream(_jsonable(now))
            else:
                height = output.console.height if output.console.is_terminal else None
                draw(top_frame(now, before, output.console.width, height))
            before = now
            time.sleep(interval_s)


def _look(client: Client) -> Moment:
    return Moment(status=client.status(), prompts=client.list(), at_s=time.monotonic())


def _jsonable(moment: Moment) -> dict[str, object]:
    prompts = [to_jsonable(prompt) for prompt in moment.prompts]
    return {"unix_s": time.time(), "status": to_jsonable(moment.status), "prompts": prompts}
