"""The tables of `daemon_growth`: costs by the number of pins, sessions and chunks, and CPU per GiB."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from benchmarks.growth import HEADER, GrowthSamples
from benchmarks.measuring.machine import spread
from benchmarks.measuring.samples import Records, Row
from benchmarks.measuring.tables import chosen, distinct, milliseconds, percentile, table, values

MIB = 2**20
MOVED = ("after", "CPU s per GiB", "resident MiB", "allocated MiB", "shared memory MiB")
PINS = ("pins", "exec to ready s", "resident MiB", "an engine knows all, ms", "Pin ms", "ListPrompts ms")
SESSIONS = ("sessions", "acquires/s, all", "acquire ms p50", "p99", "daemon CPU us per acquire")


def service_tables(records: Records) -> Iterator[str]:
    """Yield headings and tables."""
    yield from _titled("The daemon's CPU for bytes, and its memory", MOVED, map(_moved_row, records.rows("moved")))
    pins = list(records.rows("pins"))
    by_count = (_pins_row(chosen(pins, num_pins=count)) for count in distinct(pins, "num_pins"))
    yield from _titled("More pins", PINS, by_count)
    yield from _titled("More sessions", SESSIONS, map(_sessions_row, records.rows("sessions")))
    yield from _titled("More chunks", HEADER, (_chunks(row).cells() for row in records.rows("chunks")))


def _titled(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    if text := table(header, rows):
        yield f"## {title}"
        yield text


def _moved_row(row: Row) -> tuple[str, ...]:
    per_gib = "" if row["step"] == "start" else f"{row['daemon_cpu_s'] * 1024 / row['mib']:.2f}"
    memory = (f"{row[key] / MIB:.0f}" for key in ("resident", "anonymous", "shared_memory"))
    return (row["step"], per_gib, *memory)


def _pins_row(rows: Sequence[Row]) -> tuple[str, ...]:
    return (
        f"{rows[0]['num_pins']:,}",
        spread(values(rows, "ready_s")),
        spread([each / MIB for each in values(rows, "resident")], digits=0),
        milliseconds(values(rows, "attach_s")),
        milliseconds([each for row in rows for each in row["pin_s"]]),
        milliseconds(values(rows, "list_s")),
    )


def _sessions_row(row: Row) -> tuple[str, ...]:
    seconds = row["acquire_s"]
    return (
        str(row["num_sessions"]),
        f"{len(seconds) / row['wall_s']:.0f}",
        f"{1e3 * statistics.median(seconds):.2f}",
        f"{1e3 * percentile(seconds, 99):.2f}",
        f"{1e6 * row['daemon_cpu_s'] / len(seconds):.0f}",
    )


def _chunks(row: Row) -> GrowthSamples:
    return GrowthSamples(**{field.name: row[field.name] for field in fields(GrowthSamples)})
