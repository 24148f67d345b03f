"""Markdown tables, and how samples are put into their cells."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.measuring.machine import spread
from benchmarks.measuring.samples import Row


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; nothing when it has no rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *lines]) if lines else ""


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """Return the values of a field, each once, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def chosen(rows: Iterable[Row], **fields: object) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in fields.items())]


def values(rows: Iterable[Row], key: str) -> list[float]:
    """Return a field of all rows."""
    return [float(row[key]) for row in rows]


def sources(rows: Iterable[Row]) -> str:
    """Return where the prompts of answers came from, each way once."""
    return " / ".join(sorted({"+".join(row["by_source"]) or "computed" for row in rows}))


def milliseconds(seconds: Sequence[float]) -> str:
    """Return `median (min..max)` in milliseconds; empty for none."""
    return (
        spread([1e3 * each for each in seconds], digits=0 if statistics.median(seconds) > 0.05 else 1)
        if seconds
        else ""
    )


def percentile(samples: Sequence[float], percent: int) -> float:
    """Return the nearest-rank percentile, which is always one of the samples."""
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
