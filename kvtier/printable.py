"""How text that others wrote is shown: in a line of the CLI, in a cell of a table, in an error, in a log line.

A model's name, a prompt's source, an error of the daemon or a response of vLLM may hold anything: escape sequences that
a terminal obeys, line breaks that forge a line of ours, characters that reverse what follows them. Whatever writes to a
terminal or a log sends each line through `printable`. JSON keeps the text exactly: there it is escaped as JSON escapes.
"""

import json
import re
import reprlib
import unicodedata

MAX_LINE_CHARS = 4000
MAX_TEXT_BYTES = 2000
"""Of an error, or a field of a log line. gRPC sends an error's text in a header, percent-encoded, and a header of more
than 8 KiB does not arrive: three characters for each byte of this fit."""
SHOWN_CHARS = 200
"""Of a value, a name or a text of others inside a message: enough to know it again."""
MAX_LISTED = 20
"""Of a list in a message; a damaged or foreign file may have thousands of problems."""
_CUT = " … "
# Persian and Hindi words and many emojis need these two; they join what stands beside them and do nothing else.
_JOINERS = "\u200c\u200d"
_BEFORE_HOST = re.compile(r"^([a-z][a-z0-9+.-]*://|//)?.*@", re.IGNORECASE | re.DOTALL)


def printable(text: str, max_chars: int = MAX_LINE_CHARS) -> str:
    r"""Return one line of characters that take a place on the screen and do nothing else.

    Others are written as in Python's strings: `\x1b`, `\n`, `\u202e`.
    """
    cut = text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"
    return cut if cut.isprintable() else "".join(map(_escaped, cut))


def shortened(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return text of at most `max_bytes` in UTF-8, its middle left out when it is longer.

    What UTF-8 cannot say (a lone surrogate) is escaped. More of the beginning is kept than of the end, where an error
    has its remedy.
    """
    if len(text) > 2 * max_bytes:  # no work on megabytes that are thrown away
        text = text[:max_bytes] + text[-max_bytes:]
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes:
        return data.decode()
    kept = max_bytes - len(_CUT.encode())
    head = kept * 3 // 4
    return data[:head].decode(errors="ignore") + _CUT + data[head - kept :].decode(errors="ignore")


def cut(text: str, max_chars: int = SHOWN_CHARS) -> str:
    """Return the beginning of text, with an ellipsis where more follows."""
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def printable_json(value: object, *, indent: int | None = None, ascii_only: bool = False) -> str:
    r"""Return JSON that any parser reads as `value`, in which what is not printable is written as `\u001b`.

    NaN and infinite numbers become null.
    """
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    except ValueError:
        text = json.dumps(_without_nan(value), indent=indent, ensure_ascii=ascii_only, allow_nan=False)
    # Only strings hold such characters, except for the line breaks between the values.
    return text if text.isprintable() else "".join(map(_escaped_for_json, text))


class _ShortRepr(reprlib.Repr):
    """Python's short `repr`, which also survives numbers of more digits than Python writes."""

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 10_000 else f"<a number of {x.bit_length()} bits>"


_SHORT = _ShortRepr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN_CHARS


def shown_value(value: object) -> str:
    """Return how a message shows a value that cannot be used: quoted, printable, its middle left out if it is long."""
    if isinstance(value, bytes | bytearray):
        value = bytes(value[:SHOWN_CHARS])
    return _SHORT.repr(value)


def shown_url(url: str) -> str:
    """Return a URL without what may be secret: user and password, query and fragment.

    What is no URL is shown in the same way: a password stands in it all the same.
    """
    shown = _BEFORE_HOST.sub(lambda match: f"{match[1] or ''}***@", url)
    return re.sub(r"[?#].*", "", shown, flags=re.DOTALL)


def _escaped(character: str) -> str:
    shown = character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"
    return character if shown else character.encode("unicode_escape").decode()


def _escaped_for_json(character: str) -> str:
    return character if character == "\n" or _escaped(character) == character else json.dumps(character)[1:-1]


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    is_number = not isinstance(value, float) or value - value == 0
    return value if is_number else None
