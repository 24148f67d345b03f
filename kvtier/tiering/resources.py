"""What every part of the service shares: the disk tier, the ledger on its thread, I/O pools, budget and counters."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvtier.concurrency.pool import Pool
from kvtier.concurrency.thread_calls import begin_in_thread
from kvtier.config import DaemonConfig
from kvtier.core.chunks.eviction import EvictionClock
from kvtier.core.chunks.lost_chunks import LostChunks
from kvtier.core.slots import HostBudget
from kvtier.disk.base import DiskTier
from kvtier.disk.codecs.decode_rate import measured_decode_rate
from kvtier.disk.compression import Compression
from kvtier.disk.disk_health import DiskHealth
from kvtier.disk.disk_usage import DiskUsage
from kvtier.errors import LedgerError, TierIOError
from kvtier.ledger import Ledger
from kvtier.obs import trace
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event
from kvtier.obs.timings import Timings
from kvtier.tiering.pacing import RequestReads

logger = logging.getLogger(__name__)

_MORE_LOOKS, _LOOK_EVERY_S = 5, 5.0
"""At the disk, before it counts as slower than the decoder; vLLM takes longer to start."""

P = ParamSpec("P")
T = TypeVar("T")


class Resources:
    """Shared by all namespaces; owned and closed by `Cache`.

    Calls of one kind never queue behind those of another: one thread for the ledger, `io_threads` for promotions, two
    for packs being written, one for compaction, scrub and probes, one for a fsck (which waits for what all others do),
    and `io_threads` for the short rest (verifying stores, backing rows, unlinking). Where the system allows no thread
    for a call, `in_ledger` raises LedgerError and the others TierIOError.

    Attributes:
        ledger: Called through `in_ledger` only.
        budget: Bytes of arenas: backed rows, header pages and slot tables.
        disk_usage: Bytes of packs.
        request_reads: Promotions that requests wait for.
        lost_chunks: Why chunks left the last tier that held them.
        num_storing: Returns how many attached engines store; those that do not ask for a single slot.
        holes: Set when a chunk lost its place in a pack: there may be something to compact.
    """

    def __init__(
        self,
        config: DaemonConfig,
        disk: DiskTier,
        ledger: Ledger,
        counters: Counters | None = None,
        timings: Timings | None = None,
    ) -> None:
        self.config, self.disk, self.ledger = config, disk, ledger
        self.counters, self.timings = counters or Counters(), timings or Timings()
        self.budget, self.disk_usage = HostBudget(config.host.host_bytes), DiskUsage(config.disk.disk_bytes)
        self.compression = Compression(config.disk.compression, config.disk.io_threads)
        self.request_reads, self.holes = RequestReads(), asyncio.Event()
        self.host_clock, self.disk_clock = EvictionClock(), EvictionClock()  # of eviction, over all namespaces
        self.lost_chunks = LostChunks()
        self.num_storing: Callable[[], int] = lambda: 1

        def refused(error: OSError) -> TierIOError:
            return TierIOError(config.disk.disk_dir, "work on", error)

        self.ledger_thread = Pool("ledger", 1, refusal=lambda error: LedgerError(str(error.strerror)))
        self.io_threads = Pool("io", config.disk.io_threads, refusal=refused)
        self.read_threads = Pool("read", config.disk.io_threads, refusal=refused)
        self.write_threads = Pool("write", 2, refusal=refused)  # one namespace's pack does not wait for another's
        self.background_thread = Pool("background", 1, refusal=refused)
        self.check_thread = Pool("check", 1, refusal=refused)
        self.disk_health = DiskHealth(lambda: self.in_background(disk.probe), self.counters)
        self._closed: asyncio.Future[None] | None = None

    @property
    def stores_all(self) -> bool:
        """Every prompt chunk is kept, not only those of pinned prompts."""
        return self.config.cache.store == "all"

    async def in_ledger(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a ledger call on the ledger's thread; calls run in the order they were made."""
        began_s = time.monotonic()
        try:
            return await self.ledger_thread.run(lambda: call(*args, **kwargs))
        except LedgerError:
            self.counters.io_errors_ledger_transaction += 1
            raise
        finally:
            ended_s = time.monotonic()
            self.timings.ledger.observe(ended_s - began_s)
            trace.record("ledger", began_s, ended_s, of=f"ledger/{began_s}", call=getattr(call, "__name__", ""))

    async def in_io(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a short blocking call."""
        return await self.io_threads.run(lambda: call(*args, **kwargs))

    async def in_read(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a read that a request waits for."""
        return await self.read_threads.run(lambda: call(*args, **kwargs))

    async def in_write(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the writing of a pack."""
        return await self.write_threads.run(lambda: call(*args, **kwargs))

    async def in_background(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run disk work that no request waits for; one call at a time."""
        return await self.background_thread.run(lambda: call(*args, **kwargs))

    async def measure_disk(self) -> None:
        """Ask the file system of the packs what it has left; what cannot be asked is taken as it was."""
        with suppress(OSError, TierIOError):
            free_bytes = await self.in_io(_free_bytes, self.config.disk.disk_dir)
            self.disk_usage.measured(free_bytes - self.config.disk.reserve_bytes)

    async def choose_compression(self) -> None:
        """Measure disk and decoder if they decide whether packs are compressed; until the first look they are.

        The fastest read of some looks counts: beside the start of a daemon and of vLLM a disk seems slower than it is.
        """
        if not self.compression.must_measure:
            return
        read_rate = await self.in_write(self.disk.read_rate)
        decode_rate = await self.in_write(measured_decode_rate)
        self.compression.measured(read_rate, decode_rate)
        for _ in range(_MORE_LOOKS):
            if read_rate is None or self.compression.is_disk_faster:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
            another = await self.in_write(self.disk.read_rate)
            if another is None:
                break
            read_rate = max(read_rate, another)
            self.compression.measured(read_rate, decode_rate)
        log_event(
            logger,
            "disk_measured",
            read_mb_per_s=None if read_rate is None else round(read_rate / 1e6),
            decode_mb_per_s=round(decode_rate / 1e6),
            packs="raw" if self.compression.is_disk_faster else "compressed",
        )

    async def close(self) -> None:
        """Wait for running calls, for ever if one never returns, end the threads, sweep, close the ledger.

        Idempotent: who calls again, or at the same time, waits for the same end. A caller that is cancelled meanwhile
        leaves everything as it stands.
        """
        # In a daemon thread, which the end of the process does not wait for: on the loop, a read that hangs would stop
        # the loop, and with it the second signal that is to end a daemon at once.
        # In one thread only: SQLite does not survive a query beside the end of its connection.
        if self._closed is None:
            self._closed = begin_in_thread("kvtier-close", self._close)
        await asyncio.shield(self._closed)

    def give_up(self) -> None:
        """See `Pool.abandon`."""
        for pool in self._pools:
            pool.abandon()

    def _close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=True)
        self._sweep()
        self.ledger.close()

    @property
    def _pools(self) -> tuple[Pool, ...]:
        # The ledger's last, since what the others do is recorded there.
        return (
            self.check_thread,
            self.read_threads,
            self.write_threads,
            self.background_thread,
            self.io_threads,
            self.ledger_thread,
        )

    @property
    def busy_pools(self) -> list[str]:
        """Kinds of calls of which one is running."""
        return [pool.name for pool in self._pools if pool.is_busy]

    def _sweep(self) -> None:
        """A pack copied, or emptied, by a task that the stop has cancelled would count until the next start."""
        try:
            unrecorded = self.disk.written_packs() - self.ledger.packs.pack_ids()
            self.disk.sweep(self.ledger.packs.removed_packs() | unrecorded)
            self.ledger.catch_up()
        except (TierIOError, LedgerError) as error:  # the next start sweeps
            log_event(logger, "not_swept", level=logging.WARNING, problem=str(error))


def _free_bytes(folder: Path) -> int:
    """Worker thread: what an unprivileged process may still write."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
