"""Brings the KV of a prompt from the store into host memory; from there it is written to disk as a store is.

Ranges are read in parallel and decoded in order, so requests can use the head of the prompt while its tail is still
being read. A restore fills free memory up to the low watermark as fast as it can. Beyond that it goes at the pace of
the disk: it waits while write-back is behind, so most of host memory stays evictable.
"""

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtier.bundles.bundle import BundleChunk
from kvtier.concurrency.pauses import POLL_S
from kvtier.concurrency.turns import Breather, slices, slices_from_end
from kvtier.core.chunks.acquire import by_importance
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.errors import (
    ArenaError,
    BundleTooNewError,
    DrainingError,
    RemoteDamagedError,
    RemoteMissingError,
    RemoteSealedError,
)
from kvtier.fleet.manifest import StoredKV
from kvtier.fleet.remote_bundle import ChunkRange, RangePlan, RemoteBundle
from kvtier.fleet.row_filling import Doubt, Fault, RowFiller, is_missing
from kvtier.ledger import BindingRow
from kvtier.obs.log import log_event
from kvtier.remote.base import RemoteStore
from kvtier.service import Cache
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.pacing import MAX_YIELD_S

logger = logging.getLogger(__name__)

PART_BYTES = 4 * 1024**2
"""Payload of one call to a worker thread: 5 to 10 ms, so that what requests need comes soon, and a range of 8 MiB is
decoded by two threads."""
_PART_CHUNKS = 128
"""Of one call at most: each takes 20 to 40 us of the loop."""
_CAPACITY_S = 30.0
"""How long rows are waited for: host memory is full of what is on its way to disk."""


class RestoreOutcome(Enum):
    """How a restore ended. What came until then stays, and the next one goes on from there."""

    RESTORED = auto()
    """Nothing that the store has is missing here."""
    INCOMPLETE = auto()
    """The same, but the object lacks chunks that the binding names, and no tier here has them."""
    DAMAGED = auto()
    """The object is not what was written; it was read twice."""
    MISSING = auto()
    """There is no such object."""
    TOO_NEW = auto()
    """A newer kvtier wrote the object, or it is sealed with a key that is not here: this one cannot read it."""
    NO_ARENA = auto()
    """There is no memory for an arena of this model, or something has shortened it."""
    NO_CAPACITY = auto()
    """No row of host memory came free."""
    ENDED = auto()
    """The namespace, or the pin, has ended meanwhile, or was quarantined."""


@dataclass(frozen=True)
class DamagedChunk:
    """A chunk that is not what was written; `repeats`: the second read gave the same bytes."""

    key: ChunkKey
    repeats: bool


@dataclass(kw_only=True)
class RestoreResult:
    """The outcome, and what came.

    Attributes:
        num_chunks: That came from the store, and `num_bytes` of payload.
        num_present: That a tier here held already, or that came from an engine meanwhile.
        damaged: Of the object.
        problem: Why it ended before the end.
    """

    outcome: RestoreOutcome = RestoreOutcome.RESTORED
    num_chunks: int = 0
    num_bytes: int = 0
    num_present: int = 0
    damaged: Sequence[DamagedChunk] = ()
    problem: str = ""


async def restore_prompt(
    cache: Cache,
    store: RemoteStore,
    namespace: Namespace,
    binding: BindingRow,
    stored: StoredKV,
    *,
    max_parallel: int,
) -> RestoreResult:
    """Bring the pinned chunks of a binding that no tier here holds into host memory. Loop thread only.

    Rows are never left behind: each holds a verified chunk in the end, or is free.

    Args:
        cache: Gets the chunks.
        store: Has the bundle.
        namespace: Of the binding; it gets an arena if nothing has to make way for one.
        binding: Of a pinned prompt.
        stored: The bundle.
        max_parallel: Ranges of 8 MiB that are being read, or wait to be decoded. Two more may be in decoding.

    Raises:
        RemoteStoreError: The store did not do its part; what came until then stays.
    """
    restore = _Restore(cache, store, namespace, binding, stored, max_parallel)
    result = restore.result
    try:
        # As a task of the namespace: it waits for that before it closes its arena, in which rows are being written.
        await namespace.tasks.run(f"restore-{binding.pin_id[:8]}", restore.run())
    except RemoteMissingError as error:
        result.outcome, result.problem = RestoreOutcome.MISSING, str(error)
    except RemoteSealedError as error:
        result.outcome, result.problem = RestoreOutcome.TOO_NEW, str(error)
    except RemoteDamagedError as error:
        cache.resources.counters.remote_damaged_objects += 1
        cache.resources.counters.remote_damaged_chunks += len(result.damaged)
        result.outcome, result.problem = RestoreOutcome.DAMAGED, str(error)
    except BundleTooNewError as error:
        result.outcome, result.problem = RestoreOutcome.TOO_NEW, str(error)
    except ArenaError as error:
        result.outcome, result.problem = RestoreOutcome.NO_ARENA, str(error)
    except DrainingError as error:
        result.outcome, result.problem = RestoreOutcome.ENDED, str(error)
    except _EndedError as error:
        result.outcome, result.problem = error.outcome, error.problem
    return result


