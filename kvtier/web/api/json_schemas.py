"""JSON Schema of the values that answers have, from the library's dataclasses: as `to_jsonable` writes them."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

Schema = dict[str, Any]

_PLAIN: dict[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    bytes: {"type": "string", "description": "hexadecimal"},
    Any: {},
    type(None): {"type": "null"},
}
_PROBLEM: Schema = {
    "type": "object",
    "description": "RFC 9457. `title` is the error's class; `detail` names field, value and remedy.",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
    "required": ["type", "title", "status", "detail"],
}


class Schemas:
    """The named schemas that a description of the API has."""

    def __init__(self) -> None:
        self.named: dict[str, Schema] = {"Problem": _PROBLEM}

    def of(self, hint: Any) -> Schema:
        """Return the schema of a type; a dataclass becomes a named one."""
        if hint in _PLAIN:
            return _PLAIN[hint]
        container, inner = get_origin(hint), get_args(hint)
        if container in (tuple, list):
            return {"type": "array", "items": self.of(inner[0])}
        if container in (Mapping, dict):
            return {"type": "object", "additionalProperties": self.of(inner[1])}
        if container is UnionType:
            return {"anyOf": [self.of(each) for each in inner]}
        if isinstance(hint, type) and issubclass(hint, Enum):
            return {"type": "string", "enum": [each.name for each in hint]}
        assert isinstance(hint, type), hint
        assert is_dataclass(hint), hint
        if hint.__name__ not in self.named:
            self.named[hint.__name__] = {}  # of one that has itself
            self.named[hint.__name__] = self._of_fields(hint)
        return {"$ref": f"#/components/schemas/{hint.__name__}"}

    def _of_fields(self, kind: Any) -> Schema:
        hints = get_type_hints(kind)
        # `to_jsonable` leaves the recipe out where a prompt is one of several.
        names = [each.name for each in fields(kind)]
        return {
            "type": "object",
            "description": inspect.cleandoc(kind.__doc__ or ""),
            "properties": {name: self.of(hints[name]) for name in names},
            "required": [name for name in names if name != "recipe"],
        }


SCHEMAS = Schemas()
"""Of all answers."""


def answers(kind: Any, what: str = "", *, status: int = 200, **members: Any) -> dict[str, Any]:
    """Return the arguments of a route that describe its answer.

    Args:
        kind: The type of the answer; None with `members`.
        what: The summary of the answer.
        status: Of the answer.
        members: Types of an object's members, for an answer that is no dataclass.
    """
    schema = SCHEMAS.of(kind) if kind is not None else object_of(**members)
    return {
        "responses": {
            status: {"description": what or "Done.", "content": {"application/json": {"schema": schema}}},
            "default": {
                "description": "Refused, or failed.",
                "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
            },
        },
        "status_code": status,
        "response_model": None,
    }


def object_of(**members: Any) -> Schema:
    """Return the schema of an object with these members."""
    return {
        "type": "object",
        "properties": {name: SCHEMAS.of(kind) for name, kind in members.items()},
        "required": list(members),
    }
