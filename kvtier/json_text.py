"""Reads JSON from outside (a file of the operator, an answer of vLLM, a stored recipe) so that it can be sent on."""

import json
import math
from json import decoder, scanner
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Nesting depth. Requests to OpenAI's API have about ten levels; Python's parser fails near a thousand."""
_TOO_DEEP = f"has more than {MAX_DEPTH} lists and objects in each other; simplify it"


_SHORT_CHARS = 65536
"""Read in about a millisecond."""


class JsonError(ValueError):
    """The text is not JSON that can be sent on; the message says why, and where.

    Attributes:
        line: From 1, as `column`; 0: it is no JSON as a whole, or no place is known.
    """

    def __init__(self, text: str, line: int = 0, column: int = 0) -> None:
        super().__init__(text)
        self.line, self.column = line, column


class _DecoderInTurns(json.JSONDecoder):
    """Python's own decoder without its C parts, which hold the interpreter until they end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.parse_object, self.parse_array = decoder.JSONObject, decoder.JSONArray  # type: ignore[attr-defined]
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def read_json(text: str | bytes, *, in_turns: bool = False) -> Any:
    """Return the value.

    Args:
        text: JSON.
        in_turns: Let other threads run meanwhile, though it takes ten times as long: for long text in a daemon.

    Raises:
        JsonError: Not JSON, or it cannot be sent on: NaN, infinity, text that is not Unicode, too many levels.
    """
    kind = _DecoderInTurns if in_turns and len(text) > _SHORT_CHARS else json.JSONDecoder
    try:
        value = json.loads(text, cls=kind, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as exc:
        text = f"is not valid JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}"
        raise JsonError(text, exc.lineno, exc.colno) from exc
    except UnicodeDecodeError as exc:
        raise JsonError(f"is not valid JSON: byte {exc.start} is not UTF-8") from exc
    except RecursionError as exc:
        raise JsonError(_TOO_DEEP) from exc
    except JsonError:
        raise
    except ValueError as exc:
        # Python refuses to parse numbers of more than about 4,300 digits.
        raise JsonError("has a number of thousands of digits; no number in a request is that long") from exc
    _check(value)
    return value


def _check(value: Any) -> None:
    """Walk without recursion, because the depth may be too large."""
    waiting = [(value, "", 1)]
    while waiting:
        item, path, depth = waiting.pop()
        if isinstance(item, str):
            _check_text(item, path)
        elif isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                raise JsonError(_TOO_DEEP)
            for key, inner in item.items() if isinstance(item, dict) else enumerate(item):
                if isinstance(key, str):
                    _check_text(key, path)
                if isinstance(inner, str | dict | list):
                    where = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]"
                    waiting.append((inner, where, depth + 1))


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        half = f"\\u{ord(text[exc.start]):04x}"
        where = f" at {path.removeprefix('.')}" if path else ""
        raise JsonError(
            f"has half a character ({half}, a lone surrogate){where}, which is no text; save it again as UTF-8"
        ) from exc


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise JsonError(f"has the number {digits[:40]}, which is too large")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"has {name}, which is no JSON")
