"""Every duration that the daemon measures, declared here and nowhere else. Seconds, as histograms."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Self

from kvtier.obs.declare import timed
from kvtier.obs.histogram import Histogram

LAG_PERIOD_S = 0.25
_DECISION_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_IO_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PROMISE_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)


@dataclass(slots=True)
class Timings:
    """The durations; observed on the loop thread only, except `fsync`, which the disk tier observes under a lock."""

    acquire: Histogram = timed(
        "acquire_seconds",
        "From the start of an Acquire on the event loop to its answer in the queue for the engine.",
        _DECISION_S,
    )
    first_chunk: Histogram = timed(
        "first_chunk_seconds",
        "From an Acquire that waits for the disk until the first of its chunks is readable.",
        _IO_S,
    )
    promotion: Histogram = timed(
        "promotion_seconds", "From an Acquire that waits for the disk until its last chunk is readable.", _IO_S
    )
    seal: Histogram = timed(
        "store_seal_seconds", "From an engine's report that chunks are written until every engine can read them.", _IO_S
    )
    pack_write: Histogram = timed(
        "pack_write_seconds",
        "Writing back a pack of chunks and recording it, including the reclaim of disk space for it.",
        _IO_S,
    )
    fsync: Histogram = timed("fsync_seconds", "One fsync of a pack or of the packs' directory.", _IO_S)
    ledger: Histogram = timed(
        "ledger_commit_seconds", "A call of the ledger, including its wait in the queue and its fsync.", _IO_S
    )
    durable: Histogram = timed(
        "pin_durable_seconds",
        "From a pin (or the loss of its durability, or a start of the daemon) until all chunks are on disk, to 10%.",
        _PROMISE_S,
    )
    loop_lag: Histogram = timed(
        "event_loop_lag_seconds", "Delay of the event loop behind schedule, sampled four times a second.", _DECISION_S
    )

    def copy(self) -> Self:
        """Return a copy that later observations do not change."""
        return type(self)(*(getattr(self, each.name).copy() for each in fields(self)))


async def watch_loop_lag(
    lag: Histogram,
    *,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Observe by how much each of many sleeps exceeds its length: how long a due request waits. Ends when cancelled."""
    while True:
        due_s = now_s() + LAG_PERIOD_S
        await sleep(LAG_PERIOD_S)
        lag.observe(max(0.0, now_s() - due_s))
