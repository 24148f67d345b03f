"""Start after a crash: the arenas of a previous daemon are taken over, with the chunks that are verified.

Everything that has pages is an orphan first. A marked row is served once its bytes have been read and agree with the
mark and with the ledger. The rest is released when no process holds a session lock of the previous daemon any longer:
until then an engine of it may write there, and may read any row. Reading is safe (a slot's generation changes before
its content); taking pages away from under a reader is not, so none are taken until then. Of what is released then,
`preallocated_bytes` keep their pages, as free rows: an engine that comes back would have them made again.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from kvtier.concurrency.pauses import POLL_S
from kvtier.core.arena_format import NOT_COMING, ArenaGeometry, SlotEntry, key_tag_of
from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.slots import SlotRef
from kvtier.errors import ArenaError, TierIOError
from kvtier.host.arena import Arena, left_arenas, left_header
from kvtier.host.arena_tier import ORPHAN_BATCH_BYTES
from kvtier.host.session_locks import SessionLock
from kvtier.obs.log import LastProblem, log_event
from kvtier.prompts.book import PromptBook
from kvtier.prompts.prefetch import rank_pinned
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)


class OrphanRow(NamedTuple):
    """A row whose commit mark names this chunk and this checksum of its payload."""

    key: ChunkKey
    ref: SlotRef
    checksum: int


_ValuedRow = tuple[tuple[bool, float, int], Namespace, OrphanRow]
"""A row behind what it is worth to serve it soon."""


class ArenaRecovery:
    """Runs once per daemon, on the loop thread: `open` before anything is served, then `verify`, then `release`.

    Args:
        resources: Budget, counters, threads and configuration.
        namespaces: Those that the ledger has, by id.
        prompts: What is pinned, and how important it is.
        max_arenas: At most this many are taken over.
        top_up_all: Called when rows have come free.
    """

    def __init__(
        self,
        resources: Resources,
        namespaces: Mapping[str, Namespace],
        prompts: PromptBook,
        max_arenas: int,
        top_up_all: Callable[[], None],
    ) -> None:
        self._resources, self._namespaces, self._prompts = resources, namespaces, prompts
        self._max_arenas, self._top_up_all = max_arenas, top_up_all
        self._in_thread, self._counters = resources.in_io, resources.counters
        self._locks: list[SessionLock] = []
        self._lock_problem = LastProblem()
        self._recovering: list[Namespace] = []
        self._entries: dict[str, list[SlotEntry]] = {}

    async def open(self) -> None:
        """Map the arenas that fit a namespace, drop the others, and learn which sessions' locks are held.

        Reads headers and slot tables only, no rows. Of more arenas than there are descriptors for, those that were used
        last are taken over.
        """
        directory = self._resources.config.host.arena_dir
        self._locks = await self._in_thread(SessionLock.left_in, directory)
        found: list[tuple[Namespace, Path]] = []
        for path in await self._in_thread(left_arenas, directory):
            try:
                found.append((self._home_of(await self._in_thread(left_header, path), path), path))
            except ArenaError as error:
                await self._drop(path, error)
        found.sort(key=lambda each: each[0].seen_unix_s, reverse=True)
        for namespace, path in found:
            try:
                await self._take(namespace, path)
            except ArenaError as error:
                await self._drop(path, error)
        await self._ask_locks()

    async def _drop(self, path: Path, why: ArenaError) -> None:
        """Unlink the file; engines of the previous daemon that map it keep their mapping."""
        log_event(logger, "arena_dropped", level=logging.WARNING, problem=str(why))
        try:
            await self._in_thread(path.unlink, missing_ok=True)
        except OSError as error:
            log_event(logger, "arena_not_dropped", level=logging.WARNING, path=path, problem=str(error))

    async def _take(self, namespace: Namespace, path: Path) -> None:
        if namespace.host.is_open:
            raise ArenaError(f"{path} is a second arena of namespace {namespace.namespace_id}")
        if len(self._recovering) >= self._max_arenas:
            raise ArenaError(
                f"{path} is one more than the {self._max_arenas} arenas that this daemon's open files allow; raise the "
                "limit (`ulimit -n`; LimitNOFILE= in a systemd unit) to keep more models in memory"
            )
        gid = self._resources.config.server.gid
        arena = await self._in_thread(partial(Arena.reopen, path, namespace.layout, gid=gid))
        entries = await self._in_thread(arena.entries)
        backed = {entry.slot for entry in entries if entry.backed}
        namespace.host.recover(arena, [entry.generation for entry in entries], backed)
        self._recovering.append(namespace)
        self._entries[namespace.namespace_id] = [entry for entry in entries if entry.mark > NOT_COMING]

    def _home_of(self, geometry: ArenaGeometry, path: Path) -> Namespace:
        namespace = self._namespaces.get(geometry.namespace_id)
        if namespace is None:
            raise ArenaError(f"{path} belongs to namespace {geometry.namespace_id}, which is not in the ledger")
        if geometry.num_slots < 1 or namespace.host.usage.num_slots < 1:
            raise ArenaError(f"{path} has rows of {geometry.row_bytes} bytes, host.bytes is less")
        if geometry.num_slots < namespace.host.usage.num_slots:
            log_event(
                logger,
                "arena_smaller_than_host_bytes",
                level=logging.WARNING,
                path=path,
                slots=geometry.num_slots,
                possible=namespace.host.usage.num_slots,
                remedy="stop the daemon once, without host.keep_arena, to get an arena of the new size",
            )
        return namespace

    async def verify(self) -> None:
        """Read the marked rows, the most valuable first, and serve those whose bytes are right."""
        wanted = await self._marked_rows()
        while wanted:
            batch, num_bytes = list[tuple[Namespace, OrphanRow]](), 0
            while wanted and num_bytes < ORPHAN_BATCH_BYTES:
                batch.append(wanted.pop())
                num_bytes += batch[-1][0].layout.row_bytes
            intact = await self._in_thread(_intact, batch)
            self._commit(batch, intact)
        if self._recovering:
            rows, rejected = self._counters.orphan_slots_recovered, self._counters.orphan_slots_rejected
            log_event(logger, "orphan_rows_recovered", rows=rows, rejected=rejected)

    async def _marked_rows(self) -> list[tuple[Namespace, OrphanRow]]:
        """Return all rows to verify, the most valuable last. Engines attach meanwhile: threads do what takes long."""
        found: list[_ValuedRow] = []
        for namespace_id, entries in self._entries.items():
            namespace = self._namespaces[namespace_id]
            by_tag = await self._in_thread(index_by_tag, namespace.table.keys())
            rows, rejected = await self._in_thread(read_orphan_rows, entries, by_tag, namespace.layout)
            self._reject(namespace, rejected)
            rank = await rank_pinned(self._prompts, namespace_id)
            found += await self._in_thread(_valued, namespace, rows, rank)
        self._entries.clear()
        return await self._in_thread(_by_value, found)

    def _commit(self, batch: Sequence[tuple[Namespace, OrphanRow]], intact: Sequence[bool]) -> None:
        # host_bytes may be less than it was: then not all fit beside what stays.
        free_bytes = self._resources.budget.limit_bytes - self._taken_bytes()
        for (namespace, row), is_intact in zip(batch, intact, strict=True):
            chunk = namespace.table.get(row.key)
            location = chunk.location if chunk is not None else None
            if not is_intact or (location is not None and location.checksum != row.checksum):
                self._reject(namespace, [row.ref.slot])
                if chunk is not None and not chunk.held:
                    namespace.inventory.announce_lost([row.key], MissingCause.DROPPED_AS_DAMAGED)
            elif namespace.layout.row_bytes <= free_bytes and namespace.table.host.commit_orphan(*row):
                free_bytes -= namespace.layout.row_bytes
                self._counters.orphan_slots_recovered += 1
                namespace.recovered(row.key)

    def _taken_bytes(self) -> int:
        """Return what is taken beside orphans."""
        usages = [namespace.host.usage for namespace in self._recovering]
        return self._resources.budget.used_bytes - sum(usage.num_orphans * usage.row_bytes for usage in usages)

    def _reject(self, namespace: Namespace, slots: Sequence[int]) -> None:
        self._counters.orphan_slots_rejected += len(slots)
        for slot in slots:
            namespace.host.arena.uncommit(slot)
        if slots:
            path = namespace.host.arena.path
            log_event(logger, "orphan_rows_rejected", level=logging.WARNING, arena=path, rows=len(slots))

    async def release(self) -> int:
        """Wait until no process holds a lock of the previous daemon's sessions, then free what was not taken over.

        Returns:
            Rows that are free, or have no pages, since.
        """
        while self._locks:
            await asyncio.sleep(POLL_S)
            await self._ask_locks()
        # As much keeps its pages as would be made again for one engine.
        config, num_rows = self._resources.config.host, 0
        preallocated_bytes = min(config.preallocated_bytes, config.low_watermark_bytes - self._taken_bytes())
        for namespace in sorted(self._recovering, key=lambda each: (each.live, each.seen_unix_s), reverse=True):
            freed = await namespace.host.free_orphans(preallocated_bytes)
            preallocated_bytes -= freed.num_free * namespace.layout.row_bytes
            num_rows += freed.num_free + freed.num_unbacked
            self._top_up_all()
        self._recovering.clear()
        return num_rows

    async def _ask_locks(self) -> None:
        self._locks = await self._in_thread(_still_held, self._locks, self._lock_problem)


def index_by_tag(keys: Iterable[ChunkKey]) -> dict[int, ChunkKey | None]:
    """Return the key of each tag, None where two keys have one tag. About 0.5 us a key."""
    by_tag: dict[int, ChunkKey | None] = {}
    for key in keys:
        tag = key_tag_of(key)
        by_tag[tag] = None if tag in by_tag else key
    return by_tag


def read_orphan_rows(
    entries: Iterable[SlotEntry], by_tag: Mapping[int, ChunkKey | None], layout: KVLayout
) -> tuple[list[OrphanRow], list[int]]:
    """Find the chunk of every marked slot; return their rows, each chunk once, and the slots that are rejected.

    Rejected is a mark that does not fit its words, a tag that no known chunk has or that two have, a length that is not
    the chunk's, and a second row of one chunk.
    """
    rows, rejected, seen = list[OrphanRow](), list[int](), set[ChunkKey]()
    lengths = {group.group_idx: group.useful_bytes for group in layout.groups}
    for entry in entries:
        if not entry.mark:
            continue
        key = by_tag.get(entry.key_tag) if entry.committed and entry.backed else None
        if key is None or key in seen or entry.length != lengths.get(group_idx_of(key)):
            rejected.append(entry.slot)
            continue
        seen.add(key)
        rows.append(OrphanRow(key, SlotRef(entry.slot, entry.generation), entry.checksum))
    return rows, rejected


def _valued(namespace: Namespace, rows: Iterable[OrphanRow], rank: Mapping[ChunkKey, int]) -> list[_ValuedRow]:
    """Worker thread: what is pinned comes before the rest, then the namespace that was used last."""
    seen_unix_s = namespace.seen_unix_s
    return [((row.key in rank, seen_unix_s, rank.get(row.key, 0)), namespace, row) for row in rows]


def _by_value(found: Iterable[_ValuedRow]) -> list[tuple[Namespace, OrphanRow]]:
    """Worker thread: the most valuable last."""
    return [(namespace, row) for _, namespace, row in sorted(found, key=itemgetter(0))]


def _intact(batch: Iterable[tuple[Namespace, OrphanRow]]) -> list[bool]:
    """Worker thread: say of each row whether its bytes are those of its mark."""
    return [namespace.host.verify(row.ref, row.key) == row.checksum for namespace, row in batch]


def _still_held(locks: Iterable[SessionLock], last: LastProblem) -> list[SessionLock]:
    """Worker thread: return the locks that a process holds; the others' paths are gone."""
    held: list[SessionLock] = []
    problem = ""
    for lock in locks:
        try:
            if lock.released():
                continue
        except TierIOError as error:  # while it is unknown it may be held
            problem = str(error)
        held.append(lock)
    if last.becomes(problem):
        log_event(logger, "lock_unknown", level=logging.WARNING, problem=problem)
    return held