class _EndedError(Exception):
    """Nothing more is to come."""

    def __init__(self, outcome: RestoreOutcome, problem: str) -> None:
        super().__init__(problem)
        self.outcome, self.problem = outcome, problem


@dataclass
class _Missing:
    """Keys of the binding that no tier holds, and how many it names that some tier does."""

    keys: set[ChunkKey] = field(default_factory=set)
    num_held: int = 0


class _Restore:
    """One restore; see `restore_prompt`."""

    def __init__(
        self,
        cache: Cache,
        store: RemoteStore,
        namespace: Namespace,
        binding: BindingRow,
        stored: StoredKV,
        max_parallel: int,
    ) -> None:
        self._cache, self._resources, self._store = cache, cache.resources, store
        self._namespace, self._binding, self._stored = namespace, binding, stored
        self._max_parallel = max_parallel
        self._filler = RowFiller(cache.resources, namespace)
        self._doubts = list[Doubt]()
        self._restored = set[ChunkKey]()
        self.result = RestoreResult()

    async def run(self) -> None:
        """Restore; what is not an error of the store ends with one of those that `restore_prompt` translates."""
        await self._cache.until_recovered()  # what is in a previous daemon's rows need not come
        self._check_wanted()
        missing = await self._missing()
        self.result.num_present = missing.num_held
        if not missing.keys:
            return
        if not self._cache.arenas.open_if_it_fits(self._namespace):
            raise _EndedError(RestoreOutcome.NO_ARENA, "there is no memory for an arena of this model now")
        remote = await RemoteBundle.open(self._resources, self._store, self._stored, self._namespace)
        async with self._filler:
            await self._read_ranges(remote, await self._ranges(remote, missing.keys))
            await self._finish(remote)
        await self._rank()
        await self._judge(missing.keys, remote)

    async def _missing(self) -> _Missing:
        breather, table, missing = Breather(), self._namespace.table, _Missing()
        for part in slices(self._binding.keys):
            for key, chunk in zip(part, table.get_all(part), strict=True):
                if chunk is not None and chunk.held:
                    missing.num_held += 1
                elif chunk is not None and chunk.num_pins:
                    missing.keys.add(key)
            await breather.pause()
        return missing

    async def _ranges(self, remote: RemoteBundle, missing: set[ChunkKey]) -> list[ChunkRange]:
        breather, plan, left = Breather(), RangePlan(self._namespace.layout), missing & remote.chunks.keys()
        for part in slices(self._binding.keys, 512):
            plan.add(part, {key: remote.chunks[key] for key in part if key in left})
            left.difference_update(part)
            await breather.pause()
        return plan.ranges()

    async def _judge(self, missing: set[ChunkKey], remote: RemoteBundle) -> None:
        """Say what is missing still: what the object lacks, or what is not wanted any longer."""
        self._check_wanted()
        breather, num_lacking, num_unpinned = Breather(), 0, 0
        for part in slices(list(missing)):
            for key, chunk in zip(part, self._namespace.table.get_all(part), strict=True):
                if chunk is not None and chunk.held:
                    self.result.num_present += key not in self._restored
                elif key not in remote.chunks:
                    num_lacking += 1
                else:
                    num_unpinned += chunk is None or not chunk.num_pins
            await breather.pause()
        if num_lacking:
            problem = f"{self._stored.key} lacks {num_lacking} of {len(self._binding.keys)} chunks of the prompt"
            raise _EndedError(RestoreOutcome.INCOMPLETE, problem)
        if num_unpinned:
            raise _EndedError(RestoreOutcome.ENDED, "the prompt is not pinned any longer")

    def _check_wanted(self) -> None:
        namespace = self._namespace
        if self._cache.namespaces.get(namespace.namespace_id) is not namespace or namespace.ephemeral:
            raise _EndedError(RestoreOutcome.ENDED, "the namespace has ended")
        if namespace.quarantine is not None:
            raise _EndedError(RestoreOutcome.ENDED, f"the namespace is quarantined ({namespace.quarantine.reason})")

    # Reading

    async def _read_ranges(self, remote: RemoteBundle, ranges: Sequence[ChunkRange]) -> None:
        left, reading = deque(ranges), deque[tuple[ChunkRange, asyncio.Task[bytes]]]()
        breather = Breather()
        try:
            while left or reading:
                while left and len(reading) < self._max_parallel:
                    span = left.popleft()
                    if any(is_missing(self._namespace, chunk.stored) for chunk in span.chunks):
                        reading.append((span, asyncio.create_task(remote.read(span), name="restore-read")))
                    await breather.pause()
                if reading:
                    span, task = reading[0]
                    while self._filler.num_fills and not task.done():
                        await self._commit_oldest()  # what is here is readable before more comes
                    data = await task
                    reading.popleft()
                    await self._fill_rows(span.chunks, data, span.start)
                if self._doubts:
                    await self._finish(remote)
        finally:
            for _, task in reading:
                task.cancel()
            await asyncio.gather(*(task for _, task in reading), return_exceptions=True)

    async def _fill_rows(self, chunks: Sequence[BundleChunk], data: bytes, base: int) -> None:
        """Have rows filled with chunks whose stored bytes were read."""
        view, arena = memoryview(data), self._namespace.host.arena
        if not arena.is_whole:
            raise _EndedError(RestoreOutcome.NO_ARENA, f"{arena.path} was shortened")
        for part in _parts(chunks):
            while part := [chunk for chunk in part if is_missing(self._namespace, chunk.stored)]:
                await self._resources.request_reads.until_quiet(MAX_YIELD_S)
                refs = await self._rows(len(part))
                self._filler.start(part[: len(refs)], refs, view, base)
                part = part[len(refs) :]
                while self._filler.num_fills > self._filler.num_threads:
                    await self._commit_oldest()

    async def _rows(self, num_rows: int) -> list[SlotRef]:
        """Return at least one row, for which chunks that are on disk may have made way."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            self._check_wanted()
            if self._may_take() and (refs := await self._filler.allocate(num_rows)):
                return refs
            if self._filler.num_fills:
                await self._commit_oldest()
            elif loop.time() - began_s < _CAPACITY_S:
                await asyncio.sleep(POLL_S)
            else:
                raise _EndedError(RestoreOutcome.NO_CAPACITY, "host memory is full of chunks that are not on disk yet")

    def _may_take(self) -> bool:
        if self._namespace.has_spare_memory():
            return True
        queue = self._namespace.write_back.queue
        if queue.num_refused:  # it would go through host memory for nothing
            raise _EndedError(RestoreOutcome.NO_CAPACITY, "neither host memory nor the disk has space for more")
        return not queue.is_behind

    # Committing

    async def _commit_oldest(self) -> None:
        committed = await self._filler.commit_oldest()
        self._doubts += committed.doubts
        counters, result = self._resources.counters, self.result
        num_bytes = sum(stored.raw_bytes for stored in committed.chunks)
        counters.remote_restored_chunks += len(committed.chunks)
        counters.remote_restored_bytes += num_bytes
        result.num_chunks += len(committed.chunks)
        result.num_bytes += num_bytes
        self._restored.update(stored.key for stored in committed.chunks)

    async def _finish(self, remote: RemoteBundle) -> None:
        """Commit the rows that are being filled, and read chunks again that were wrong: the network may be to blame.

        Raises:
            RemoteDamagedError: It was the same again, or is wrong otherwise.
        """
        read_again, damaged = set[ChunkKey](), list[DamagedChunk]()
        while self._doubts or self._filler.num_fills:
            while self._filler.num_fills:
                await self._commit_oldest()
            doubts, self._doubts = self._doubts, []
            for doubt in doubts:
                chunk = doubt.chunk
                if doubt.fault is Fault.CODEC:
                    raise BundleTooNewError(f"codec {chunk.stored.codec!r} is unknown; upgrade kvtier")
                is_last = doubt.fault is not Fault.STORED or chunk.stored.key in read_again
                data = b"" if is_last else await remote.read_again(chunk)
                digest = doubt.digest if is_last else await self._resources.in_io(_sha256, data)
                if is_last or digest != chunk.sha256:
                    damaged.append(DamagedChunk(chunk.stored.key, repeats=digest == doubt.digest))
                else:
                    read_again.add(chunk.stored.key)
                    await self._fill_rows([chunk], data, chunk.stored.offset)
        if read_again:
            log_event(
                logger,
                "remote_read_spoiled",
                level=logging.WARNING,
                key=self._stored.key,
                chunks=len(read_again),
                why="the first read gave wrong bytes, the second one the right ones",
            )
        if damaged:
            self.result.damaged = damaged
            names = ", ".join(each.key.hex()[:16] for each in damaged[:3])
            raise RemoteDamagedError(self._stored.key, f"{len(damaged)} chunks are wrong, first of all {names}")

    async def _rank(self) -> None:
        """The head of the prompt is to outlive its tail in host memory."""
        breather, table, chunks = Breather(), self._namespace.table, list[Chunk]()
        for part in slices(self._binding.keys):
            chunks += table.known([key for key in part if key in self._restored])
            await breather.pause()
        for run in slices_from_end(by_importance(self._namespace.layout, chunks)):
            table.use(run, hit=False)
            await asyncio.sleep(0)


def _parts(chunks: Sequence[BundleChunk]) -> Iterator[list[BundleChunk]]:
    """Cut chunks into runs of at most `_PART_CHUNKS` and `PART_BYTES` of payload, or of one chunk."""
    part, num_bytes = list[BundleChunk](), 0
    for chunk in chunks:
        if part and (num_bytes + chunk.stored.raw_bytes > PART_BYTES or len(part) == _PART_CHUNKS):
            yield part
            part, num_bytes = [], 0
        part.append(chunk)
        num_bytes += chunk.stored.raw_bytes
    if part:
        yield part


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
