"""The host tier: rows of shared memory for the chunks of one namespace, in an arena file while there is one.

`tests/contract/test_host_tier.py` has a test of each promise; `kvtier/core/slots.py` draws the states of a slot.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from kvtier.core.arena_format import num_slots_within, overhead_bytes
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.slots import HostBudget, SlotRef, SlotState, SlotTable
from kvtier.core.stored import checksum_of
from kvtier.errors import ArenaError, ArenaFullError
from kvtier.host.arena import Arena
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

ORPHAN_BATCH_BYTES = 32 * 1024**2
"""Some milliseconds of work; what it frees is of use at once."""
_PREALLOCATION_TIMEOUT_S = 0.1
"""Ten times what a slice of preallocated rows takes: threads may be held up by a disk that hangs."""


class RunInThread(Protocol):
    """Runs a short blocking call in a worker thread."""

    async def __call__(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the call returns."""
        ...


class HostUsage(NamedTuple):
    """How full a tier is, in slots of `row_bytes`.

    Attributes:
        num_affordable: Those that the budget allows; an arena that was taken over may have more.
        num_owned: Those in a state other than UNBACKED and FREE.
        num_backed: Those with pages, which the budget counts.
        num_takable: FREE slots, and UNBACKED ones for which the budget has bytes now.
        overhead_bytes: What the budget counts beside rows: header page and slot table.
    """

    row_bytes: int
    num_slots: int
    num_affordable: int
    num_owned: int
    num_free: int
    num_backed: int
    num_takable: int
    num_orphans: int
    overhead_bytes: int

    @property
    def held_bytes(self) -> int:
        """What the tier takes of the budget."""
        return self.overhead_bytes + self.num_backed * self.row_bytes

    @property
    def occupied_bytes(self) -> int:
        """The same without free rows, which are capacity."""
        return self.held_bytes - self.num_free * self.row_bytes


class FreedOrphans(NamedTuple):
    """What became of a previous daemon's rows: how many are FREE now, and how many UNBACKED."""

    num_free: int
    num_unbacked: int


class DetachedArena(NamedTuple):
    """An arena detached from its tier: the slots that still have pages, and all bytes that it takes."""

    arena: Arena
    backed: Sequence[int]
    num_bytes: int


