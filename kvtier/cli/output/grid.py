"""Tables of the CLI. A cell is text, never markup, and is always escaped here."""

from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.printable import printable


@dataclass(frozen=True)
class Styled:
    """Lines in a style of rich.

    Attributes:
        text: One line, or several.
        style: Name of the style; empty: that of the column.
    """

    text: str | tuple[str, ...]
    style: str = ""


Cell = str | tuple[str, ...] | Styled


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column.

    Attributes:
        title: Its header.
        right: Align to the right, as numbers are.
        wraps: Break long words into several lines; such columns shrink first.
        style: Of its cells.
        max_width: In characters; None: no limit.
    """

    title: str = ""
    right: bool = False
    wraps: bool = False
    style: str = ""
    max_width: int | None = None


class Grid:
    """A table without lines."""

    def __init__(self, *columns: Column, gap: int = 1) -> None:
        """Make an empty table; it has a header if a column has a title."""
        has_header = any(column.title for column in columns)
        self._table = Table(
            box=None, show_header=has_header, padding=(0, gap, 0, 0), header_style="bold", pad_edge=False
        )
        for column in columns:
            self._table.add_column(
                text_of(column.title),
                justify="right" if column.right else "left",
                overflow="fold",
                no_wrap=not column.wraps,
                style=column.style,
                max_width=column.max_width,
            )

    def row(self, *cells: Cell) -> None:
        """Add a row; a cell of several lines is a tuple."""
        self._table.add_row(*map(text_of, cells))

    def __rich__(self) -> RenderableType:
        """Return what rich draws."""
        return self._table


def text_of(cell: Cell) -> Text:
    """Return the cell's lines, each escaped."""
    styled = cell if isinstance(cell, Styled) else Styled(cell)
    lines = (styled.text,) if isinstance(styled.text, str) else styled.text
    return Text("\n".join(map(printable, lines)), style=styled.style)
