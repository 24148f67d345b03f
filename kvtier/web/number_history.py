"""An hour of the daemon's numbers by seconds, and a week by minutes: for charts where no Prometheus is.

In memory only: two megabytes, taken at the first sample. A restart begins again.
"""

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.errors import InvalidArgumentError
from kvtier.obs.counters import Counters
from kvtier.obs.exposition import Read, Reading
from kvtier.obs.gauges import Gauges
from kvtier.obs.timings import Timings
from kvtier.web.call_threads import CallThreads

Numbers = npt.NDArray[np.float64]
Span = Literal["hour", "week"]

SECONDS_KEPT, MINUTES_KEPT = 3600, 7 * 24 * 60
MAX_POINTS = 1000

GAUGES = (
    "host_used_bytes", "host_pinned_bytes", "disk_used_bytes", "disk_pinned_bytes", "sessions_attached",
    "leased_chunks", "promotion_queue_chunks", "prompts", "pins_durable", "pins_waiting", "pins_capturing",
)  # fmt: skip
"""As they were."""
RATES = (
    "requests_hit", "prompt_tokens_device", "prompt_tokens_host", "prompt_tokens_disk", "prompt_tokens_computed",
    "saved_prefill_seconds", "acquires", "hit_chunks_host", "hit_chunks_disk", "missed_chunks_absent",
    "stored_bytes", "promoted_bytes", "written_back_bytes",
)  # fmt: skip
"""Counters, as growth a second."""
MEANS = ("acquire", "promotion", "pack_write", "loop_lag")
"""Durations, as mean seconds of what was observed; null where nothing was."""
ALL_REQUESTS = "requests"
"""Sum of all outcomes; a rate."""

_OUTCOMES = tuple(f"requests_{outcome.value}" for outcome in RequestOutcome)
SERIES = (*GAUGES, ALL_REQUESTS, *RATES, *(f"{name}_mean_s" for name in MEANS))
_NUM_COLUMNS = len(GAUGES) + 1 + len(RATES) + 2 * len(MEANS)


class _Ring:
    """The last rows of numbers, each with its time of day and its monotonic time in the first columns."""

    def __init__(self, num_rows: int) -> None:
        self._rows: Numbers = np.zeros((num_rows, 2 + _NUM_COLUMNS))
        self._num_added = 0

    def add(self, row: Sequence[float]) -> None:
        self._rows[self._num_added % len(self._rows)] = row
        self._num_added += 1

    def rows(self) -> Numbers:
        """Return a copy, the oldest row first: (num_rows, 2 + num_columns) float64."""
        if self._num_added <= len(self._rows):
            return self._rows[: self._num_added].copy()
        return np.roll(self._rows, -(self._num_added % len(self._rows)), axis=0)


@dataclass(frozen=True, kw_only=True)
class History:
    """Numbers over time.

    Attributes:
        unix_s: The end of each point's time.
        series: Of each name a number for each point; None where there is none.
    """

    span: str
    unix_s: tuple[float, ...]
    series: dict[str, list[float | None]]


class NumberHistory:
    """Both rings. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects all below
        self._rings: dict[Span, _Ring] = {"hour": _Ring(SECONDS_KEPT), "week": _Ring(MINUTES_KEPT)}
        self._minute = -1

    def add(self, reading: Reading, unix_s: float, now_s: float | None = None) -> None:
        """Keep a reading; of each minute the first.

        `now_s`: of a clock that no one sets, in seconds, by which rates are; None: `unix_s` is of such a one.
        """
        row = [unix_s, unix_s if now_s is None else now_s, *_numbers_of(reading)]
        with self._lock:
            self._rings["hour"].add(row)
            if (minute := int(unix_s // 60)) != self._minute:
                self._minute = minute
                self._rings["week"].add(row)

    def over(self, span: Span, names: Sequence[str] = (), max_points: int = 360) -> History:
        """Return series (these; none: all) of at most this many points.

        Raises:
            InvalidArgumentError: There is no series of a name.
        """
        for name in names:
            if name not in SERIES:
                raise InvalidArgumentError("name", name, f"use some of {', '.join(SERIES)}")
        with self._lock:
            rows = self._rings[span].rows()
        if len(rows) < 2:
            return History(span=span, unix_s=(), series={name: [] for name in names or SERIES})
        edges = np.unique(np.linspace(0, len(rows) - 1, max_points + 1).astype(int))
        chosen = rows[edges]
        series = _series_of(chosen)
        shown = {name: [_number(value) for value in series[name]] for name in names or SERIES}
        return History(span=span, unix_s=tuple(chosen[1:, 0].tolist()), series=shown)


async def sample(history: NumberHistory, read: Read, threads: CallThreads) -> None:
    """Add a reading each second, for ever. A second in which the daemon's loop does not answer is left out."""
    while True:
        began_s = time.monotonic()
        with suppress(TimeoutError):
            history.add(await threads.run(read), time.time(), time.monotonic())
        await asyncio.sleep(max(0.05, 1.0 - (time.monotonic() - began_s)))


def _numbers_of(reading: Reading) -> list[float]:
    found: dict[type[Any], Any] = {type(record): record for record in reading}
    gauges, counters, timings = (found.get(kind) or kind() for kind in (Gauges, Counters, Timings))
    durations = [getattr(timings, name) for name in MEANS]
    return [
        *(float(getattr(gauges, name)) for name in GAUGES),
        float(sum(getattr(counters, name) for name in _OUTCOMES)),
        *(float(getattr(counters, name)) for name in RATES),
        *(each.total for each in durations),
        *(float(each.count) for each in durations),
    ]


def _series_of(rows: Numbers) -> dict[str, Numbers]:
    """Return each series: of gauges the values at the ends, of counters the growth between the rows."""
    grown = np.diff(rows, axis=0)
    seconds = np.maximum(grown[:, 1:2], 1e-3)
    first_rate, first_total = 2 + len(GAUGES), 3 + len(GAUGES) + len(RATES)
    first_count = first_total + len(MEANS)
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = [
            rows[1:, 2:first_rate],
            grown[:, first_rate:first_total] / seconds,
            grown[:, first_total:first_count] / grown[:, first_count:],
        ]
    return dict(zip(SERIES, np.hstack(columns).T, strict=True))


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