class ArenaTier:
    """The only owner of the slots, pages and bytes of one namespace's rows.

    The tier knows which state a slot is in; the chunk table knows which chunk a HOST or LOADING slot belongs to. What
    is in a HOST row survives the daemon: `commit` marks it in the arena for the next one. A mark goes before the row's
    owner changes, and a generation rises before the row's content does. Workers wait for the mark of a LOADING row;
    when it is released instead, `NOT_COMING` says so.

    All methods are for the loop thread and do not block, except `back`, `mark_loaded` and `verify`, which are for
    worker threads. `commit`, `counts`, `check`, `lacks_pages`, `matches`, `quarantine`, `release`, `reserve` and `seal`
    are the slot table's.

    Args:
        budget: Shared by all namespaces.
        counters: Refusals of the operating system, and allocations that came up short.
        in_thread: Runs the calls that make pages.
        find_bytes: Asks other namespaces to reclaim until the budget has n free bytes, if it ever does.
        evict: Evicts up to n chunks of this namespace, those of pinned prompts last.
    """

    def __init__(
        self,
        namespace_id: str,
        layout: KVLayout,
        *,
        budget: HostBudget,
        counters: Counters,
        in_thread: RunInThread,
        find_bytes: Callable[[int], None],
        evict: Callable[[int], int],
    ) -> None:
        self.namespace_id, self.layout = namespace_id, layout
        self._budget, self._counters, self._in_thread = budget, counters, in_thread
        self._find_bytes, self._evict = find_bytes, evict
        num_slots = _num_possible_slots(budget, layout)

        def mark(ref: SlotRef, key: ChunkKey, checksum: int) -> None:
            self.arena.commit(ref.slot, key, ref.generation, checksum)

        self.slots = slots = SlotTable(num_slots, layout.row_bytes, budget, self._uncommit, mark)
        self.seal, self.commit = slots.seal, slots.commit
        self.quarantine, self.release, self.reserve = slots.quarantine, slots.release, slots.reserve
        self.lacks_pages, self.matches = slots.lacks_pages, slots.matches
        self.counts, self.check = slots.counts, slots.check
        self._arena: Arena | None = None
        self._overhead_bytes = 0  # of the arena, as far as it is counted
        self._preallocating = asyncio.Lock()  # held while free rows get their pages ahead of need, and look taken
        self._pages_stay = False  # the file system refused the last time that it was to drop pages
        self.recovering = False
        """A previous daemon's engine may be copying from any row: all keep their pages."""

    # The arena

    @property
    def is_open(self) -> bool:
        """There is an arena."""
        return self._arena is not None

    @property
    def arena(self) -> Arena:
        """The arena; only while it is open.

        Raises:
            ArenaError: It is not.
        """
        if self._arena is None:
            raise ArenaError(f"namespace {self.namespace_id} has no arena yet")
        return self._arena

    @property
    def needed_bytes(self) -> int:
        """Memory of its arena, if it had one, beside the rows: header page and slot table."""
        return overhead_bytes(self.slots.num_slots, self.layout.num_ranks)

    def open(self, directory: Path, gid: int | None = None) -> None:
        """Create the arena, which there is none of; chunks of others make way for its slot table if they can.

        Members of the group `gid` may map it too.

        Raises:
            ArenaFullError: host_bytes or the file system has no space for it.
            ArenaError: The file cannot be made.
        """
        needed_bytes = self.needed_bytes
        if needed_bytes > self._budget.free_bytes:
            self._find_bytes(needed_bytes)
        if not self._budget.reserve(needed_bytes):
            raise ArenaFullError(
                f"an arena of this model begins with a slot table of {needed_bytes} bytes; of host.bytes = "
                f"{self._budget.limit_bytes} other models take {self._budget.used_bytes}, of which nothing can be "
                "evicted now; raise host.bytes, or end an engine of another model"
            )
        try:
            self._arena = Arena.create(
                directory, self.layout, self.slots.num_slots, namespace_id=self.namespace_id, gid=gid
            )
        except ArenaError:
            self._budget.release(needed_bytes)
            raise
        self._overhead_bytes = needed_bytes

    def recover(self, arena: Arena, generations: Sequence[int], backed: Collection[int]) -> None:
        """Take over the arena of a previous daemon: its slots with pages are ORPHAN until `commit` or `free_orphans`.

        `generations` and `backed` are those of `SlotTable.resume`.
        """
        self._arena = arena
        self.slots.resume(generations, backed)
        self._overhead_bytes = self.needed_bytes
        self._budget.count(self._overhead_bytes)
        self.recovering = True

    def detach(self) -> DetachedArena | None:
        """Part with an arena of which no slot is owned, None when there is none such. No process uses it any longer.

        The tier is then as before its first arena. The budget counts what the arena takes until the caller releases it.
        """
        if self._arena is None or self.recovering or self.usage.num_owned:
            return None
        num_bytes, backed = self.usage.held_bytes, self.slots.reset(_num_possible_slots(self._budget, self.layout))
        detached = DetachedArena(self._arena, backed, num_bytes)
        self._arena, self._overhead_bytes, self._pages_stay = None, 0, False
        return detached

    def close(self, *, keep: bool) -> None:
        """Unmap the arena, if there is one; the budget counts it no longer. The tier is not used after that.

        `drop_pages` comes before it: else they stay for as long as a process of an engine maps the file.

        Args:
            keep: Leave the file to the next daemon. Not if it has fewer slots than a new one would get.
        """
        if self._arena is not None:
            self._arena.close(unlink=not _stays(self, keep))
            self._arena = None
            self._budget.release(self.usage.held_bytes)

    # How full it is

    @property
    def usage(self) -> HostUsage:
        """How full the tier is now."""
        slots = self.slots
        return HostUsage(
            row_bytes=slots.row_bytes,
            num_slots=slots.num_slots,
            num_affordable=min(slots.num_slots, self._budget.limit_bytes // slots.row_bytes),
            num_owned=slots.num_slots - slots.num_free - slots.num_unbacked,
            num_free=slots.num_free,
            num_backed=slots.num_slots - slots.num_unbacked,
            num_takable=slots.num_takable,
            num_orphans=slots.num_orphans,
            overhead_bytes=self._overhead_bytes,
        )

    @property
    def num_takable(self) -> int:
        """See `HostUsage`."""
        return self.slots.num_takable

    # Resources: allocate -> seal -> verify -> commit | release; quarantine -> release

    async def allocate(self, num_slots: int, *, for_engine: bool = True) -> list[SlotRef]:
        """Take slots to be written, with pages and with their generation set; they are GRANTED.

        First what is free, then new pages, then what eviction frees.

        Args:
            num_slots: Of rows.
            for_engine: An engine writes them, through a mapping of its own, and lacks store credits if there are fewer.
                Else the daemon writes them: new pages are mapped here.

        Returns:
            As many as can be had, at most `num_slots`; fewer when memory is short.
        """
        refs = self._take_free(num_slots)
        if len(refs) < num_slots:
            self.ensure_takable(num_slots - len(refs))
            new, problem = await self._take_new(
                num_slots - len(refs), SlotState.GRANTED, partial(self.back, mapped=not for_engine)
            )
            refs += new
            if problem is not None:
                log_event(logger, "arena_allocation_failed", level=logging.ERROR, problem=str(problem))
        if len(refs) < num_slots:  # rows that are being preallocated are free in a moment
            with suppress(TimeoutError):
                async with asyncio.timeout(_PREALLOCATION_TIMEOUT_S), self._preallocating:
                    pass
            refs += self._take_free(num_slots - len(refs))
        if len(refs) < num_slots:
            self._evict(num_slots - len(refs))
            refs += self._take_free(num_slots - len(refs))
        self._counters.store_credits_short += for_engine and len(refs) < num_slots
        return refs

    def _take_free(self, num_slots: int) -> list[SlotRef]:
        refs: list[SlotRef] = []
        while len(refs) < num_slots and (ref := self.slots.take(SlotState.GRANTED)) is not None:
            self.arena.set_generation(ref.slot, ref.generation)
            refs.append(ref)
        return refs

    async def _take_new(
        self, num_slots: int, state: SlotState, back: Callable[[Sequence[SlotRef]], int]
    ) -> tuple[list[SlotRef], ArenaError | None]:
        """Take slots without pages and make these; return those that have them, and why others have not."""
        refs: list[SlotRef] = []
        while len(refs) < num_slots and (ref := self.slots.take_unbacked(state)) is not None:
            refs.append(ref)
        problem: ArenaError | None = None
        try:
            if refs and await self._in_thread(back, refs) < len(refs):
                problem = ArenaFullError(f"{self.arena.path.parent} has no space for more rows of host.bytes")
        except ArenaError as error:
            problem = error
        backed = [ref for ref in refs if not self.slots.lacks_pages(ref)]
        for ref in backed:
            self.arena.set_generation(ref.slot, ref.generation)
        for ref in refs[len(backed) :]:
            self.slots.release(ref)
        if state is SlotState.GRANTED:  # a refusal counts when a row is needed
            self._counters.io_errors_host_populate += len(refs) - len(backed)
        return backed, problem

    def verify(self, ref: SlotRef, key: ChunkKey) -> int | None:
        """Compute the checksum of a SEALING or ORPHAN row. Worker thread; blocks as long as reading it takes.

        Returns:
            None when it cannot hold the chunk: SEALING, and a writer has not stamped it with this key, generation and
            length; or ORPHAN, and it has not all of its pages.
        """
        if self.slots.matches(ref, SlotState.ORPHAN):
            is_whole = self._back_orphans([ref]) == 1
        else:
            is_whole = self.arena.stamps_agree(ref.slot, key, ref.generation)
        return checksum_of(self.payload(ref, key)) if is_whole else None

    def _uncommit(self, slot: int) -> None:
        if self._arena is None:
            return
        if self.slots.state(slot) is SlotState.LOADING:
            self._arena.refuse(slot, self.slots.generation(slot))
        else:
            self._arena.uncommit(slot)

    # Loads: reserve -> begin_load -> back -> mark_loaded -> commit | release

    def ensure_takable(self, num_slots: int) -> None:
        """Ask other namespaces for memory if fewer than `num_slots` slots could be taken; `num_takable` shows if so."""
        if num_slots > self.slots.num_takable:
            num_new = min(num_slots - self.slots.num_free, self.slots.num_unbacked)
            if num_new > 0:
                self._find_bytes(num_new * self.layout.row_bytes)

    def begin_load(self, ref: SlotRef, key: ChunkKey) -> list[memoryview]:
        """Start a LOADING slot's generation: readers of an earlier one see that they lost it.

        Returns:
            See `payload`; not to be touched while the slot lacks pages.
        """
        self.arena.set_generation(ref.slot, ref.generation)
        return self.payload(ref, key)

    def back(self, refs: Sequence[SlotRef], *, mapped: bool = True) -> int:
        """Make the pages of owned slots, in order, and map them unless only an engine is to touch them. Worker thread.

        Returns:
            How many have them; fewer than asked for when memory ran out. The others stay as they are.

        Raises:
            ArenaError: The operating system refused for another reason; some may have got theirs.
        """
        num_backed = self.arena.back([ref.slot for ref in refs])
        if mapped:
            self.arena.populate([ref.slot for ref in refs[:num_backed]])
        for ref in refs[:num_backed]:
            self.slots.mark_backed(ref)
        return num_backed

    def mark_loaded(self, ref: SlotRef, key: ChunkKey, checksum: int) -> None:
        """Mark a LOADING row whose bytes are in place and verified: workers that wait for it copy it from now on.

        Worker thread. `commit` follows on the loop. If `release` does instead, what was copied meanwhile is the chunk
        all the same.
        """
        if self._arena is not None and self.slots.matches(ref, SlotState.LOADING):
            self._arena.commit(ref.slot, key, ref.generation, checksum)

    def payload(self, ref: SlotRef, key: ChunkKey) -> list[memoryview]:
        """Return writable views of a chunk's bytes, in payload order. They keep the mapping alive: drop them soon."""
        return self.arena.payload(ref.slot, group_idx_of(key))

    # Capacity

    async def preallocate(self, num_slots: int, back: Callable[[Sequence[SlotRef]], int]) -> bool:
        """Give up to `num_slots` UNBACKED slots their pages ahead of need: they are FREE then.

        A refusal is reported when a row is needed.

        Args:
            num_slots: As many as the budget allows.
            back: Calls `self.back`; worker thread.

        Returns:
            False when memory ran out.
        """
        async with self._preallocating:
            refs, problem = await self._take_new(num_slots, SlotState.BACKING, back)
            for ref in refs:
                self.slots.release(ref)
        return problem is None

    def reclaim(self, num_bytes: int, *, evict: bool = True) -> None:
        """Drop the pages of FREE rows until `num_bytes` of the budget came free, or no such row is left.

        None are dropped while a previous daemon's engine may read any row, and fewer than asked for when the file
        system refuses: such rows stay FREE, with their pages.

        Args:
            num_bytes: What it comes to shows in the budget.
            evict: Evict chunks of this namespace when free rows do not suffice, those of pinned prompts last.
        """
        if self.recovering:
            return
        row_bytes = self.layout.row_bytes
        if evict:
            if self._pages_stay:  # one row says whether it works again: no more chunks shall go for nothing
                num_bytes = min(num_bytes, row_bytes)
            num_short = -(-num_bytes // row_bytes) - self.slots.num_free
            if num_short > 0:
                self._evict(num_short)
        may_release = num_bytes > 0 and self.slots.num_free > 0
        try:
            self.slots.unback_free(-(-num_bytes // row_bytes), lambda slot: self.arena.unback([slot]))
            self._pages_stay = self._pages_stay and not may_release
        except ArenaError as error:  # it and the others keep their pages, and serve on
            self._counters.io_errors_host_release += 1
            if not self._pages_stay:
                log_event(logger, "arena_not_released", level=logging.ERROR, problem=str(error))
            self._pages_stay = True

    # Orphans

    async def free_orphans(self, keep_bytes: int) -> FreedOrphans:
        """No process of the previous daemon's engines lives any longer: end its recovery, whatever became of its rows.

        Args:
            keep_bytes: ORPHAN rows of this many bytes become FREE, with their pages; the others UNBACKED. Rows whose
                pages the file system does not take back stay ORPHAN, for the next daemon.
        """
        orphans = self.slots.orphans()
        num_kept = num_unbacked = 0
        for batch in self._batches(orphans[: max(0, keep_bytes) // self.layout.row_bytes]):
            num_backed = await self._in_thread(self._back_orphans, batch)
            for ref in batch[:num_backed]:
                self.slots.release(ref)
            num_kept += num_backed
            if num_backed < len(batch):
                break
        try:
            for batch in self._batches(orphans[num_kept:]):
                await self._in_thread(self.arena.unback, [ref.slot for ref in batch])
                for ref in batch:
                    self.slots.release(ref, without_pages=True)
                num_unbacked += len(batch)
        except ArenaError as error:  # the others stay orphans, and the next start tries again
            log_event(logger, "orphan_rows_not_released", level=logging.ERROR, problem=str(error))
        self.recovering = False  # not before: nothing may close the arena, or drop its pages, meanwhile
        return FreedOrphans(num_free=num_kept, num_unbacked=num_unbacked)

    def _batches(self, refs: Sequence[SlotRef]) -> Iterator[Sequence[SlotRef]]:
        num_rows = max(1, ORPHAN_BATCH_BYTES // self.layout.row_bytes)
        return (refs[start : start + num_rows] for start in range(0, len(refs), num_rows))

    def _back_orphans(self, refs: Sequence[SlotRef]) -> int:
        """Worker thread: see to it that rows have all their pages, mapped, in order; return how many do.

        Touching a page that is not there, and that the file system cannot supply, would be SIGBUS.
        """
        try:
            return self.back(refs)
        except ArenaError as error:
            log_event(logger, "arena_allocation_failed", level=logging.ERROR, problem=str(error))
            return 0


def drop_pages(tier: ArenaTier, *, keep: bool) -> bool:
    """Drop pages of an arena that `ArenaTier.close` will remove; nothing but that may follow. Worker thread.

    Its name goes first: if the daemon is killed meanwhile, the rest goes with the last process that maps it. No process
    may be in a row, so nothing is dropped while one of a previous daemon's engines may be.

    Args:
        tier: Whose arena it is; without one there is nothing to do.
        keep: As of `close`.

    Returns:
        Whether there are more: one call drops a part, in well under a second.
    """
    if not tier.is_open or tier.recovering or _stays(tier, keep):
        return False
    arena = tier.arena
    arena.path.unlink(missing_ok=True)
    backed = [entry.slot for entry in arena.entries() if entry.backed]
    num_rows = max(1, ORPHAN_BATCH_BYTES // arena.geometry.row_bytes)
    return drop_rows(arena, backed[:num_rows]) and len(backed) > num_rows


def drop_rows(arena: Arena, slots: Sequence[int]) -> bool:
    """Worker thread: drop the pages of rows of an arena that is being removed; False: refused, which is logged."""
    try:
        arena.unback(slots)
    except ArenaError as error:
        log_event(logger, "arena_not_released", level=logging.ERROR, problem=str(error))
        return False
    return True


def _stays(tier: ArenaTier, keep: bool) -> bool:
    return keep and tier.slots.num_slots >= _num_possible_slots(tier._budget, tier.layout)


def _num_possible_slots(budget: HostBudget, layout: KVLayout) -> int:
    return num_slots_within(budget.limit_bytes, layout.row_bytes, layout.num_ranks)
