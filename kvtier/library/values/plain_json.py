"""Values of the library as plain JSON values."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

_PLAIN = frozenset({str, int, float, bool, type(None)})


def to_jsonable(value: Any, *, with_recipe: bool = False) -> Any:
    """Return a value of the library as plain JSON values; what is plain already stays as it is.

    An enum is its name in the protocol, bytes are hex, keys of a mapping are in order. The `recipe` of a prompt, which
    has its whole text, is there only `with_recipe`, as the last field.
    """
    if not is_dataclass(value) or isinstance(value, type):
        return value
    shown = {name: _field(getattr(value, name)) for name in _shown_names(type(value))}
    return shown | {"recipe": value.recipe} if with_recipe else shown  # type: ignore[attr-defined]


@cache
def _shown_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.name != "recipe")


def _field(value: Any) -> Any:
    if type(value) in _PLAIN:  # most are, and pages have thousands
        return value
    if isinstance(value, tuple):
        return [_field(item) for item in value]
    if isinstance(value, Mapping):
        return {key: value[key] for key in sorted(value)}
    if isinstance(value, Enum):
        return value.name
    return value.hex() if isinstance(value, bytes) else to_jsonable(value)
