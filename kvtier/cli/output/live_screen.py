"""Draws frames of a live view: one in the place of the other on a terminal, one after the other in a pipe."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live

from kvtier.cli.output.grid import Grid, Part, text_of
from kvtier.cli.output.streams import Output


@contextmanager
def live_screen(output: Output) -> Iterator[Callable[[Iterable[Part]], None]]:
    """Yield what draws a frame; the terminal is as before afterwards."""
    if not output.console.is_terminal:
        yield lambda parts: output.stream(None, *parts, "")
        return
    with Live(console=output.console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:

        def draw(parts: Iterable[Part]) -> None:
            shown = [part if isinstance(part, Grid) else text_of(part) for part in parts]
            live.update(Group(*shown), refresh=True)

        yield draw
