"""What every part of the service shares: the disk tier, the ledger on its thread, I/O pools, budget and counters."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvtier.config import DaemonConfig
from kvtier.core.eviction import EvictionClock
from kvtier.core.slots import HostBudget
from kvtier.errors import LedgerError, TierIOError
from kvtier.ledger import Ledger
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event
from kvtier.obs.timings import Timings
from kvtier.service.disk_health import DiskHealth
from kvtier.service.disk_usage import DiskUsage
from kvtier.service.pacing import Traffic
from kvtier.tiers.base import DiskTier

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_WRITERS = 2  # one namespace's pack does not wait for another's


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Shared by all namespaces; owned and closed by `Cache`.

    Attributes:
        config: The daemon's configuration.
        disk: The last tier.
        ledger: Called through `in_ledger` only.
        budget: Bytes of backed arena rows.
        disk_usage: Bytes of packs.
        counters: Events since the daemon started.
        timings: How long things took.
        disk_health: Whether the disk tier may be used at all.
        traffic: Promotions that requests wait for.
        holes: Set when a chunk lost its place in a pack: there may be something to compact.
        host_clock: Of the host tier's eviction, over all namespaces.
        disk_clock: Of the disk tier's.
    """

    config: DaemonConfig
    disk: DiskTier
    ledger: Ledger
    budget: HostBudget
    disk_usage: DiskUsage
    counters: Counters
    timings: Timings
    disk_health: DiskHealth
    traffic: Traffic
    holes: asyncio.Event
    ledger_thread: ThreadPoolExecutor
    io_threads: ThreadPoolExecutor
    read_threads: ThreadPoolExecutor
    write_threads: ThreadPoolExecutor
    background_thread: ThreadPoolExecutor
    host_clock: EvictionClock = field(default_factory=EvictionClock)
    disk_clock: EvictionClock = field(default_factory=EvictionClock)

    @property
    def stores_all(self) -> bool:
        """Every prompt chunk is kept, not only those of pinned prompts."""
        return self.config.cache.store == "all"

    @classmethod
    def create(
        cls,
        config: DaemonConfig,
        disk: DiskTier,
        ledger: Ledger,
        counters: Counters | None = None,
        timings: Timings | None = None,
    ) -> "Stores":
        """Make the pools: a call never queues behind one of another kind.

        One thread for the ledger, `disk.io_threads` for promotions, two for packs being written, one for compaction,
        scrub and probes, and `disk.io_threads` for the short rest (verifying stores, backing rows, unlinking).
        """
        counters, num_threads = counters or Counters(), config.disk.io_threads
        background = ThreadPoolExecutor(1, thread_name_prefix="kvtier-background")
        return cls(
            config=config,
            disk=disk,
            ledger=ledger,
            budget=HostBudget(config.host.host_bytes),
            disk_usage=DiskUsage(config.disk.disk_bytes),
            counters=counters,
            timings=timings or Timings(),
            disk_health=DiskHealth(lambda: _in_pool(background, disk.probe), counters),
            traffic=Traffic(),
            holes=asyncio.Event(),
            ledger_thread=ThreadPoolExecutor(1, thread_name_prefix="kvtier-ledger"),
            io_threads=ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-io"),
            read_threads=ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-read"),
            write_threads=ThreadPoolExecutor(_WRITERS, thread_name_prefix="kvtier-write"),
            background_thread=background,
        )

    async def in_ledger(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a ledger call on the ledger's thread; calls run in the order they were made."""
        began_s = time.monotonic()
        try:
            return await _in_pool(self.ledger_thread, lambda: call(*args, **kwargs))
        except LedgerError:
            self.counters.io_errors_ledger += 1
            raise
        finally:
            self.timings.ledger.observe(time.monotonic() - began_s)

    async def in_io(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a short blocking call."""
        return await _in_pool(self.io_threads, lambda: call(*args, **kwargs))

    async def in_read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a read that a request waits for."""
        return await _in_pool(self.read_threads, lambda: call(*args, **kwargs))

    async def in_write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the writing of a pack."""
        return await _in_pool(self.write_threads, lambda: call(*args, **kwargs))

    async def in_background(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run disk work that nobody waits for; one call at a time."""
        return await _in_pool(self.background_thread, lambda: call(*args, **kwargs))

    async def measure_disk(self) -> None:
        """Ask the file system of the packs what it has left; what cannot be asked is taken as it was."""
        with suppress(OSError):
            free_bytes = await self.in_io(_free_bytes, self.config.disk.disk_dir)
            self.disk_usage.measured(free_bytes - self.config.disk.reserve_bytes)

    def close(self) -> None:
        """Wait for running calls, end the threads, remove what a stop cut off left behind, close the ledger."""
        for pool in (self.read_threads, self.write_threads, self.background_thread, self.io_threads):
            pool.shutdown(wait=True)
        self.ledger_thread.shutdown(wait=True)
        self._sweep()
        self.ledger.close()

    def _sweep(self) -> None:
        """A pack copied, or emptied, by a task that the stop has cancelled would count until the next start."""
        try:
            self.disk.sweep(self.ledger.pack_ids())
        except (TierIOError, LedgerError) as error:  # the next start sweeps
            log_event(logger, "not_swept", level=logging.WARNING, problem=str(error))


def _free_bytes(folder: Path) -> int:
    """Worker thread: what an unprivileged process may still write."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


async def _in_pool(pool: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    """Run a call in a pool. A caller that is cancelled waits for a call that has begun.

    A thread cannot be cancelled: it would go on with an arena that its namespace has closed meanwhile.
    """
    running = pool.submit(call)
    try:
        return await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        if not running.cancelled():
            with suppress(Exception):
                await asyncio.wrap_future(running)
        raise
