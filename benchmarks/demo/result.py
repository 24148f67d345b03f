"""What the demo found, as a table and as a chart."""

from pathlib import Path

from rich.table import Table

from benchmarks.demo.story import Demo
from benchmarks.measuring.bar_chart import Bar, draw_chart
from benchmarks.measuring.chat_requests import Answer
from benchmarks.measuring.machine import hardware, versions

CHART_PATH = Path(__file__).resolve().parents[2] / ".demo" / "demo.png"
SOURCES = {
    "computed": ("computed", "#f97352"),
    "device": ("vLLM's prefix cache", "#a3adbd"),
    "host": ("kvtier, host memory", "#34d399"),
    "disk": ("kvtier, disk", "#60a5fa"),
}
"""Where a prompt's tokens came from, by vLLM's name for it: in words, and its colour in the chart."""
COLD = "cold: a prompt that is not pinned"


def table(demo: Demo) -> Table:
    """Return a row for each case, cold first."""
    cold_s = demo.cold_ttft_s()
    table = Table(
        title=f"\nA pinned system prompt of about {demo.pinned_tokens()} tokens, each time with a new question"
    )
    table.add_column("case")
    for column in ("cached tokens", "TTFT", "of cold"):
        table.add_column(column, justify="right")
    table.add_column("served by")
    rows = [(f"{COLD} ({_cold_spread(demo)})", demo.cold[0], cold_s)]
    for name, answer, ttft_s in [*rows, *((case.name, case.answer, case.answer.ttft_s) for case in demo.cases)]:
        cached = f"{answer.cached_tokens} of {answer.prompt_tokens}"
        table.add_row(name, cached, f"{ttft_s:.2f} s", f"{100 * ttft_s / cold_s:.0f} %", _source(answer)[0])
    return table


def draw(demo: Demo, model: str, dtype: str) -> None:
    """Draw the same at CHART_PATH."""
    note, color = _source(demo.cold[0])
    bars = [Bar(label=COLD, note=f"{note}; {_cold_spread(demo)}", value_s=demo.cold_ttft_s(), color=color)]
    for case in demo.cases:
        note, color = _source(case.answer)
        bars.append(Bar(label=case.name, note=note, value_s=case.answer.ttft_s, color=color))
    draw_chart(
        f"Time to first token, with a system prompt of {demo.pinned_tokens():,} tokens",
        "Shorter is better. Every question is new, so only the system prompt can come from a cache.",
        bars,
        [f"{hardware()}; model {model}, {dtype}", versions()],
        CHART_PATH,
    )


def _source(answer: Answer) -> tuple[str, str]:
    return SOURCES.get(answer.served_by, (answer.served_by, "#e5e7eb"))


def _cold_spread(demo: Demo) -> str:
    times_s = [answer.ttft_s for answer in demo.cold]
    return f"median of {len(times_s)}, {min(times_s):.2f}-{max(times_s):.2f} s"
