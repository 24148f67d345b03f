"""Progress bars on a terminal, for captured chunks (plain lines in a pipe) and for the bytes of a bundle."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from kvtier.cli.output.prompt_summary import Summary
from kvtier.cli.output.streams import Output

_LINE_INTERVAL_S = 5.0


class CaptureProgress:
    """Shows how many of all chunks are durable; a context manager."""

    def __init__(self, output: Output) -> None:
        """Draw on the output's console."""
        self._output = output
        self._bar = _bar(output) if output.console.is_terminal else None
        self._task = self._bar.add_task("vLLM computes; chunks on disk", total=None) if self._bar else None
        self._last: Summary | None = None
        self._last_line_s = float("-inf")

    def __enter__(self) -> Self:
        """Start to draw."""
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, and leave the last state on the screen."""
        if self._bar:
            self._bar.stop()

    def update(self, numbers: Summary) -> None:
        """Show the newest numbers."""
        if self._bar and self._task is not None:
            self._bar.update(
                self._task,
                total=numbers.num_chunks or None,
                completed=numbers.num_durable_chunks,
            )
        elif numbers != self._last and self._line_due(numbers):
            self._output.say(
                f"chunks: {numbers.num_host_chunks} in host memory, {numbers.num_durable_chunks} on disk, "
                f"of {numbers.num_chunks}"
            )
        self._last = numbers

    def _line_due(self, numbers: Summary) -> bool:
        now_s = time.monotonic()
        if not numbers.num_chunks or (now_s - self._last_line_s < _LINE_INTERVAL_S and not numbers.complete):
            return False
        self._last_line_s = now_s
        return True


def _bar(output: Output) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=output.console,
    )


class ByteBar:
    """Yields pieces unchanged, and shows the number of bytes."""

    def __init__(self, bar: Progress | None, total: int) -> None:
        """Start at 0 of `total` bytes (0: not known); without a bar show nothing."""
        self._bar = bar
        self._task = bar.add_task("bytes", total=total or None) if bar else None

    def __call__(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the pieces."""
        for data in pieces:
            yield data
            if self._bar and self._task is not None:
                self._bar.advance(self._task, len(data))


@contextmanager
def byte_progress(output: Output, total: int) -> Iterator[ByteBar]:
    """Show a bar on a terminal, and nothing in a pipe."""
    if not output.console.is_terminal:
        yield ByteBar(None, total)
        return
    columns = (BarColumn(bar_width=30), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, console=output.console) as bar:
        yield ByteBar(bar, total)
