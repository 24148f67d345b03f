"""Messages of the protocol to values, by the names and types of the dataclasses' fields."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from kvtier._pb import cache_pb2 as pb
from kvtier.errors import InvalidArgumentError
from kvtier.json_text import JsonError, read_json
from kvtier.library.values.public_values import Prompt

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Convert = Callable[[Any], Any]


def from_message(kind: type[T], message: Message) -> T:
    """Return the value of a message.

    A field of type `Any` is JSON text in the message, whose field may have `_json` behind the name. An enum's value
    that this kvtier does not know becomes UNKNOWN.
    """
    plan = _plan(kind, message.DESCRIPTOR)  # type: ignore[arg-type]  # a class is hashable
    values = dict(zip(plan.names, plan.sources(message), strict=True))
    for name, convert in plan.converters:
        values[name] = convert(values[name])
    return kind(**values)


def checked_message(kind: type[M], **fields: Any) -> M:
    """Return a message. A field that is None is not set.

    Raises:
        InvalidArgumentError: A field cannot hold its value: a number out of its range, text that UTF-8 cannot say.
    """
    try:
        return kind(**fields)
    except ValueError:
        for name, value in fields.items():
            _check_field(kind, name, value)
        raise


def _check_field(kind: type[Message], name: str, value: Any) -> None:
    try:
        kind(**{name: value})
    except ValueError as exc:
        is_number = isinstance(value, int)
        remedy = (
            "is out of range" if is_number else "has a value that cannot be sent: a number out of range, or no UTF-8"
        )
        raise InvalidArgumentError(name, value if is_number else "...", remedy) from exc


def one_of(field: str, value: T, meanings: Mapping[T, Any]) -> Any:
    """Return what a value stands for. InvalidArgumentError: it is none of those that may be given."""
    try:
        return meanings[value]
    except (KeyError, TypeError) as exc:
        allowed = ", ".join("None" if each is None else str(each) for each in meanings)
        raise InvalidArgumentError(field, value, f"must be one of {allowed}") from exc


def given(**values: Any) -> dict[str, Any]:
    """Return arguments of a message without those that are None, which stands for a field that is not set."""
    return {name: value for name, value in values.items() if value is not None}


def prompt_of(status: pb.PromptStatus) -> Prompt:
    """Return the most frequent of all."""
    return from_message(Prompt, status)


class _Plan(NamedTuple):
    """How a value's fields are read; lists of ten thousand prompts are."""

    names: Sequence[str]
    sources: Callable[[Message], Sequence[Any]]  # the message's fields, in the order of the names
    converters: Sequence[tuple[str, Convert]]  # of the fields that are not taken as they are


@cache
def _plan(kind: Hashable, descriptor: Any) -> _Plan:
    hints, declared = get_type_hints(kind), descriptor.fields_by_name
    sources = [name if name in declared else f"{name}_json" for name in hints]
    converters = [
        (name, convert)
        for (name, hint), source in zip(hints.items(), sources, strict=True)
        if (convert := _converter(hint, declared[source])) is not None
    ]
    read = attrgetter(*sources)
    return _Plan(tuple(hints), read if len(sources) > 1 else lambda message: (read(message),), converters)


def _converter(hint: Any, declared: Any) -> Convert | None:
    container, inner = get_origin(hint), get_args(hint)
    if container is tuple:
        item = _converter(inner[0], declared)
        return tuple if item is None else lambda values: tuple(map(item, values))
    if container is Mapping:
        value = _converter(inner[1], declared)
        return dict if value is None else lambda values: {key: value(values[key]) for key in values}
    if hint is Any:
        return _json_in
    if container is UnionType:  # a message that may be left out, or None
        present = _converter(inner[0], declared)
        assert present is not None
        return lambda message: present(message) if message.ByteSize() else None
    if is_dataclass(hint):
        return lambda message: from_message(hint, message)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        members = hint.__members__
        # Of outcomes UNKNOWN is one itself.
        newer = members.get("UNRECOGNIZED") or hint["UNKNOWN"]
        known = {each.number: members.get(each.name, newer) for each in declared.enum_type.values}
        return lambda number: known.get(number, newer)
    return None


def _json_in(text: str) -> Any:
    """Return the value of JSON text, None when it is empty; other text stays unchanged."""
    try:
        return read_json(text) if text else None
    except JsonError:
        return text
