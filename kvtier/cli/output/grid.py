"""Tables of the CLI. A cell is text, never markup, and is always escaped here."""

from dataclasses import dataclass

from rich import table
from rich.text import Text

from kvtier.printable import printable


@dataclass(frozen=True)
class Styled:
    """One line or several in a style of rich; an empty style is that of the column."""

    text: str | tuple[str, ...]
    style: str = ""


Cell = str | tuple[str, ...] | Styled


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
        self.add_row(*map(text_of, cells))


Part = Grid | Styled | str
"""What people read: a table, or a line."""


def text_of(cell: Cell) -> Text:
    """Return the cell's lines, each escaped."""
    styled = cell if isinstance(cell, Styled) else Styled(cell)
    lines = (styled.text,) if isinstance(styled.text, str) else styled.text
    return Text("\n".join(map(printable, lines)), style=styled.style)
