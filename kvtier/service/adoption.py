"""Start after a crash: the arenas that a dead daemon left are taken over, with the chunks that are provably in them.

Everything that has pages is quarantined first. A marked row is served once its bytes have been read and agree with the
mark and with the ledger. The rest is given back when no process holds a session lock of the dead daemon any more: until
then an engine of it may write there, and may read any row. Reading is safe (a slot's generation changes before its
content); taking pages away from under a reader is not, so none are taken until then. Of what is given back then,
`spare_bytes` keep their pages, as free rows: an engine that comes back would have them made again.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.core.adoption import LeftRow, index_by_tag, read_left_rows
from kvtier.core.arena_format import ArenaGeometry, SlotEntry
from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier.core.slots import SlotState
from kvtier.disk.base import checksum_of
from kvtier.errors import ArenaError, TierIOError
from kvtier.host.arena import Arena, left_arenas, left_header
from kvtier.host.session_locks import SessionLock
from kvtier.obs.log import log_event
from kvtier.service.prompts import PromptBook
from kvtier.service.stores import Stores
from kvtier.service.turns import Breather, slices

if TYPE_CHECKING:
    from kvtier.service.namespace import Namespace

logger = logging.getLogger(__name__)

_LOCK_POLL_S = 0.1
_BATCH_BYTES = 32 * 1024**2


class Adoption:
    """Runs once per daemon, on the loop thread: `open` before anything is served, then `verify`, then `release`."""

    def __init__(
        self, stores: Stores, namespaces: Mapping[str, "Namespace"], prompts: PromptBook, max_arenas: int
    ) -> None:
        self._stores = stores
        self._namespaces = namespaces
        self._prompts = prompts
        self._max_arenas = max_arenas
        self._locks: list[SessionLock] = []
        self._left: dict[str, set[int]] = {}  # by namespace: slots with pages that are not adopted
        self._entries: dict[str, list[SlotEntry]] = {}

    async def open(self, directory: Path) -> None:
        """Map the arenas that fit a namespace, drop the others, and learn which sessions have not let go.

        Reads headers and slot tables only, no rows. Of more arenas than there are descriptors for, those that were used
        last are taken over.
        """
        self._locks = await self._stores.in_io(SessionLock.left_in, directory)
        found: list[tuple[Namespace, Path]] = []
        for path in await self._stores.in_io(left_arenas, directory):
            try:
                found.append((self._home_of(await self._stores.in_io(left_header, path), path), path))
            except ArenaError as error:
                await self._drop(path, error)
        found.sort(key=lambda each: each[0].row.seen_unix_s, reverse=True)
        for namespace, path in found:
            try:
                await self._take(namespace, path)
            except ArenaError as error:
                await self._drop(path, error)
        await self._ask_locks()

    async def _drop(self, path: Path, why: ArenaError) -> None:
        """Take the file's name away; engines of the dead daemon that map it keep their mapping."""
        log_event(logger, "arena_dropped", level=logging.WARNING, problem=str(why))
        await self._stores.in_io(_unlink, path)

    async def _take(self, namespace: "Namespace", path: Path) -> None:
        if namespace.has_arena:
            raise ArenaError(f"{path} is a second arena of namespace {namespace.namespace_id}")
        if len(self._left) >= self._max_arenas:
            raise ArenaError(
                f"{path} is one more than the {self._max_arenas} arenas that this daemon's open files allow; raise the "
                "limit (`ulimit -n`; LimitNOFILE= in a systemd unit) to keep more models in memory"
            )
        arena, entries = await self._stores.in_io(_reopen, namespace, path)
        backed = {entry.slot for entry in entries if entry.backed}
        namespace.adopt_arena(arena, [entry.generation for entry in entries], backed)
        self._left[namespace.namespace_id] = backed
        self._entries[namespace.namespace_id] = [entry for entry in entries if entry.mark]

    def _home_of(self, geometry: ArenaGeometry, path: Path) -> "Namespace":
        namespace = self._namespaces.get(geometry.namespace_id)
        if namespace is None:
            raise ArenaError(f"{path} belongs to namespace {geometry.namespace_id}, which is not in the ledger")
        if geometry.num_slots < 1 or namespace.slots.num_slots < 1:
            raise ArenaError(f"{path} has rows of {geometry.row_bytes} bytes, host.bytes is less")
        if geometry.num_slots < namespace.slots.num_slots:
            log_event(
                logger,
                "arena_smaller_than_host_bytes",
                level=logging.WARNING,
                path=path,
                slots=geometry.num_slots,
                possible=namespace.slots.num_slots,
                remedy="stop the daemon once, to get an arena of the new size",
            )
        return namespace

    async def verify(self) -> None:
        """Read the marked rows, the most valuable first, and serve those whose bytes are right."""
        wanted = await self._marked_rows()
        while wanted:
            batch, num_bytes = list[tuple["Namespace", LeftRow]](), 0
            while wanted and num_bytes < _BATCH_BYTES:
                batch.append(wanted.pop())
                num_bytes += batch[-1][0].layout.row_bytes
            intact = await self._stores.in_io(_intact, batch)
            self._settle(batch, intact)
        counters = self._stores.counters
        if self._left:
            log_event(logger, "adopted", slots=counters.slots_adopted, doubtful=counters.slots_doubtful)

    async def _marked_rows(self) -> list[tuple["Namespace", LeftRow]]:
        """Return all rows to verify, the most valuable last."""
        found: list[tuple[tuple[bool, float, int], Namespace, LeftRow]] = []
        for namespace_id, entries in self._entries.items():
            namespace = self._namespaces[namespace_id]
            known = [chunk.key for chunk in namespace.table if chunk.location is not None or chunk.num_pins]
            by_tag = await self._stores.in_io(index_by_tag, known)
            left = read_left_rows(entries, by_tag, namespace.layout)
            self._doubt(namespace, left.doubtful)
            rank = await self._rank(namespace_id)
            for row in left.rows:
                value = (row.key in rank, namespace.row.seen_unix_s, rank.get(row.key, 0))
                found.append((value, namespace, row))
        self._entries.clear()
        found.sort(key=lambda item: item[0])
        return [(namespace, row) for _, namespace, row in found]

    async def _rank(self, namespace_id: str) -> dict[ChunkKey, int]:
        """Return the pinned chunks, each with a number: the more important, the higher."""
        rank: dict[ChunkKey, int] = {}
        breather = Breather()
        for row in self._prompts.pinned_bindings(namespace_id):
            for part in slices(row.keys):
                rank.update((key, -number) for number, key in enumerate(part, len(rank)))
                await breather.pause()
        return rank

    def _settle(self, batch: Sequence[tuple["Namespace", LeftRow]], intact: Sequence[bool]) -> None:
        for (namespace, row), is_intact in zip(batch, intact, strict=True):
            chunk = namespace.table.get(row.key)
            location = chunk.location if chunk is not None else None
            if not is_intact or (location is not None and location.checksum != row.checksum):
                self._doubt(namespace, [row.ref.slot])
            elif self._fits(namespace) and namespace.table.adopt(row.key, row.ref, row.checksum):
                self._left[namespace.namespace_id].discard(row.ref.slot)
                self._stores.counters.slots_adopted += 1
                namespace.spiller.add([row.key])
                namespace.announce([row.key] if location is None else [], held=True)

    def _fits(self, namespace: "Namespace") -> bool:
        """Say whether host_bytes, which may be less than it was, has room beside what stays."""
        return self._taken_bytes() + namespace.layout.row_bytes <= self._stores.budget.limit_bytes

    def _taken_bytes(self) -> int:
        """Return what rows take beside those that are left."""
        left_bytes = sum(
            len(slots) * self._namespaces[namespace_id].layout.row_bytes for namespace_id, slots in self._left.items()
        )
        return self._stores.budget.used_bytes - left_bytes

    def _doubt(self, namespace: "Namespace", slots: Sequence[int]) -> None:
        self._stores.counters.slots_doubtful += len(slots)
        for slot in slots:
            namespace.arena.uncommit(slot)
        if slots:
            log_event(logger, "slots_doubtful", level=logging.WARNING, arena=namespace.arena.path, slots=len(slots))

    async def release(self) -> int:
        """Wait until no process holds a lock of the dead daemon's sessions, then let go of what was not adopted.

        Returns:
            Rows that are free, or have no pages, since.
        """
        while self._locks:
            await asyncio.sleep(_LOCK_POLL_S)
            await self._ask_locks()
        num_rows, spare_bytes = 0, self._spare_bytes()
        for namespace in sorted(map(self._namespaces.__getitem__, self._left), key=_last_seen, reverse=True):
            rows = sorted(self._left[namespace.namespace_id])
            num_kept = await self._keep_free(namespace, rows[: spare_bytes // namespace.layout.row_bytes])
            spare_bytes -= num_kept * namespace.layout.row_bytes
            num_rows += num_kept + await self._give_back(namespace, rows[num_kept:])
            namespace.keep_pages = False  # not before: nobody else may close the arena, or give up its pages, meanwhile
            namespace.top_up_all()
        self._left.clear()
        return num_rows

    def _spare_bytes(self) -> int:
        """Return how much of what is left may keep its pages: as much as would be made again for one engine."""
        config = self._stores.config.host
        return max(0, min(config.spare_bytes, config.low_watermark_bytes - self._taken_bytes()))

    async def _keep_free(self, namespace: "Namespace", slots: Sequence[int]) -> int:
        """Make free rows of slots, in order; return of how many."""
        for start, batch in _batches(namespace, slots):
            num_backed = await self._stores.in_io(_backed, namespace.arena, batch)
            for slot in batch[:num_backed]:
                assert namespace.slots.state(slot) is SlotState.QUARANTINED
                namespace.slots.free(slot)
            if num_backed < len(batch):
                return start + num_backed
        return len(slots)

    async def _give_back(self, namespace: "Namespace", slots: Sequence[int]) -> int:
        for start, batch in _batches(namespace, slots):
            try:
                await self._stores.in_io(namespace.arena.unback, batch)
            except ArenaError as error:  # they stay quarantined, and the next start tries again
                log_event(logger, "left_rows_not_released", level=logging.ERROR, problem=str(error))
                return start
            for slot in batch:
                assert namespace.slots.state(slot) is SlotState.QUARANTINED
                namespace.slots.discard(slot)
        return len(slots)

    async def _ask_locks(self) -> None:
        self._locks = await self._stores.in_io(_still_held, self._locks)


def _batches(namespace: "Namespace", slots: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield where each begins, and its slots: some milliseconds of work, and what they free is of use at once."""
    num_rows = max(1, _BATCH_BYTES // namespace.layout.row_bytes)
    for start in range(0, len(slots), num_rows):
        yield start, slots[start : start + num_rows]


def _last_seen(namespace: "Namespace") -> tuple[bool, float]:
    return namespace.live, namespace.row.seen_unix_s


def _reopen(namespace: "Namespace", path: Path) -> tuple[Arena, list[SlotEntry]]:
    """Worker thread."""
    arena = Arena.reopen(path, namespace.layout)
    return arena, arena.entries()


def _intact(batch: Iterable[tuple["Namespace", LeftRow]]) -> list[bool]:
    """Worker thread: say of each row whether its bytes are those of its mark."""
    return [_is_intact(namespace.arena, row) for namespace, row in batch]


def _is_intact(arena: Arena, row: LeftRow) -> bool:
    has_pages = _backed(arena, [row.ref.slot]) == 1
    return has_pages and checksum_of(arena.payload(row.ref.slot, group_idx_of(row.key))) == row.checksum


def _backed(arena: Arena, slots: Sequence[int]) -> int:
    """Worker thread: see to it that rows have all their pages, mapped, in order; return how many do.

    Touching a page that is not there, and that the file system cannot supply, would be SIGBUS.
    """
    try:
        num_backed = arena.back(slots)
    except ArenaError as error:
        log_event(logger, "arena_not_backed", level=logging.ERROR, problem=str(error))
        return 0
    arena.populate(slots[:num_backed])
    return num_backed


def _still_held(locks: Iterable[SessionLock]) -> list[SessionLock]:
    """Worker thread: return the locks that somebody holds; the others' paths are gone."""
    return [lock for lock in locks if not _let_go(lock)]


def _let_go(lock: SessionLock) -> bool:
    try:
        return lock.released()
    except TierIOError as error:  # who knows nothing waits
        log_event(logger, "lock_unknown", level=logging.WARNING, problem=str(error))
        return False


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log_event(logger, "arena_not_dropped", level=logging.WARNING, path=path, problem=str(error))
