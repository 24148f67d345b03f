"""What the demo found, as a table and as a chart."""

from pathlib import Path

from rich.table import Table

from benchmarks.demo.story import Story
from benchmarks.measuring.charts.bar_chart import Bar, draw_chart
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
COLD = "cold: a prompt without a pin"


def table(story: Story) -> Table:
    """Return a row for each case, cold first, then act by act."""
    cold_s = story.cold_ttft_s()
    table = Table(title=f"\nSystem prompts of about {_num_tokens(story)} tokens, each time with a new question")
    table.add_column("case")
    for column in ("cached tokens", "TTFT", "of cold"):
        table.add_column(column, justify="right")
    table.add_column("served by")

    def add_row(name: str, answer: Answer, ttft_s: float) -> None:
        cached = f"{answer.cached_tokens} of {answer.prompt_tokens}"
        table.add_row(name, cached, f"{ttft_s:.2f} s", f"{100 * ttft_s / cold_s:.0f} %", _source(answer)[0])

    add_row(f"{COLD} ({_cold_spread(story)})", story.cold[0], cold_s)
    for act in story.acts:
        table.add_section()
        table.add_row(act.title, style="bold")
        for case in act.cases:
            add_row(case.name, case.answer, case.answer.ttft_s)
    return table


def draw(story: Story, model: str, dtype: str, path: Path = CHART_PATH) -> None:
    """Draw the same."""
    note, color = _source(story.cold[0])
    bars = [Bar(label=COLD, note=f"{note}; {_cold_spread(story)}", value_s=story.cold_ttft_s(), color=color)]
    for act in story.acts:
        for number, case in enumerate(act.cases):
            note, color = _source(case.answer)
            heading = "" if number else act.title
            bars.append(Bar(label=case.name, note=note, value_s=case.answer.ttft_s, color=color, heading=heading))
    draw_chart(
        f"Time to first token, with system prompts of {_num_tokens(story):,} tokens",
        "Shorter is better. Every question is new, so only the system prompt can come from a cache.",
        bars,
        [f"{hardware()}; model {model}, {dtype}", versions()],
        path,
    )


def _num_tokens(story: Story) -> int:
    return story.acts[0].num_tokens


def _source(answer: Answer) -> tuple[str, str]:
    return SOURCES.get(answer.served_by, (answer.served_by, "#e5e7eb"))


def _cold_spread(story: Story) -> str:
    times_s = [answer.ttft_s for answer in story.cold]
    return f"median of {len(times_s)}, {min(times_s):.2f}-{max(times_s):.2f} s"
