"""`kvtier history` and `kvtier rollback`: the versions of a prompt."""

import re
from typing import Annotated

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import AsJson, PromptName, checked_text
from kvtier.cli.output.pin_messages import replaced
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import prompts_list
from kvtier.errors import InvalidArgumentError
from kvtier.library.progress_events import Progress, Replaced, ReplacementDropped
from kvtier.library.values.public_values import PromptState


def history(context: typer.Context, name: PromptName, as_json: AsJson = False) -> None:
    """List the versions of a prompt, the oldest first. The one without a number serves."""
    output = Output(json=as_json)
    with connect(context) as client:
        versions = client.history(name)
    output.answer([to_jsonable(each) for each in versions], *prompts_list(versions, output.console.width))


def rollback(
    context: typer.Context,
    name: PromptName,
    version: Annotated[
        str | None,
        typer.Argument(
            metavar="[@N]", help="The version (default: the last one)", show_default=False, callback=checked_text
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replace a prompt with a version that it has replaced. That one serves until then.

    Without @N, a version that waits to replace the prompt only ends: it has never served.
    """
    output = Output(json=as_json)
    dropped: list[str] = []

    def show(event: Progress) -> None:
        if isinstance(event, Replaced):
            output.say(replaced(event))
        if isinstance(event, ReplacementDropped):
            dropped.append(event.version)

    with connect(context) as client:
        number = None if version is None else _number(version)
        status = client.rollback(name, number, on_progress=show)
    if dropped:
        output.answer(to_jsonable(status), f"{dropped[0]} no longer waits to replace {name}, which stays as it is")
        return
    if status.name != name and status.state is not PromptState.DURABLE:
        output.say(
            f"{status.name} takes its place when it is durable. Have vLLM compute it now: kvtier warm {status.name}"
        )
    is_done = status.name == name
    output.answer(to_jsonable(status), f"rolled back: {name}" if is_done else f"rolling back {name}: {status.name}")


def _number(text: str) -> int:
    match = re.fullmatch(r"@?([1-9][0-9]{0,8})", text)
    if match is None:
        raise InvalidArgumentError("[@N]", text, "give the number of a version, as @2; see kvtier history")
    return int(match[1])
