"""What `kvtier top` shows at one moment: tiers, engines, pins, and what engines asked for."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.cli.output.durations import format_age, format_duration
from kvtier.cli.output.grid import Bar, Grid, Part, Styled, column
from kvtier.cli.output.prompt_states import state_name
from kvtier.cli.output.tables import quarantine_lines, sessions_table
from kvtier.config.units import format_size
from kvtier.library.values.prompt_summary import summarize
from kvtier.library.values.public_values import DaemonStatus, Prompt, Tier

_TEXT_COLUMNS = 52
"""That the words beside a bar take."""
_MISSED = "missed_chunks_"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What the daemon said at one time.

    Attributes:
        at_s: Monotonic seconds.
    """

    at_s: float
    status: DaemonStatus
    prompts: Sequence[Prompt]


@dataclass(frozen=True, kw_only=True)
class PromptUsage:
    """How a prompt was used, as far as the daemon says so."""

    num_hits: int
    last_used_unix_s: float


def usage_of(prompt: Prompt) -> PromptUsage:
    """Return how a prompt was used."""
    return PromptUsage(num_hits=prompt.usage.num_hits, last_used_unix_s=prompt.usage.last_used_unix_s)


def top_frame(now: Moment, before: Moment | None, width: int, height: int | None = None) -> Iterator[Part]:
    """Yield a frame.

    Args:
        now: What to show.
        before: Rates are since then; None: there are none yet.
        width: Columns.
        height: Rows of the screen; None: no limit.
    """
    head = list(_head(now.status, width))
    events = list(_events(now, before))
    num_rows = max(3, height - _rows(head, events) - 6) if height else len(now.prompts)
    yield from head
    yield from ("", *_pins(now.prompts, num_rows))
    yield from ("", *events)


def _rows(*blocks: Sequence[Part]) -> int:
    return sum(part.row_count + 1 if isinstance(part, Grid) else 1 for block in blocks for part in block)


def _head(status: DaemonStatus, width: int) -> Iterator[Part]:
    uptime = format_duration(time.time() - status.started_unix_s)
    yield Styled(f"kvtier {status.version}, pid {status.pid}, up {uptime}", "bold")
    table = Grid(column(), column(), column(wraps=True), gap=2)
    for name, tier in (("host", status.host), ("disk", status.disk)):
        table.row(name, _bar(tier, max(10, min(60, width - _TEXT_COLUMNS))), _used(tier))
    yield table
    yield from quarantine_lines(status.namespaces)
    yield ""
    yield sessions_table(status.sessions) if status.sessions else "No engine is attached."


def _bar(tier: Tier, width: int) -> Bar:
    limit = max(1, tier.limit_bytes)
    return Bar(used=tier.used_bytes / limit, pinned=tier.pinned_bytes / limit, width=width)


def _used(tier: Tier) -> str | Styled:
    if tier.breaker_open_reason:
        return Styled(f"SWITCHED OFF: {tier.breaker_open_reason}", "bold red")
    used = f"{format_size(tier.used_bytes)} of {format_size(tier.limit_bytes)}"
    return f"{used}, {format_size(tier.pinned_bytes)} pinned"


def _pins(prompts: Sequence[Prompt], num_rows: int) -> Iterator[Part]:
    pinned = [prompt for prompt in prompts if prompt.pinned]
    states = ", ".join(f"{number} {state}" for state, number in Counter(map(state_name, pinned)).most_common())
    yield Styled(f"Pins: {len(pinned)}{f' ({states})' if states else ''}", "bold")
    if not pinned:
        return
    usages = {prompt.pin_id: usage_of(prompt) for prompt in pinned}
    # What was used last comes first, then the newest.
    order = [(usages[each.pin_id].last_used_unix_s, each.created_unix_s) for each in pinned]
    ranked = [pinned[index] for index in sorted(range(len(pinned)), key=order.__getitem__, reverse=True)]
    is_used = any(usage.num_hits for usage in usages.values())
    used_columns = [column("HITS", right=True), column("USED", right=True)] if is_used else []
    numbers = [column(title, right=True) for title in ("TOKENS", "HOST", "DISK", "BYTES", "AGE")]
    table = Grid(column("NAME", wraps=True), column("STATE"), *numbers, *used_columns)
    for prompt in ranked[:num_rows]:
        usage, sums = usages[prompt.pin_id], summarize(prompt)
        used = [str(usage.num_hits), format_age(usage.last_used_unix_s)] if is_used else []
        table.row(
            prompt.name,
            state_name(prompt),
            str(prompt.num_tokens or "-"),
            f"{sums.num_host_chunks}/{sums.num_chunks}",
            f"{sums.num_durable_chunks}/{sums.num_chunks}",
            format_size(sums.disk_bytes),
            format_age(prompt.created_unix_s),
            *used,
        )
    yield table
    if num_more := len(ranked) - len(ranked[:num_rows]):
        yield Styled(f"and {num_more} more", "dim")


def _events(now: Moment, before: Moment | None) -> Iterator[Part]:
    counters = now.status.counters
    rows = {"restored from host memory": "hit_chunks_host", "restored from disk": "hit_chunks_disk"}
    reasons = [name for name in sorted(counters) if name.startswith(_MISSED) and counters[name]]
    rows |= {f"missed: {_reason(name)}": name for name in reasons}
    rows["stored"] = "stored_chunks"
    rate_column = [column("A SECOND", right=True)] if before else []
    table = Grid(column("CHUNKS", wraps=True), column("SINCE START", right=True), *rate_column, gap=2)
    for title, name in rows.items():
        table.row(title, f"{counters.get(name, 0):,}", *([_rate(name, now, before)] if before else []))
    yield table


def _reason(counter: str) -> str:
    """Return why chunks were missed, in the words of the metric `kvtier_missed_chunks_total`."""
    return counter.removeprefix(_MISSED).replace("_", " ")


def _rate(name: str, now: Moment, before: Moment) -> str:
    seconds = now.at_s - before.at_s
    if before.status.started_unix_s != now.status.started_unix_s or seconds <= 0:
        return "-"
    change = now.status.counters.get(name, 0) - before.status.counters.get(name, 0)
    return f"{change / seconds:,.1f}"
