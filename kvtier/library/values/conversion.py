"""Messages of the protocol to values, by the names and types of the dataclasses' fields."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from kvtier._pb import cache_pb2 as pb
from kvtier.json_text import JsonError, read_json
from kvtier.library.values.public_values import Prompt

T = TypeVar("T")


def from_message(kind: Callable[..., T], message: Message) -> T:
    """Return the value of a message.

    A field of type `Any` is JSON text in the message, whose field may have `_json` behind the name. An enum's value
    that this kvtier does not know becomes UNKNOWN.
    """
    declared = message.DESCRIPTOR.fields_by_name
    fields = {}
    for name, hint in _hints(kind).items():
        source = name if name in declared else f"{name}_json"
        fields[name] = _value(hint, getattr(message, source), declared[source])
    return kind(**fields)


def given(**values: Any) -> dict[str, Any]:
    """Return arguments of a message without those that are None, which stands for a field that is not set."""
    return {name: value for name, value in values.items() if value is not None}


def prompt_of(status: pb.PromptStatus) -> Prompt:
    """Return the most frequent of all."""
    return from_message(Prompt, status)


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: Any, declared: Any) -> Any:
    container, inner = get_origin(hint), get_args(hint)
    if container is tuple:
        return tuple(_value(inner[0], item, declared) for item in value)
    if container is Mapping:
        return {key: _value(inner[1], value[key], declared) for key in value}
    if hint is Any:
        return _json_in(value)
    if is_dataclass(hint):
        return from_message(hint, value)  # type: ignore[arg-type]
    if issubclass(hint, Enum):
        known = declared.enum_type.values_by_number.get(value)
        return hint.__members__.get(known.name if known else "", hint["UNKNOWN"])
    return value


def _json_in(text: str) -> Any:
    """Return the value of JSON text, None when it is empty; other text stays unchanged."""
    try:
        return read_json(text) if text else None
    except JsonError:
        return text
