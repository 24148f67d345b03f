"""Stored bytes of chunks into rows of host memory: taken, filled in worker threads, committed in order, or freed.

Each chunk is verified twice: its stored bytes by SHA-256, its payload by the checksum that goes with it.
"""

import asyncio
import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto

from kvtier.bundles.bundle import BundleChunk
from kvtier.concurrency.tasks import until_ended
from kvtier.core.slots import SlotRef
from kvtier.core.stored import StoredChunk, checksum_of
from kvtier.disk.codecs import CodecError, UnknownCodecError, codec_by_name
from kvtier.disk.codecs.raw import RawCodec
from kvtier.errors import ArenaError
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

TURN_MAX_BYTES = 128 * 1024
"""Chunks up to that long are decoded by one thread at a time: two threads would wait for Python's lock longer than they
decode. See `disk.packs.pack_reading`."""


class Fault(Enum):
    """What is wrong with a chunk."""

    STORED = auto()
    """Its stored bytes, as they were read."""
    PAYLOAD = auto()
    """Its stored bytes are what was written, and do not decode to its payload."""
    CODEC = auto()
    """A newer kvtier encoded it."""
    MEMORY = auto()
    """It decodes well in private memory, but not in its row."""


@dataclass(frozen=True)
class Doubt:
    """A chunk that did not verify; `digest`: SHA-256 of the bytes that were read."""

    chunk: BundleChunk
    fault: Fault
    digest: bytes


@dataclass(kw_only=True)
class Committed:
    """What became of one fill.

    Attributes:
        chunks: Readable in host memory from now on.
        doubts: Chunks that did not verify; their rows are free.
    """

    chunks: list[StoredChunk]
    doubts: list[Doubt]


@dataclass(frozen=True)
class _Fill:
    """Chunks, the SEALING row of each, and the call that fills the rows."""

    chunks: Sequence[BundleChunk]
    refs: Sequence[SlotRef]
    task: "asyncio.Task[list[Doubt | None]]"


class RowFiller:
    """Fills rows of one namespace. Loop thread only; an async context manager: after it no row is left half filled.

    Args:
        resources: Threads.
        namespace: Its arena is open, and stays so until the end of the `with` block.

    Attributes:
        num_threads: Fills that run at once.
    """

    def __init__(self, resources: Resources, namespace: Namespace) -> None:
        self._resources, self._namespace, self._host = resources, namespace, namespace.host
        self.num_threads = max(1, resources.config.disk.io_threads - 1)  # one is left for what requests need
        self._fills = deque[_Fill]()
        self._decoding = threading.Lock()

    async def __aenter__(self) -> "RowFiller":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for what runs, and free its rows."""
        for fill in self._fills:
            fill.task.cancel()
        for fill in self._fills:
            await until_ended(fill.task)
            self._release(fill.refs)
        self._fills.clear()
        self._namespace.top_up_all()

    @property
    def num_fills(self) -> int:
        """Fills whose rows are not committed yet."""
        return len(self._fills)

    async def allocate(self, num_rows: int) -> list[SlotRef]:
        """Return up to `num_rows` rows, SEALING; none if none can be had now. They are given to `start` at once."""
        task = asyncio.create_task(self._host.allocate(num_rows, for_engine=False), name="restore-rows")
        try:
            refs = await asyncio.shield(task)
        except asyncio.CancelledError:
            await until_ended(task)
            if not task.cancelled() and task.exception() is None:
                self._release(task.result())
            raise
        for ref in refs:
            self._host.seal(ref)
        return refs

    def start(self, chunks: Sequence[BundleChunk], refs: Sequence[SlotRef], data: memoryview, base: int) -> None:
        """Begin to fill rows, one for each chunk.

        Args:
            data: Has the stored bytes of all of them.
            base: Offset of its first byte in the bundle.

        Raises:
            ArenaError: There is no arena; the rows are free.
        """
        try:
            rows = [self._host.payload(ref, chunk.stored.key) for chunk, ref in zip(chunks, refs, strict=True)]
        except ArenaError:
            self._release(refs)
            raise
        pieces = [_slice(data, base, chunk.stored) for chunk in chunks]
        task = asyncio.create_task(self._resources.in_io(self._fill_all, chunks, pieces, rows), name="restore-fill")
        self._fills.append(_Fill(chunks, refs, task))

    async def commit_oldest(self) -> Committed:
        """Wait for the fill that was started first, and make what it brought readable.

        Raises:
            ArenaError: A row does not hold what was written into it.
        """
        fill = self._fills[0]
        doubts = await fill.task
        self._fills.popleft()
        if any(doubt is not None and doubt.fault is Fault.MEMORY for doubt in doubts):
            self._release(fill.refs)
            raise ArenaError(
                f"rows of {self._host.arena.path} do not hold what is written into them; was it shortened?"
            )
        return self._commit(fill, doubts)

    def _commit(self, fill: _Fill, doubts: Sequence[Doubt | None]) -> Committed:
        """A chunk that came from elsewhere meanwhile, or is wanted no longer, frees its row."""
        committed = Committed(chunks=[], doubts=[doubt for doubt in doubts if doubt is not None])
        table = self._namespace.table
        for chunk, ref, doubt in zip(fill.chunks, fill.refs, doubts, strict=True):
            if doubt is not None or not is_missing(self._namespace, chunk.stored):
                self._host.release(ref)
            elif table.host.commit_store(chunk.stored.key, ref, chunk.stored.checksum):
                committed.chunks.append(chunk.stored)
        keys = [stored.key for stored in committed.chunks]
        self._namespace.write_back.add(keys)
        self._namespace.inventory.announce(keys, held=True)
        return committed

    def _release(self, refs: Sequence[SlotRef]) -> None:
        for ref in refs:
            self._host.release(ref)

    # Worker threads

    def _fill_all(
        self, chunks: Sequence[BundleChunk], pieces: Sequence[memoryview], rows: Sequence[Sequence[memoryview]]
    ) -> list[Doubt | None]:
        return [self._fill(*each) for each in zip(chunks, pieces, rows, strict=True)]

    def _fill(self, chunk: BundleChunk, data: memoryview, row: Sequence[memoryview]) -> Doubt | None:
        digest = hashlib.sha256(data).digest()
        if digest != chunk.sha256:
            return Doubt(chunk, Fault.STORED, digest)
        takes_turns = chunk.stored.codec != RawCodec.name and chunk.stored.raw_bytes <= TURN_MAX_BYTES
        try:
            with self._decoding if takes_turns else nullcontext():
                is_right = _decode(chunk.stored, data, row)
        except UnknownCodecError:
            return Doubt(chunk, Fault.CODEC, digest)
        if is_right:
            return None
        # A row of a shortened arena holds nothing. The object in the store is not to blame for that.
        is_right = _decode(chunk.stored, data, [memoryview(bytearray(chunk.stored.raw_bytes))])
        return Doubt(chunk, Fault.MEMORY if is_right else Fault.PAYLOAD, digest)


def is_missing(namespace: Namespace, stored: StoredChunk) -> bool:
    """Say whether a chunk is pinned and no tier holds it."""
    known = namespace.table.get(stored.key)
    return known is not None and known.num_pins > 0 and not known.held


def _slice(data: memoryview, base: int, stored: StoredChunk) -> memoryview:
    start = stored.offset - base
    return data[start : start + stored.stored_bytes]


def _decode(stored: StoredChunk, data: memoryview, into: Sequence[memoryview]) -> bool:
    """Decode a chunk; say whether that gave its payload."""
    try:
        codec_by_name(stored.codec).decode(data, into)
    except CodecError:
        return False
    return checksum_of(into) == stored.checksum
