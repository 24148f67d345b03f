"""Pins that are asked for, one or many: from messages to checked values."""

from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtier._pb import cache_pb2 as pb
from kvtier.core import limits
from kvtier.core.tokens import TokenIds
from kvtier.errors import InvalidArgumentError
from kvtier.prompts.book import CONTENT, RequestedPin
from kvtier.prompts.planned_pins import ExpectedPin
from kvtier.rpc.convert import fields_of, in_turns_of

CONTENT_FIELDS = (*CONTENT, "recipe_json")
"""Of a PinRequest: what makes the prompt the one that it is, and how that came to be."""
_HOW = ("ttl_s", "sliding", "priority", "replace", "public", "owner", "if_pin_id")


@dataclass
class AppliedPins:
    """What is to be applied at once: that of an ApplyPrompts, or one pin."""

    dry_run: bool = False
    pins: list[RequestedPin] = field(default_factory=list)
    unpinned: list[str] = field(default_factory=list)
    expected: dict[str, ExpectedPin] = field(default_factory=dict)


def how_of_request(request: pb.PinRequest) -> dict[str, Any]:
    """Return what a request says of how it is to be pinned."""
    labels = dict(request.labels.values) if request.HasField("labels") else None
    return {name: value for name, value in fields_of(request).items() if name in _HOW} | {"labels": labels}


async def tokens_of(tokens: Sequence[int]) -> TokenIds:
    """Copy token ids in turns of the loop."""
    ids = array("I")
    async for part in in_turns_of(tokens):
        ids.extend(part)
    return TokenIds(ids)


async def requested_pin(request: pb.PinRequest) -> RequestedPin:
    """Check a pin that is asked for by its content."""
    content = {name: getattr(request, name) for name in CONTENT_FIELDS if name != "tokens"}
    return RequestedPin(name=request.name, tokens=await tokens_of(request.tokens), **content, **how_of_request(request))


async def read_apply(messages: AsyncIterator[pb.ApplyMessage], take_bytes: Callable[[int], None]) -> AppliedPins:
    """Read all that is to be applied.

    Args:
        take_bytes: Called for the memory that each message takes.

    Raises:
        InvalidArgumentError: It does not begin with ApplyStart, has too much, a name twice, or a pin that cannot be.
        KvtierError: Of `take_bytes`.
    """
    first = await anext(messages, None)
    if first is None or first.WhichOneof("kind") != "start":
        found = "nothing" if first is None else first.WhichOneof("kind")
        raise InvalidArgumentError("message", found, "the first message of an apply is ApplyStart")
    wanted, names, num_bytes = AppliedPins(dry_run=first.start.dry_run), set[str](), 0
    async for message in messages:
        num_bytes += message.ByteSize()
        limits.check_count("messages", len(names) + 1, limits.MAX_APPLIED)
        if num_bytes > limits.MAX_APPLIED_BYTES:
            remedy = f"at most {limits.MAX_APPLIED_BYTES} bytes are applied at once; split them"
            raise InvalidArgumentError("messages", f"{num_bytes} bytes", remedy)
        take_bytes(message.ByteSize() + limits.APPLIED_MESSAGE_BYTES)
        name = await _take_applied(wanted, message)
        if name in names:
            raise InvalidArgumentError("name", name, "comes twice; name each prompt once")
        names.add(name)
        if message.HasField("expected"):
            wanted.expected[name] = ExpectedPin(**fields_of(message.expected))
    return wanted


async def _take_applied(wanted: AppliedPins, message: pb.ApplyMessage) -> str:
    match message.WhichOneof("kind"):
        case "pin":
            pin = message.pin
            limits.check_count("tokens", len(pin.tokens), limits.MAX_TOKENS)
            limits.check_chosen_name("name", pin.name)
            if pin.adopt or pin.version:
                raise InvalidArgumentError(
                    "adopt, version", pin.name, "pins that are applied have content of their own"
                )
            wanted.pins.append(replace(await requested_pin(pin), replace=True))
            return pin.name
        case "unpin":
            limits.check_chosen_name("unpin", message.unpin)
            wanted.unpinned.append(message.unpin)
            return message.unpin
        case kind:
            raise InvalidArgumentError("message", kind, "pins and names to unpin follow ApplyStart, nothing else")
