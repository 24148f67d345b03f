"""Verify one prompt: every chunk in each tier is read, and its bytes are compared with its checksum.

Checksums are taken when a chunk is stored, before any tier has it. So equal checksums in memory and on disk mean equal
bytes, as far as xxh3 can say; what vLLM computed before that is for `kvtier.verification` to judge.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.concurrency.turns import BATCH_BYTES
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.core.stored import StoredChunk, checksum_of
from kvtier.errors import PromptNotBoundError, PromptNotFoundError
from kvtier.host.arena_tier import ArenaTier
from kvtier.ledger import PromptRow
from kvtier.obs.log import log_event
from kvtier.service import Cache
from kvtier.tiering.disk_verification import lies_there, verify_on_disk
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.pacing import MAX_YIELD_S

logger = logging.getLogger(__name__)

MAX_MOVES = 3
"""Times that a chunk is looked for again after compaction moved it while it was read."""


@dataclass
class VerifiedTier:
    """See VerifiedTier of proto/kvtier/v1/cache.proto."""

    num_verified_chunks: int = 0
    num_damaged_chunks: int = 0
    num_missing_chunks: int = 0
    num_refused_chunks: int = 0
    verified_bytes: int = 0


@dataclass(kw_only=True)
class VerifiedNamespace:
    """See VerifiedNamespace of proto/kvtier/v1/cache.proto."""

    namespace_id: str
    model: str
    num_chunks: int
    host: VerifiedTier = field(default_factory=VerifiedTier)
    disk: VerifiedTier = field(default_factory=VerifiedTier)
    num_lost_chunks: int = 0
    num_differing_chunks: int = 0


@dataclass(kw_only=True)
class VerifyReport:
    """See VerifyReport of proto/kvtier/v1/cache.proto."""

    name: str
    namespaces: list[VerifiedNamespace] = field(default_factory=list)
    seconds: float = 0.0


class PromptVerification:
    """Verifies one prompt at a time, a batch of chunks at a time. Loop thread only."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._one_at_a_time = asyncio.Lock()

    async def run(
        self, name: str, namespace_id: str = "", *, may_see: Callable[[PromptRow], bool] = lambda prompt: True
    ) -> VerifyReport:
        """Verify a prompt in one namespace or in all; a caller that is cancelled ends it.

        `may_see` says whether there is such a prompt for the caller.

        Raises:
            PromptNotFoundError: There is no such prompt.
            PromptNotBoundError: No namespace has it, or not the one that was named.
            LedgerError: The ledger refused to drop damaged chunks.
        """
        async with self._one_at_a_time:
            began_s, report = time.monotonic(), VerifyReport(name=name)
            prompt = self._cache.prompts.get(name)
            if not may_see(prompt):
                raise PromptNotFoundError(name)
            for row in self._cache.prompts.bindings_of(prompt.pin_id):
                namespace = self._cache.namespaces.get(row.namespace_id)
                if namespace is not None and namespace_id in ("", row.namespace_id):
                    report.namespaces.append(await self._verify(namespace, row.keys))
            if not report.namespaces:
                raise PromptNotBoundError(name, namespace_id)
            report.seconds = time.monotonic() - began_s
        _log(report)
        return report

    async def _verify(self, namespace: Namespace, keys: Sequence[ChunkKey]) -> VerifiedNamespace:
        found = VerifiedNamespace(namespace_id=namespace.namespace_id, model=namespace.row.model, num_chunks=len(keys))
        for batch in _batches(namespace, keys):
            if self._cache.namespaces.get(namespace.namespace_id) is not namespace:  # ephemeral, and ended meanwhile
                break
            await self._verify_host(namespace, batch, found)
            await self._verify_disk(namespace, batch, found)
            _compare_tiers(namespace, batch, found)
            found.num_lost_chunks += sum(not namespace.table.holds(key) for key in batch)
        return found

    async def _verify_host(self, namespace: Namespace, keys: Sequence[ChunkKey], found: VerifiedNamespace) -> None:
        """Read rows under a lease, so that none is evicted, or filled again, meanwhile."""
        table, leased = namespace.table, list[Chunk]()
        rows: list[tuple[SlotRef, ChunkKey]] = []
        for key in keys:
            chunk = table.get(key)
            if chunk is None or not chunk.readable or chunk.eviction_pending or chunk.slot is None:
                found.host.num_missing_chunks += 1
                continue
            table.host.lease(chunk)
            leased.append(chunk)
            rows.append((chunk.slot, key))
        try:
            checksums = await self._cache.resources.in_io(_checksums, namespace.host, rows) if rows else []
            damaged = [
                chunk
                for chunk, checksum in zip(leased, checksums, strict=True)
                if chunk.host is not None and chunk.host.checksum != checksum
            ]
            found.host.num_verified_chunks += len(leased) - len(damaged)
            found.host.num_damaged_chunks += len(damaged)
            found.host.verified_bytes += namespace.layout.total_payload_bytes([chunk.key for chunk in leased])
            self._drop_damaged(namespace, damaged)
        finally:
            table.host.unlease(leased)

    def _drop_damaged(self, namespace: Namespace, damaged: Sequence[Chunk]) -> None:
        """Evict rows as soon as nothing reads them; what is on disk too is still held."""
        if not damaged:
            return
        self._cache.resources.counters.damaged_chunks_host += len(damaged)
        problem = f"{len(damaged)} rows of {namespace.host.arena.path} do not have the bytes that were stored"
        log_event(logger, "host_chunks_damaged", level=logging.ERROR, problem=problem)
        for chunk in damaged:
            namespace.table.host.evict_when_unprotected(chunk.key)
        lost = [chunk.key for chunk in damaged if not chunk.on_disk]
        namespace.inventory.announce_lost(lost, MissingCause.DROPPED_AS_DAMAGED)

    async def _verify_disk(self, namespace: Namespace, keys: Sequence[ChunkKey], found: VerifiedNamespace) -> None:
        """Read from disk what is there, and again what compaction moved meanwhile."""
        resources, wanted = self._cache.resources, _places(namespace, keys)
        found.disk.num_missing_chunks += len(keys) - len(wanted)
        for _ in range(MAX_MOVES):
            if not wanted:
                break
            await resources.request_reads.until_quiet(MAX_YIELD_S)  # under constant traffic it comes to its end, too
            verified = await verify_on_disk(resources, namespace.tiers, wanted, to_its_end=True)
            refused = {stored.key for stored, _ in verified.refused}
            damaged = {stored.key for stored in verified.damaged}
            right = [
                stored
                for stored in verified.read
                if stored.key not in refused | damaged and lies_there(namespace.tiers, stored)
            ]
            moved = list({stored.key for stored in verified.read} - refused - damaged - {each.key for each in right})
            found.disk.num_refused_chunks += len(refused)
            found.disk.num_damaged_chunks += len(damaged)
            found.disk.num_verified_chunks += len(right)
            found.disk.verified_bytes += verified.raw_bytes
            wanted = _places(namespace, moved)
            found.disk.num_missing_chunks += len(moved) - len(wanted)
        found.disk.num_refused_chunks += len(wanted)


