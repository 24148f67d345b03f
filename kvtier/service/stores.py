"""What every part of the service shares: the disk tier, the ledger on its thread, the I/O pool, budget and counters."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvtier.config import DaemonConfig
from kvtier.core.eviction import EvictionClock
from kvtier.core.slots import HostBudget
from kvtier.ledger import Ledger
from kvtier.obs.counters import Counters
from kvtier.service.disk_usage import DiskUsage
from kvtier.tiers.base import DiskTier

P = ParamSpec("P")
T = TypeVar("T")


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
        host_clock: Of the host tier's eviction, over all namespaces.
        disk_clock: Of the disk tier's.
    """

    config: DaemonConfig
    disk: DiskTier
    ledger: Ledger
    budget: HostBudget
    disk_usage: DiskUsage
    counters: Counters
    ledger_thread: ThreadPoolExecutor
    io_threads: ThreadPoolExecutor
    host_clock: EvictionClock = field(default_factory=EvictionClock)
    disk_clock: EvictionClock = field(default_factory=EvictionClock)

    @property
    def stores_all(self) -> bool:
        """Every prompt chunk is kept, not only those of pinned prompts."""
        return self.config.cache.store == "all"

    @classmethod
    def create(cls, config: DaemonConfig, disk: DiskTier, ledger: Ledger) -> "Stores":
        """Make the pools; one thread for the ledger, `disk.io_threads` + 1 for tier I/O (the one more writes)."""
        return cls(
            config=config,
            disk=disk,
            ledger=ledger,
            budget=HostBudget(config.host.host_bytes),
            disk_usage=DiskUsage(config.disk.disk_bytes),
            counters=Counters(),
            ledger_thread=ThreadPoolExecutor(1, thread_name_prefix="kvtier-ledger"),
            io_threads=ThreadPoolExecutor(config.disk.io_threads + 1, thread_name_prefix="kvtier-io"),
        )

    async def in_ledger(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a ledger call on the ledger's thread; calls run in the order they were made."""
        return await _in_pool(self.ledger_thread, lambda: call(*args, **kwargs))

    async def in_io(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking tier call on the I/O pool."""
        return await _in_pool(self.io_threads, lambda: call(*args, **kwargs))

    async def measure_disk(self) -> None:
        """Ask the file system of the packs what it has left; what cannot be asked is taken as it was."""
        with suppress(OSError):
            free_bytes = await self.in_io(_free_bytes, self.config.disk.disk_dir)
            self.disk_usage.measured(free_bytes - self.config.disk.reserve_bytes)

    def close(self) -> None:
        """Wait for running calls, end the threads, close the ledger."""
        self.io_threads.shutdown(wait=True)
        self.ledger_thread.shutdown(wait=True)
        self.ledger.close()


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
