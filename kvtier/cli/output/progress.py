"""Progress bars on a terminal, for captured chunks (plain lines in a pipe) and for the bytes of a bundle."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from kvtier.cli.output.streams import Output
from kvtier.library.progress_events import Progress as Event
from kvtier.library.progress_events import Transferred
from kvtier.library.values.prompt_summary import Summary, summarize
from kvtier.library.values.public_values import Prompt

_BAR = BarColumn(bar_width=30)


@contextmanager
def _drawn(output: Output, *columns: ProgressColumn) -> Iterator[Progress]:
    """Yield a bar that is drawn on a terminal only."""
    bar = Progress(*columns, console=output.console, disable=not output.console.is_terminal)
    with nullcontext() if bar.disable else bar:  # older versions of rich print a blank line for a disabled one
        yield bar


@contextmanager
def capture_progress(output: Output) -> Iterator[Callable[[Prompt], None]]:
    """Show how many of all chunks are durable, by each status that the yielded function gets."""
    columns = (TextColumn("{task.description}", markup=False), _BAR, MofNCompleteColumn(), TimeElapsedColumn())
    last: Summary | None = None
    last_line_s = float("-inf")
    with _drawn(output, *columns) as bar:
        task = bar.add_task("vLLM computes; chunks on disk", total=None)

        def update(status: Prompt) -> None:
            nonlocal last, last_line_s
            numbers = summarize(status)
            bar.update(task, total=numbers.num_chunks or None, completed=numbers.num_durable_chunks)
            is_due = numbers.complete or time.monotonic() - last_line_s >= 5.0
            if bar.disable and numbers.num_chunks and numbers != last and is_due:
                last_line_s = time.monotonic()
                output.say(
                    f"chunks: {numbers.num_host_chunks} in host memory, {numbers.num_durable_chunks} on disk, "
                    f"of {numbers.num_chunks}"
                )
            last = numbers

        yield update


@contextmanager
def byte_progress(output: Output, total: int) -> Iterator[Callable[[Event], None]]:
    """Show on a terminal how many of `total` bytes (0: not known) the events of the yielded function name."""
    columns = (_BAR, DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeElapsedColumn())
    with _drawn(output, *columns) as bar:
        task = bar.add_task("bytes", total=total or None)

        def update(event: Event) -> None:
            if isinstance(event, Transferred):
                bar.advance(task, event.num_bytes)

        yield update
