"""One call of `DiskTier.read_chunks` in a worker thread, which reports progress to the loop."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.concurrency.turns import BATCH_BYTES
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.disk.base import ChunkRead, DiskTier, StoredChunk
from kvtier.errors import ArenaError, ChunkDamagedError, ChunkSealedError, TierIOError
from kvtier.host.arena_tier import ArenaTier
from kvtier.obs import trace


@dataclass(frozen=True)
class Read:
    """A chunk to be read into its slot. `lacks_pages`: its pages are not made yet."""

    key: ChunkKey
    ref: SlotRef
    stored: StoredChunk
    into: Sequence[memoryview]
    lacks_pages: bool


@dataclass(frozen=True)
class Outcome:
    """How a read ended. `backed`: the slot has its pages."""

    read: Read
    error: ChunkDamagedError | TierIOError | ArenaError | None = None
    backed: bool = True


class Batch:
    """Reads in prefix order. Made on the loop thread; `run` is for a worker thread, the rest for the loop.

    Args:
        reads: At least one.
        on_progress: Called on the loop when outcomes can be taken: after the first chunk, then about every 8 MiB.
        is_preempted: Called in the worker thread: leave out what has not begun.
        background: No request waited for it when it was made.

    Attributes:
        wanted: Chunks that a request waits for. When it becomes empty, what has not begun is left out. Changed on the
            loop, read in the worker thread.
        unread: Reads whose outcome was not taken yet; after `run` and the last `take_outcomes`, those left out.
        stopped: Set to leave out what has not begun, wanted or not.
        cancelled: Something was left out.
        num_read: Chunks that were read well, of those taken.
        refused: A refusal of the operating system, of those taken.
    """

    def __init__(
        self,
        reads: Sequence[Read],
        *,
        host: ArenaTier,
        disk: DiskTier,
        on_progress: Callable[["Batch"], None],
        is_preempted: Callable[[], bool],
        background: bool,
    ) -> None:
        self.background = background
        self.wanted: set[ChunkKey] = set() if background else {read.key for read in reads}
        self.unread = {read.key: read for read in reads}
        self.stopped = False
        self.cancelled = False
        self.num_read = 0
        self.refused: TierIOError | None = None
        self.reads = reads
        self._host, self._disk, self._on_progress, self._is_preempted = host, disk, on_progress, is_preempted
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []  # guarded by _lock
        self._unreported_bytes = BATCH_BYTES  # worker thread: the first chunk is reported at once

    @property
    def unread_bytes(self) -> int:
        """Raw bytes of the chunks whose outcome was not taken yet."""
        return sum(read.stored.raw_bytes for read in self.unread.values())

    def run(self) -> None:
        """Back the slots and read into them. Worker thread; blocks."""
        lacking = [read for read in self.reads if read.lacks_pages]
        refused = self._back(lacking) if lacking else set()
        reads = {read.key: read for read in self.reads if read.key not in refused}
        self._disk.read_chunks(
            [ChunkRead(chunk=read.stored, into=read.into) for read in reads.values()],
            lambda chunk_read, error: self._done(Outcome(reads[chunk_read.chunk.key], error)),
            self.is_cancelled,
        )

    def is_cancelled(self) -> bool:
        """Say whether what has not begun shall be left out. Any thread."""
        if self.stopped or (not self.wanted and (not self.background or self._is_preempted())):
            self.cancelled = True  # for good: the tier may call this in several threads
        return self.cancelled

    def _back(self, reads: Sequence[Read]) -> set[ChunkKey]:
        """Make the pages of slots that have none; return the chunks for which there is no memory."""
        num_backed, error = 0, None
        with trace.span("make pages", chunks=len(reads), background=self.background):
            try:
                num_backed = self._host.back([read.ref for read in reads])
            except ArenaError as problem:
                error = problem
        for read in reads[num_backed:]:
            self._done(Outcome(read, error, backed=False))
        return {read.key for read in reads[num_backed:]}

    def _done(self, outcome: Outcome) -> None:
        """Worker thread. Engines that wait for the row may copy it at once; to the loop small groups are reported
        together: a report per chunk would cost more than some chunks.
        """
        read = outcome.read
        if outcome.error is None and outcome.backed:
            self._host.mark_loaded(read.ref, read.key, read.stored.checksum)
        with self._lock:
            self._outcomes.append(outcome)
        self._unreported_bytes += read.stored.raw_bytes
        # A request waits for its last chunk; each report costs half a millisecond of loop, interpreter lock and engine.
        if self._unreported_bytes >= BATCH_BYTES:
            self._unreported_bytes = 0
            self._loop.call_soon_threadsafe(self._on_progress, self)

    def take_outcomes(self) -> Sequence[Outcome]:
        """Return what has ended since the last call."""
        with self._lock:
            taken, self._outcomes = self._outcomes, []
        for outcome in taken:
            self.num_read += outcome.backed and outcome.error is None
            if isinstance(outcome.error, TierIOError) and not isinstance(outcome.error, ChunkSealedError):
                self.refused = outcome.error
            del self.unread[outcome.read.key]
            self.wanted.discard(outcome.read.key)
        return taken
