"""Reading JSON that somebody else wrote, in a thread, beside a loop that must go on."""

import json
from json import scanner
from typing import Any

from kvtier.errors import InvalidArgumentError


class _PoliteDecoder(json.JSONDecoder):
    """Python's own decoder without its C scanner, which holds the interpreter's lock from the first byte to the last.

    This one is slower and lets other threads in between. Refuses names that come twice: one of two would be ignored.
    """

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_named_once, parse_constant=_refuse_constant)
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # not in its stub


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("a name comes twice")
    return named


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_decoder = _PoliteDecoder()


def read_json(field: str, text: object) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        InvalidArgumentError: The text is no JSON object.
    """
    if not isinstance(text, str):
        raise InvalidArgumentError(field, text, "must be text")
    try:
        value = _decoder.decode(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgumentError(field, text, f"must be JSON ({exc})") from exc
    return read_object(field, value)


def read_object(field: str, value: object) -> dict[str, Any]:
    """Return a value that is to be a JSON object.

    Raises:
        InvalidArgumentError: It is none.
    """
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, value, "must be a JSON object")
    return value


def read_list(field: str, value: object) -> list[Any]:
    """Return a value that is to be a JSON array.

    Raises:
        InvalidArgumentError: It is none.
    """
    if not isinstance(value, list):
        raise InvalidArgumentError(field, value, "must be a JSON array")
    return value
