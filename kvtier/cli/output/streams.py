"""Where the CLI writes: answers on stdout, warnings on stderr, JSON when asked.

What is said may hold text of others, so every line is escaped here (`kvtier.printable`), and nothing is read as rich's
markup. A line is an argument of its own: a line break within one was written by others.
"""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text

from kvtier.cli.json_text import JsonError, read_json
from kvtier.cli.output.grid import Grid, Styled, text_of
from kvtier.printable import printable, printable_json

_PIPE_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Output:
    """The two streams of one command.

    Attributes:
        json: The answer is one JSON value on stdout; what is said on the way goes to stderr then.
    """

    json: bool = False
    _out: Console = field(default_factory=lambda: _console(stderr=False))
    _err: Console = field(default_factory=lambda: _console(stderr=True))

    @property
    def console(self) -> Console:
        """Where progress is shown."""
        return self._err if self.json else self._out

    def say(self, *lines: str) -> None:
        """Write lines for people."""
        for line in lines:
            _write(self.console, Text(printable(line)))

    def warn(self, text: str) -> None:
        """Write a warning to stderr."""
        _write(self._err, Text.assemble(("warning: ", "yellow"), printable(text)))

    def fail(self, text: str) -> None:
        """Write an error to stderr."""
        _write(self._err, Text.assemble(("error: ", "bold red"), printable(text)))

    def show(self, *parts: Grid | Styled | str) -> None:
        """Write tables, and lines between them."""
        for part in parts:
            self.console.print(part if isinstance(part, Grid) else text_of(part))

    def working(self, text: str) -> AbstractContextManager[object]:
        """Show on a terminal that something takes a moment."""
        return self._err.status(Text(printable(text))) if self._err.is_terminal else nullcontext()

    def answer(self, value: Any) -> None:
        """Write the JSON answer."""
        text = printable_json(value, indent=2)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = printable_json(value, indent=2, ascii_only=True)
        print(text, flush=True)  # now, so that a full disk is said as other errors are


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # rich would fold a table to 80 columns in a pipe, and names with it.
        console.width = _PIPE_WIDTH
    return console


def _write(console: Console, text: Text) -> None:
    # In a pipe a line stays a line, so that grep and copied commands work; a terminal gets words wrapped.
    console.print(text, soft_wrap=not console.is_terminal)


def to_jsonable(message: Message, *, with_recipe: bool = False) -> dict[str, Any]:
    """Return a protobuf message as plain JSON values, every field present.

    protobuf's own JSON form writes 64-bit numbers as strings, which no shell script expects. JSON that a field holds as
    text becomes values too.

    Args:
        message: Any message.
        with_recipe: With a prompt's `recipe`, which has its whole text.
    """
    values = {f.name: _field_value(message, f) for f in message.DESCRIPTOR.fields}
    recipe_json = values.pop("recipe_json", "")
    return values | {"recipe": _json_in(recipe_json)} if with_recipe else values


def _json_in(text: Any) -> Any:
    """Return the value of JSON text, None when it is empty; what is no JSON stays as it is."""
    try:
        return read_json(text) if text else None
    except JsonError:
        return text


def _field_value(message: Message, descriptor: Any) -> Any:
    value = getattr(message, descriptor.name)
    kind = descriptor.message_type
    if kind is not None and kind.GetOptions().map_entry:
        is_text = kind.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING
        return {str(key): _json_in(value[key]) if is_text else value[key] for key in sorted(value)}
    if descriptor.is_repeated:
        return [_scalar(item, descriptor) for item in value]
    return _scalar(value, descriptor)


def _scalar(value: Any, descriptor: Any) -> Any:
    if descriptor.message_type is not None:
        return to_jsonable(value)
    if descriptor.enum_type is not None:
        known = descriptor.enum_type.values_by_number.get(value)
        return known.name if known else value  # a newer daemon knows more of them
    return value.hex() if isinstance(value, bytes) else value
