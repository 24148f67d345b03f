"""`kvtier ready`: whether pinned prompts can be restored now, for people, probes and init containers."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer

from kvtier.cli.context import connect, interruptible
from kvtier.cli.options import AsJson, PromptNames, Selectors, seconds
from kvtier.cli.output.grid import Grid, Part, column
from kvtier.cli.output.streams import Output
from kvtier.errors import InvalidArgumentError
from kvtier.library.proof_calls import ReadyTier
from kvtier.library.values.proof_values import Readiness
from kvtier.process import ExitCode


class _Tier(StrEnum):
    DISK = "disk"
    HOST = "host"
    DEVICE = "device"


_TIERS: dict[_Tier, ReadyTier] = {_Tier.DISK: "disk", _Tier.HOST: "host", _Tier.DEVICE: "device"}
_WHERE = {
    _Tier.DISK: "on disk, for every attached engine",
    _Tier.HOST: "on disk and in host memory, for every attached engine",
    _Tier.DEVICE: "on disk and in vLLM's prefix cache of every attached engine",
}


def ready(
    context: typer.Context,
    names: PromptNames = None,
    selector: Selectors = None,
    tier: Annotated[_Tier, typer.Option(help="Where chunks have to be; host, device: on disk besides")] = _Tier.DISK,
    timeout: Annotated[float, seconds("Wait so long for prompts, and for the daemon; 0: look once", 0)] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Say whether pinned prompts can be restored now, and what those that cannot wait for.

    Without names and labels: all prompts that operators pinned. It does not wait for refused ones.

    Exit codes: 0 they can, 1 some cannot.
    """
    if names and selector:
        raise InvalidArgumentError("-l", ",".join(selector), "cannot go with names of prompts; give one of both")
    output = Output(json=as_json)
    with connect(context) as client, interruptible(output, "nothing was changed"), output.working("waiting ..."):
        readiness = client.wait_ready(
            *dict.fromkeys(names or ()), selector=",".join(selector or ()), tier=_TIERS[tier], timeout_s=timeout
        )
    output.answer(readiness, *_lines(readiness, _WHERE[tier]))
    if not readiness.ready:
        raise typer.Exit(ExitCode.FAILED)


def _lines(readiness: Readiness, where: str) -> Iterator[Part]:
    if not readiness.num_prompts:
        yield "ready: no prompts are pinned" if readiness.ready else "not ready: no pinned prompt has these labels"
        return
    word, count = "ready" if readiness.ready else "not ready", f"{readiness.num_ready} of {readiness.num_prompts}"
    yield f"{word}: {count} prompts are {where}"
    if readiness.waiting:
        table = Grid(column("NAME", wraps=True), column("STATE"), column("WAITS FOR", wraps=True))
        for each in readiness.waiting:
            table.row(each.name, each.state.replace("_", " "), each.why)
        yield table
    if num_more := readiness.num_prompts - readiness.num_ready - len(readiness.waiting):
        yield f"and {num_more} more" if num_more > 0 else ""
