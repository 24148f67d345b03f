"""What a subscriber receives, what it is asked, and what all of them decode messages to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

NUMBER_BYTES = 8


class RefusedBatchError(Exception):
    """A decoder that meets what it does not take drops the whole message, with all events of it."""


class Message(NamedTuple):
    """The three frames of a message."""

    topic: bytes
    number: bytes
    payload: bytes


@dataclass(frozen=True, kw_only=True)
class AskedPrompt:
    """A request of which a router wants to know where its prompt is."""

    tokens: Sequence[int]
    model: str = "model"
    cache_salt: str = ""
    adapter: str = ""


class RouterIndex(Protocol):
    """What a router knows of its engines' caches."""

    def receive(self, pod: str, message: Message) -> None:
        """Take a message from the subscription to an engine.

        Raises:
            RefusedBatchError: It cannot be decoded; nothing of it was taken.
        """

    def forget(self, pod: str) -> None:
        """An engine is gone."""

    def num_blocks(self, prompt: AskedPrompt) -> dict[str, int]:
        """Return how many blocks each engine has of a prompt, from the first on; those that have none are left out."""

    def scores(self, prompt: AskedPrompt) -> dict[str, float]:
        """Return by what the router compares engines: more for more blocks, less for slower media."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A `BlockStored`, decoded."""

    blocks: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    block_tokens: int
    medium: str | None = None
    adapter: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    group: int | None = None
    kind: str | None = None


@dataclass(frozen=True, kw_only=True)
class Removed:
    """A `BlockRemoved`, decoded."""

    blocks: tuple[int, ...]
    medium: str | None = None
    group: int | None = None


@dataclass(frozen=True)
class Cleared:
    """An `AllBlocksCleared`, decoded."""


Decoded = Stored | Removed | Cleared


_FIELDS_OF_ARRAYS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
}


class Fields:
    """Fields of an event, with the errors that decoders return.

    Args:
        named: By name; what is absent is None.
    """

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named

    @classmethod
    def of_array(cls, event: Sequence[Any]) -> "Fields":
        """Return the fields of an event as vLLM sent it before its #42892: by position, after its type."""
        return cls(dict(zip(_FIELDS_OF_ARRAYS.get(event[0], ()), event[1:], strict=False)))

    def optional(self, name: str, kind: type) -> Any:
        """Return a field that may be None."""
        value = self._named.get(name)
        if value is not None and not isinstance(value, kind):
            raise RefusedBatchError(f"{name} is {value!r}")
        return value

    def required(self, name: str, kind: type) -> Any:
        """Return a field that may not be None."""
        if (value := self.optional(name, kind)) is None:
            raise RefusedBatchError(f"{name} is missing")
        return value


def decoded(payload: bytes) -> Any:
    """Return what a payload holds, as arrays, maps and values.

    Raises:
        RefusedBatchError: It is no msgpack.
    """
    try:
        return msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as error:
        raise RefusedBatchError(str(error)) from error
