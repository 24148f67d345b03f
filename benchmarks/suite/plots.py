"""Charts of a run: time to first token per length, the slow tail under load, and what grows with what."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring.charts.bar_chart import Bar, draw_chart
from benchmarks.measuring.samples import Records, Row
from benchmarks.measuring.tables import chosen, distinct, percentile, sources, values
from benchmarks.suite.load import KILLED
from benchmarks.suite.matrix import Condition
from benchmarks.suite.reports.load_tables import answered_turns

COLORS = {
    "vLLM alone": "#a3adbd",
    "kvtier": "#34d399",
    "LMCache fs": "#f97352",
    "vLLM fs tier": "#60a5fa",
    "vLLM alone, all fits": "#e5e7eb",
}
OTHER_COLOR = "#c084fc"
PINS_COLOR, CHUNKS_COLOR, SESSIONS_COLOR = "#34d399", "#60a5fa", "#f97352"


def draw_plots(records: Records, folder: Path) -> None:
    """Draw what there are samples for."""
    samples = list(records.rows("ttft"))
    footer = [records.setup["hardware"], records.setup["versions"]]
    for matrix in distinct(samples, "matrix"):
        for tokens in distinct(chosen(samples, matrix=matrix), "tokens"):
            few = chosen(samples, matrix=matrix, tokens=tokens)
            title = f"Time to first token, {tokens:,} tokens, model {matrix}"
            path = folder / f"ttft-{matrix}-{tokens}.png"
            draw_chart(title, _subtitle(few), _ttft_bars(few), footer, path)
    if bars := _load_bars(list(records.rows("load"))):
        title = "Time to first token under load: the slowest twentieth begins at"
        draw_chart(
            title,
            "Shorter is better. Equal traffic, more system prompts than the pool can hold.",
            bars,
            footer,
            folder / "load.png",
        )
    if bars := _start_bars(records):
        title, subtitle = "From the daemon's start to its first answer", "Shorter is better. Medians."
        draw_chart(title, subtitle, bars, footer, folder / "growth-start.png")
    if bars := _call_bars(records):
        title, subtitle = "What engines wait for, by what the daemon holds", "Shorter is better. Medians, without vLLM."
        draw_chart(title, subtitle, bars, footer, folder / "growth-calls.png")


def _start_bars(records: Records) -> list[Bar]:
    pins = list(records.rows("pins"))
    bars = [
        _median_bar(f"pins: {count:,}", "and their chunks", values(chosen(pins, num_pins=count), "ready_s"), PINS_COLOR)
        for count in distinct(pins, "num_pins")
    ]
    return bars + [
        _median_bar(f"chunks: {row['num_chunks']:,}", "on disk", row["ready_s"], CHUNKS_COLOR)
        for row in records.rows("chunks")
    ]


def _call_bars(records: Records) -> list[Bar]:
    pins = list(records.rows("pins"))
    bars = [
        _median_bar(
            "attach and know all pins", f"pins: {count:,}", values(chosen(pins, num_pins=count), "attach_s"), PINS_COLOR
        )
        for count in distinct(pins, "num_pins")
    ]
    bars += [
        _median_bar("one Acquire", f"engines at once: {row['num_sessions']}", row["acquire_s"], SESSIONS_COLOR)
        for row in records.rows("sessions")
    ]
    return bars + [
        _median_bar("Acquire of 2,000", f"chunks held: {row['num_chunks']:,}", row["round_trip_s"], CHUNKS_COLOR)
        for row in records.rows("chunks")
        if row["round_trip_s"]
    ]


def _median_bar(label: str, note: str, seconds: Sequence[float], color: str) -> Bar:
    return Bar(label=label, note=note, value_s=statistics.median(seconds), color=color)


def _subtitle(samples: Sequence[Row]) -> str:
    num = min(
        len(chosen(samples, system=system, condition=condition))
        for system in distinct(samples, "system")
        for condition in distinct(chosen(samples, system=system), "condition")
    )
    return f"Shorter is better. Medians of {num} or more; the share is of the first bar."


def _ttft_bars(samples: Sequence[Row]) -> list[Bar]:
    """Return a bar per condition and system, conditions together, so that what competes stands side by side."""
    return [
        _bar(condition.value, system, sources(some), statistics.median(values(some, "ttft_s")))
        for condition in Condition
        for system in distinct(samples, "system")
        if (some := chosen(samples, system=system, condition=condition.value))
    ]


def _load_bars(samples: Sequence[Row]) -> list[Bar]:
    bars = []
    for mode in distinct(samples, "mode"):
        for system in distinct(samples, "system"):
            waits = [turn["ttft_s"] for turn in answered_turns(chosen(samples, system=system, mode=mode))]
            if waits and mode != KILLED:
                bars.append(_bar(mode, system, f"{len(waits)} turns", percentile(waits, 95)))
    return bars


def _bar(label: str, system: str, detail: str, value_s: float) -> Bar:
    return Bar(label=label, note=f"{system}: {detail}", value_s=value_s, color=COLORS.get(system, OTHER_COLOR))
