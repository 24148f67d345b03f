"""The report of a run, in Markdown, from the records alone."""

from collections.abc import Sequence

from benchmarks.measuring.samples import Records
from benchmarks.suite.reports.growth_tables import service_tables
from benchmarks.suite.reports.load_tables import load_tables
from benchmarks.suite.reports.matrix_tables import matrix_tables
from benchmarks.suite.reports.summary import summary


def report(records: Records, not_measured: Sequence[str] = ()) -> str:
    """Return all tables, and what is missing in them.

    Args:
        records: What was measured.
        not_measured: Cases that the time limit left out.
    """
    setup = records.setup
    parts = [
        f"# Results, profile {setup['profile']}",
        f"{setup['hardware']}, {setup['versions']}; {setup['dtype']}. Cells: median (min..max).",
        *summary(records),
        *matrix_tables(records),
        *load_tables(records),
        *service_tables(records),
    ]
    if failures := records.failures():
        parts += ["## Failed", "\n".join(f"- {case}: {reason}" for case, reason in failures.items())]
    if not_measured:
        parts += ["## Not measured: out of time", "\n".join(f"- {case}" for case in not_measured)]
    seconds = sum(float(row["seconds"]) for row in records.rows("took"))
    return "\n\n".join(part for part in [*parts, f"{seconds / 60:.1f} minutes of measuring."] if part)
