"""Pinned prompts: are they durable, and do engines recognize them?"""

from collections.abc import Sequence

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.doctor.report import CheckResult, Status, ok, skipped, warn

MAX_LISTED = 20


def check_pins(prompts: Sequence[PromptStatus] | None) -> list[CheckResult]:
    """Return one finding for each pinned prompt that is not durable, up to `MAX_LISTED`, and one for all others.

    Args:
        prompts: The prompts of the daemon; None: no daemon answers.
    """
    if prompts is None:
        return [skipped("pins.kept", "no daemon answers")]
    pinned = [prompt for prompt in prompts if prompt.pinned]
    broken = [finding for finding in map(check_pin, pinned) if finding.status is not Status.OK]
    if len(broken) > MAX_LISTED:
        rest = warn("pins.kept", f"{len(broken) - MAX_LISTED} more are not durable", "see `kvtier list`")
        return [*broken[:MAX_LISTED], rest]
    return [*broken, ok("pins.kept", f"{len(pinned) - len(broken)} of {len(pinned)} pinned prompts are durable")]


def check_pin(prompt: PromptStatus) -> CheckResult:
    """Say whether a pinned prompt is durable and recognized by the engines that serve its model, and if not, why."""
    name = prompt.name
    if prompt.error:
        remedy = f"correct that, then `kvtier pin {name}`; or `kvtier unpin {name}`"
        return warn("pins.kept", f"{name}: an engine cannot recognize it: {prompt.error}", remedy)
    if prompt.num_confirmed < prompt.num_engines:
        found = f"{name}: recognized by {prompt.num_confirmed} of {prompt.num_engines} engines so far"
        return warn(
            "pins.kept", found, "wait a moment and run this again; the engine's log says what it does with pins"
        )
    match prompt.state:
        case PromptStatus.DURABLE:
            return ok("pins.kept", name)
        case PromptStatus.UNRENDERED:
            return warn("pins.kept", f"{name}: not yet turned into tokens", f"run `kvtier pin {name}` while vLLM runs")
        case PromptStatus.WAITING:
            found = f"{name}: no vLLM with the connector has recognized it yet"
            return warn("pins.kept", found, f"start vLLM with the connector, serving {prompt.model or 'its model'}")
        case PromptStatus.OVER_QUOTA:
            return warn(
                "pins.kept", f"{name}: does not fit into disk.bytes", "raise disk.bytes, or unpin and evict another"
            )
        case _:
            return warn(
                "pins.kept", f"{name}: {_durable(prompt)} chunks are durable", f"`kvtier pin {name}` computes the rest"
            )


def _durable(prompt: PromptStatus) -> str:
    num_chunks = sum(binding.num_chunks for binding in prompt.bindings)
    return f"{sum(binding.num_durable_chunks for binding in prompt.bindings)} of {num_chunks}"
