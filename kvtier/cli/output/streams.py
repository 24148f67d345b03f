"""The streams of the CLI: answers go to stdout, warnings to stderr, JSON on request.

A line may quote text from outside, so every line is escaped here (`kvtier.printable`), and rich interprets no markup.
Each line is one argument: a line break within an argument comes from outside and is escaped too.

When the reader of a pipe ends (`kvtier unpin --all | head -1`), what is written is dropped, and the command goes on to
its end: half of what it was to do would be worse. Only `stream`, of which there is no end, raises.
"""

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from kvtier.cli.output.grid import Grid, Part, text_of
from kvtier.library.values.plain_json import to_jsonable as to_jsonable
from kvtier.printable import printable, printable_json


class PipedConsole(Console):
    """A console that drops what it writes once no one reads it.

    Attributes:
        is_broken: The reader has ended.
    """

    is_broken = False

    def on_broken_pipe(self) -> None:
        """Be quiet from now on; rich's own ends the process here, in the middle of what the command does."""
        self.is_broken = self.quiet = True
        discard(self.file)


def discard(file: Any) -> None:
    """Lead a stream to /dev/null, and with it what is left in its buffer, which Python would write at its exit."""
    with suppress(OSError, ValueError):  # it is no file of the operating system
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, file.fileno())
        finally:
            os.close(null)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The two streams of one command; with `json` the answer is one JSON value on stdout, and lines go to stderr."""

    json: bool = False
    _out: PipedConsole = field(default_factory=lambda: _console(stderr=False))
    _err: PipedConsole = field(default_factory=lambda: _console(stderr=True))

    @property
    def console(self) -> PipedConsole:
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

    def write_file(self, text: str) -> None:
        """Write text that is the answer itself, and may go into a file: as it is."""
        print(text, end="", flush=True)

    def answer(self, value: Any, *parts: Part) -> None:
        """Write the answer: `value`, which may be a value of the library, as JSON; or the parts for people."""
        self._answer(value, parts, indent=2)

    def stream(self, value: Any, *parts: Part) -> None:
        """Write one of many answers: the value is one line of JSON.

        Raises:
            BrokenPipeError: No one reads them.
        """
        self._answer(value, parts, indent=None)
        if self._out.is_broken:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def _answer(self, value: Any, parts: Sequence[Part], indent: int | None) -> None:
        if not self.json:
            self.say(*parts)
            return
        value = to_jsonable(value)
        text = printable_json(value, indent=indent)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = printable_json(value, indent=indent, ascii_only=True)
        try:
            print(text, flush=True)  # flush now, so that a full disk is reported like other errors
        except BrokenPipeError:
            self._out.on_broken_pipe()


def _console(*, stderr: bool) -> PipedConsole:
    console = PipedConsole(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # In a pipe rich would fold a table, with its names, to 80 columns.
        console.width = 160
    return console


def _write(console: PipedConsole, part: Text | Grid) -> None:
    try:
        # In a pipe a line stays one line, so that grep and copied commands work; on a terminal words are wrapped.
        console.print(part, soft_wrap=isinstance(part, Text) and not console.is_terminal)
    except BrokenPipeError:  # of a rich that does not ask the console
        console.on_broken_pipe()
