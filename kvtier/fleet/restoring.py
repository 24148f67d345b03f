"""Brings the KV of a prompt from the store into host memory; from there it is written to disk as a store is.

Ranges are read in parallel and taken in in order, so that the head of the prompt is readable while its tail is still
on the way. Each chunk is verified twice: its stored bytes by SHA-256, its payload by the checksum that goes with it.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from kvtier.bundles.bundle import BundleChunk
from kvtier.concurrency.pauses import POLL_S
from kvtier.concurrency.tasks import shielded
from kvtier.core.slots import SlotRef
from kvtier.core.stored import checksum_of
from kvtier.disk.codecs import CodecError, UnknownCodecError, codec_by_name
from kvtier.errors import ArenaError, DrainingError, RemoteDamagedError, RemoteMissingError
from kvtier.fleet.manifest import StoredKV
from kvtier.fleet.remote_bundle import ChunkRange, plan_ranges, read_bundle
from kvtier.ledger import BindingRow
from kvtier.remote.base import RemoteStore
from kvtier.service import Cache
from kvtier.tiering.namespace import Namespace

_MAX_ROWS = 16
"""Taken at once: few enough that what makes way for them is little."""
_CAPACITY_S = 30.0
"""How long rows are waited for: host memory is full of what is on its way to disk."""
_QUIET_S = 1.0
"""How long a range waits for requests that read from disk; longer, and constant traffic would stop it."""


class RestoreOutcome(Enum):
    """How a restore ended."""

    RESTORED = auto()
    """Nothing that the store has is missing here."""
    DAMAGED = auto()
    """The object is not what was written; it was read twice."""
    MISSING = auto()
    """There is no such object."""
    NO_CAPACITY = auto()
    """No row of host memory came free; what came stays."""
    ENDED = auto()
    """The namespace, or the pin, has ended meanwhile, or was quarantined."""


@dataclass(kw_only=True)
class RestoreResult:
    """The outcome, what came, and what was wrong."""

    outcome: RestoreOutcome = RestoreOutcome.RESTORED
    num_chunks: int = 0
    num_bytes: int = 0
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
    """Bring the chunks of a binding that no tier here holds into host memory. Loop thread only.

    Rows are never left behind: each holds a verified chunk in the end, or is free.

    Args:
        max_parallel: Ranges of 8 MiB that are read, or wait to be taken in, at once.

    Raises:
        RemoteStoreError: The store did not do its part; what came until then stays.
    """
    restore = _Restore(cache, store, namespace, stored)
    try:
        await restore.run(binding, max_parallel)
    except RemoteMissingError as error:
        restore.end(RestoreOutcome.MISSING, str(error))
    except RemoteDamagedError as error:
        cache.resources.counters.remote_damaged_objects += 1
        restore.end(RestoreOutcome.DAMAGED, str(error))
    except ArenaError as error:
        restore.end(RestoreOutcome.NO_CAPACITY, str(error))
    except DrainingError as error:
        restore.end(RestoreOutcome.ENDED, str(error))
    except _EndedError as error:
        restore.end(error.outcome, error.problem)
    return restore.result


class _EndedError(Exception):
    """Nothing more is to come."""

    def __init__(self, outcome: RestoreOutcome, problem: str) -> None:
        super().__init__(problem)
        self.outcome, self.problem = outcome, problem


class _Restore:
    def __init__(self, cache: Cache, store: RemoteStore, namespace: Namespace, stored: StoredKV) -> None:
        self._cache, self._store, self._namespace, self._stored = cache, store, namespace, stored
        self._tiers, self._host = namespace.tiers, namespace.host
        self.result = RestoreResult()

    def end(self, outcome: RestoreOutcome, problem: str) -> None:
        self.result.outcome, self.result.problem = outcome, problem

    async def run(self, binding: BindingRow, max_parallel: int) -> None:
        if not self._cache.arenas.open_if_it_fits(self._namespace):
            raise _EndedError(RestoreOutcome.NO_CAPACITY, "there is no memory for an arena of this model now")
        bundle = await read_bundle(self._cache.resources, self._store, self._stored, self._namespace)
        keys = set(binding.keys)
        wanted = [chunk for chunk in bundle.chunks if chunk.stored.key in keys and self._is_missing(chunk)]
        left, reading = deque(plan_ranges(wanted)), deque[tuple[ChunkRange, asyncio.Task[bytes]]]()
        try:
            while left or reading:
                while left and len(reading) < max_parallel:
                    span = left.popleft()
                    reading.append((span, asyncio.create_task(self._read(span), name="restore-read")))
                span, task = reading.popleft()
                await self._take_in(span, await task)
        finally:
            for _, task in reading:
                task.cancel()
            await asyncio.gather(*(task for _, task in reading), return_exceptions=True)

    def _is_missing(self, chunk: BundleChunk) -> bool:
        """Return whether a chunk is wanted, and no tier has it."""
        known = self._tiers.table.get(chunk.stored.key)
        return known is not None and known.num_pins > 0 and not known.held

    async def _read(self, span: ChunkRange) -> bytes:
        with suppress(TimeoutError):
            async with asyncio.timeout(_QUIET_S):
                await self._cache.resources.traffic.until_quiet()
        return await self._store.get_range(self._stored.key, span.start, span.end)

    async def _take_in(self, span: ChunkRange, data: bytes) -> None:
        """Take the chunks of a range in; what is not right is read once more, for the network may be to blame."""
        bad = await self._take_all(span, data)
        if bad:
            data = await self._store.get_range(self._stored.key, span.start, span.end)
            bad = await self._take_all(span, data, only=bad)
        if bad:
            names = ", ".join(chunk.stored.key.hex()[:16] for chunk in bad[:3])
            raise RemoteDamagedError(self._stored.key, f"{len(bad)} chunks are not what was written ({names} ...)")

    async def _take_all(
        self, span: ChunkRange, data: bytes, only: Sequence[BundleChunk] | None = None
    ) -> list[BundleChunk]:
        bad, left = list[BundleChunk](), list(span.chunks if only is None else only)
        while left:
            if self._namespace.quarantine is not None:
                raise _EndedError(RestoreOutcome.ENDED, "the namespace is quarantined")
            part, left = left[:_MAX_ROWS], left[_MAX_ROWS:]
            part = [chunk for chunk in part if self._is_missing(chunk)]
            while part:
                # As a task of the namespace, which ends no sooner: rows are being written.
                taken, wrong = await self._namespace.tasks.run_shielded(
                    "restore", self._take_some(part, data, span.start)
                )
                bad += wrong
                part = part[taken:]
        return bad

    async def _take_some(
        self, chunks: Sequence[BundleChunk], data: bytes, start: int
    ) -> tuple[int, Sequence[BundleChunk]]:
        """Take in as many as there are rows; return how many were dealt with, and those that are not right."""
        refs = await self._rows(len(chunks))
        for ref in refs:
            self._host.seal(ref)
        pairs = list(zip(chunks, refs, strict=False))
        try:
            right = await self._fill(pairs, memoryview(data), start)
        except BaseException:
            for ref in refs:
                self._host.release(ref)
            raise
        held = []
        for (chunk, ref), is_right in zip(pairs, right, strict=True):
            if is_right and self._is_missing(chunk) and self._namespace.quarantine is None:
                self._commit(chunk, ref)
                held.append(chunk.stored.key)
            else:
                self._host.release(ref)
        self._namespace.write_back.add(held)
        self._tiers.inventory.announce(held, held=True)
        self._namespace.top_up_all()
        return len(pairs), [chunk for (chunk, _), is_right in zip(pairs, right, strict=True) if not is_right]

    def _commit(self, chunk: BundleChunk, ref: SlotRef) -> None:
        counters, stored = self._cache.resources.counters, chunk.stored
        if self._tiers.table.host.commit_store(stored.key, ref, stored.checksum):
            counters.remote_restored_chunks += 1
            counters.remote_restored_bytes += stored.raw_bytes
            self.result.num_chunks += 1
            self.result.num_bytes += stored.raw_bytes

    async def _rows(self, num_rows: int) -> list[SlotRef]:
        """Return at least one row."""
        for _ in range(int(_CAPACITY_S / POLL_S)):
            if not self._host.is_open:
                raise _EndedError(RestoreOutcome.ENDED, "the arena was closed")
            if refs := await self._host.allocate(num_rows):
                return refs
            await asyncio.sleep(POLL_S)
        raise _EndedError(RestoreOutcome.NO_CAPACITY, "host memory is full of chunks that are not on disk yet")

    @shielded
    async def _fill(self, pairs: Sequence[tuple[BundleChunk, SlotRef]], data: memoryview, start: int) -> list[bool]:
        return await self._cache.resources.in_io(self._decode_all, pairs, data, start)

    def _decode_all(self, pairs: Sequence[tuple[BundleChunk, SlotRef]], data: memoryview, start: int) -> list[bool]:
        """Worker thread: whether each chunk is in its row."""
        return [self._decode(chunk, ref, data, start) for chunk, ref in pairs]

    def _decode(self, chunk: BundleChunk, ref: SlotRef, data: memoryview, start: int) -> bool:
        stored = chunk.stored
        encoded = data[stored.offset - start : stored.offset - start + stored.stored_bytes]
        if hashlib.sha256(encoded).digest() != chunk.sha256:
            return False
        payload = self._host.payload(ref, stored.key)
        try:
            codec_by_name(stored.codec).decode(encoded, payload)
        except (CodecError, UnknownCodecError):
            return False
        return checksum_of(payload) == stored.checksum