def _batches(namespace: Namespace, keys: Sequence[ChunkKey]) -> Iterator[Sequence[ChunkKey]]:
    """Yield keys of about BATCH_BYTES of payload, at least one."""
    num_keys = max(1, BATCH_BYTES // namespace.layout.row_bytes)
    return (keys[start : start + num_keys] for start in range(0, len(keys), num_keys))


def _checksums(host: ArenaTier, rows: Iterable[tuple[SlotRef, ChunkKey]]) -> list[int]:
    """Worker thread: compute the checksums of leased rows."""
    return [checksum_of(host.payload(ref, key)) for ref, key in rows]


def _places(namespace: Namespace, keys: Sequence[ChunkKey]) -> list[StoredChunk]:
    return [place for chunk in namespace.table.known(keys) if (place := chunk.location) is not None]


def _compare_tiers(namespace: Namespace, keys: Sequence[ChunkKey], found: VerifiedNamespace) -> None:
    """Drop the copy in memory of chunks that have other bytes on disk, as a start does: the durable copy counts."""
    differing = [
        chunk.key
        for chunk in namespace.table.known(keys)
        if chunk.host is not None
        and chunk.readable
        and not chunk.eviction_pending
        and (place := chunk.location) is not None
        and place.checksum != chunk.host.checksum
    ]
    if differing:
        found.num_differing_chunks += len(differing)
        log_event(logger, "chunks_differ", level=logging.WARNING, chunks=len(differing), model=namespace.row.model)
        for key in differing:
            namespace.table.host.evict_when_unprotected(key)


def _log(report: VerifyReport) -> None:
    num_damaged = sum(
        each.host.num_damaged_chunks + each.disk.num_damaged_chunks + each.num_differing_chunks
        for each in report.namespaces
    )
    log_event(
        logger,
        "prompt_verified",
        level=logging.WARNING if num_damaged else logging.INFO,
        name=report.name,
        chunks=sum(each.num_chunks for each in report.namespaces),
        damaged=num_damaged,
        lost=sum(each.num_lost_chunks for each in report.namespaces),
        seconds=report.seconds,
    )
