"""Tables of the CLI. A cell is text, never markup, and is always escaped here."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from rich import table
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

from kvtier.printable import printable


@dataclass(frozen=True)
class Styled:
    """One line or several in a style of rich; an empty style is that of the column."""

    text: str | tuple[str, ...]
    style: str = ""


@dataclass(frozen=True)
class Bar:
    """A bar: the pinned part, what else is used, and what is free. Shares are 0 to 1; `width` is in columns."""

    used: float
    pinned: float
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        pinned, other, free = tuple(BAR_CHARACTERS[options.ascii_only])
        # Rounded up: a little is not nothing.
        num_used = ceil(self.width * min(1.0, max(0.0, self.used)))
        num_pinned = min(num_used, ceil(self.width * min(1.0, max(0.0, self.pinned))))
        parts = (pinned * num_pinned, "green"), (other * (num_used - num_pinned), "cyan")
        yield Text.assemble(*parts, (free * (self.width - num_used), "dim"), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)


BAR_CHARACTERS = {False: "█▒░", True: "#=."}
"""Pinned, other and free; of a terminal that has ASCII only, too."""
Cell = str | tuple[str, ...] | Styled | Bar


def column(
    title: str = "", *, right: bool = False, wraps: bool = False, style: str = "", max_width: int | None = None
) -> table.Column:
    """Return a column of a `Grid`: numbers go to the `right`; one that `wraps` breaks long words, and shrinks first."""
    return table.Column(
        text_of(title),
        justify="right" if right else "left",
        overflow="fold",
        no_wrap=not wraps,
        style=style,
        max_width=max_width,
    )


class Grid(table.Table):
    """A table without lines; it has a header if a column has a title."""

    def __init__(self, *columns: table.Column, gap: int = 1) -> None:
        has_header = any(each.header for each in columns)
        super().__init__(
            *columns, box=None, show_header=has_header, padding=(0, gap, 0, 0), header_style="bold", pad_edge=False
        )

    def row(self, *cells: Cell) -> None:
        """Add a row; a cell of several lines is a tuple."""
        self.add_row(*(cell if isinstance(cell, Bar) else text_of(cell) for cell in cells))


Part = Grid | Styled | str
"""What people read: a table, or a line."""


def text_of(cell: str | tuple[str, ...] | Styled) -> Text:
    """Return the cell's lines, each escaped."""
    styled = cell if isinstance(cell, Styled) else Styled(cell)
    lines = (styled.text,) if isinstance(styled.text, str) else styled.text
    return Text("\n".join(map(printable, lines)), style=styled.style)
