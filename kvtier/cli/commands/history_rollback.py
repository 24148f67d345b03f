"""`kvtier history` and `kvtier rollback`: the versions of a prompt."""

import re
import time
from typing import Annotated

import typer

from kvtier._pb.cache_pb2 import PinRequest, PromptStatus
from kvtier.cli.commands.pin_flow import await_replacement
from kvtier.cli.context import connect
from kvtier.cli.options import AsJson, PromptName, checked_text
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import prompts_list
from kvtier.client.admin import AdminClient
from kvtier.concurrency.pauses import POLL_S
from kvtier.core.limits import parse_version
from kvtier.errors import InvalidArgumentError

BIND_TIMEOUT_S = 5.0
"""For engines to recognize the version, and so learn that its chunks are there."""


def history(context: typer.Context, name: PromptName, as_json: AsJson = False) -> None:
    """List the versions of a prompt, the oldest first. The one without a number serves."""
    output = Output(json=as_json)
    with connect(context) as client:
        versions = _versions(client, name)
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
    """Replace a prompt with a version that it has replaced. That one serves until then."""
    output = Output(json=as_json)
    with connect(context) as client:
        number = _last_version(client, name) if version is None else _number(version)
        request = PinRequest(name=name, version=number, replace=True)
        status = made = client.pin(request)
        ends_s = time.monotonic() + BIND_TIMEOUT_S
        while _is_awaited(status, name) and time.monotonic() < ends_s:
            time.sleep(POLL_S)
            status = client.get(pin_id=made.pin_id)
        status = await_replacement(client, made.name, status, output)
    if status.name != name and status.state != PromptStatus.DURABLE:
        output.say(
            f"{status.name} takes its place when it is durable. Have vLLM compute it now: kvtier warm {status.name}"
        )
    output.answer(to_jsonable(status), f"version {number} of {name}: {status.name}")


def _is_awaited(status: PromptStatus, name: str) -> bool:
    is_made = status.name == name or status.state == PromptStatus.DURABLE
    return bool(status.num_engines) and not (is_made or status.error)


def _versions(client: AdminClient, name: str) -> list[PromptStatus]:
    """Return a prompt and its other versions: the old ones, the prompt if there is one, its replacement."""
    listed = {each.name: each for each in client.list()}
    found = [(parse_version(each.name), each) for each in listed.values()]
    others = sorted(
        ((version[1], each) for version, each in found if version and version[0] == name), key=lambda other: other[0]
    )
    current = listed.get(name) if others else client.get(name)  # which says that there is none
    replacement = "" if current is None else current.replacement
    old = [each for _, each in others if each.name != replacement]
    return [*old, *([current] if current else []), *(each for _, each in others if each.name == replacement)]


def _last_version(client: AdminClient, name: str) -> int:
    old = [each for each in _versions(client, name) if each.name != name and not each.pinned]
    version = parse_version(old[-1].name) if old else None
    if version is None:
        raise InvalidArgumentError("NAME", name, "has no old version that is known; see kvtier history")
    return version[1]


def _number(text: str) -> int:
    match = re.fullmatch(r"@?([1-9][0-9]{0,8})", text)
    if match is None:
        raise InvalidArgumentError("[@N]", text, "give the number of a version, as @2; see kvtier history")
    return int(match[1])
