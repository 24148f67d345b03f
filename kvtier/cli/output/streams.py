"""The streams of the CLI: answers go to stdout, warnings to stderr, JSON on request.

A line may quote text from outside, so every line is escaped here (`kvtier.printable`), and rich interprets no markup.
Each line is one argument: a line break within an argument comes from outside and is escaped too.
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
from kvtier.cli.output.grid import Grid, Part, text_of
from kvtier.printable import printable, printable_json


@dataclass(frozen=True, kw_only=True)
class Output:
    """The two streams of one command; with `json` the answer is one JSON value on stdout, and lines go to stderr."""

    json: bool = False
    _out: Console = field(default_factory=lambda: _console(stderr=False))
    _err: Console = field(default_factory=lambda: _console(stderr=True))

    @property
    def console(self) -> Console:
        """Console for lines and progress."""
        return self._err if self.json else self._out

    def say(self, *parts: Part) -> None:
        for part in parts:
            _write(self.console, part if isinstance(part, Grid) else text_of(part))

    def warn(self, text: str) -> None:
        _write(self._err, Text.assemble(("warning: ", "yellow"), printable(text)))

    def fail(self, text: str) -> None:
        _write(self._err, Text.assemble(("error: ", "bold red"), printable(text)))

    def working(self, text: str) -> AbstractContextManager[object]:
        """Show a spinner with this text, on a terminal only."""
        return self._err.status(Text(printable(text))) if self._err.is_terminal else nullcontext()

    def answer(self, value: Any, *parts: Part) -> None:
        """Write the answer: `value`, which may be a protobuf message, as JSON; or the parts for people."""
        if not self.json:
            self.say(*parts)
            return
        value = to_jsonable(value) if isinstance(value, Message) else value
        text = printable_json(value, indent=2)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = printable_json(value, indent=2, ascii_only=True)
        print(text, flush=True)  # flush now, so that a full disk is reported like other errors


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # In a pipe rich would fold a table, with its names, to 80 columns.
        console.width = 160
    return console


def _write(console: Console, part: Text | Grid) -> None:
    # In a pipe a line stays one line, so that grep and copied commands work; on a terminal words are wrapped.
    console.print(part, soft_wrap=isinstance(part, Text) and not console.is_terminal)


def to_jsonable(message: Message, *, with_recipe: bool = False) -> dict[str, Any]:
    """Return a protobuf message as plain JSON values, every field present.

    protobuf's JSON form writes 64-bit numbers as strings, which shell scripts do not expect. A field with JSON text
    becomes values too; the `recipe` of a prompt, which has its whole text, only `with_recipe`.
    """
    values: dict[str, Any] = {}
    for declared in message.DESCRIPTOR.fields:
        value, kind = getattr(message, declared.name), declared.message_type
        if kind is not None and kind.GetOptions().map_entry:
            is_text = kind.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING
            values[declared.name] = {str(key): _json_in(value[key]) if is_text else value[key] for key in sorted(value)}
        elif declared.is_repeated:
            values[declared.name] = [_scalar(item, declared) for item in value]
        else:
            values[declared.name] = _scalar(value, declared)
    recipe_json = values.pop("recipe_json", "")
    return values | {"recipe": _json_in(recipe_json)} if with_recipe else values


def _json_in(text: Any) -> Any:
    """Return the value of JSON text, None when it is empty; other text stays unchanged."""
    try:
        return read_json(text) if text else None
    except JsonError:
        return text


def _scalar(value: Any, descriptor: Any) -> Any:
    if descriptor.message_type is not None:
        return to_jsonable(value)
    if descriptor.enum_type is not None:
        known = descriptor.enum_type.values_by_number.get(value)
        return known.name if known else value  # a newer daemon may send a value that this CLI does not know
    return value.hex() if isinstance(value, bytes) else value
