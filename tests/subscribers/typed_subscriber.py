"""A subscriber that decodes with typed structs of msgspec, and asks for what it has missed.

Source: vLLM's own example, `examples/features/kv_events/kv_events_subscriber.py` at 1bd773f: it declares fewer fields
than vLLM sends, and asks the replay socket for numbers that it lacks.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from tests.subscribers.wire import NUMBER_BYTES, Message, RefusedBatchError


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    """The name of its class is its `type`."""


class BlockStored(Event):
    """Blocks that an engine has now."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Event):
    """Blocks that it has lost."""

    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """It has none."""


class Batch(msgspec.Struct, array_like=True):
    """The events of a step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_DECODER = msgspec.msgpack.Decoder(Batch)


def typed_events(message: Message) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Return the events of a message.

    Raises:
        RefusedBatchError: They are not as declared.
    """
    try:
        return _DECODER.decode(message.payload).events
    except msgspec.ValidationError as error:
        raise RefusedBatchError(str(error)) from error


def replayed(endpoint: str, begin: int, timeout_s: float) -> Iterator[Message]:
    """Yield what a publisher has kept from a number on.

    Raises:
        TimeoutError: It did not answer to the end.
    """
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send(begin.to_bytes(NUMBER_BYTES, "big"))
        while socket.poll(int(timeout_s * 1000)):
            message = Message(*socket.recv_multipart())
            if not message.payload:
                return
            yield message
        raise TimeoutError(endpoint)
