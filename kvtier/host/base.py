"""The contract of the host tier; `tests/contract/test_host_tier.py` has a test of each promise."""

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef, SlotState

__all__ = ["FreedOrphans", "HostTier", "HostUsage", "RunInThread", "SlotRef", "SlotState", "TaskOwner"]

P = ParamSpec("P")
T = TypeVar("T")


class HostUsage(NamedTuple):
    """How full a tier is.

    Attributes:
        row_bytes: Of each slot.
        num_slots: Slots in all.
        num_affordable: Those that the budget allows; an arena that was taken over may have more.
        num_owned: Slots in a state other than UNBACKED and FREE.
        num_free: FREE slots.
        num_backed: Slots with pages, which the budget counts.
        num_takable: FREE slots, and UNBACKED ones for which the budget has bytes now.
        num_orphans: ORPHAN slots.
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


class HostTier(Protocol):
    """Rows of shared memory for the chunks of one namespace: the only owner of their slots, pages and bytes.

    Each slot is in exactly one state. A slot is named by a `SlotRef`, its number at one generation; the generation
    rises each time that the slot gets an owner, so a ref of an earlier owner is refused. The tier says which state a
    slot is in; the chunk table says which chunk a HOST or LOADING slot belongs to, and calls `reserve`, `commit` and
    `release`.

        UNBACKED --allocate---------------------> GRANTED      UNBACKED --preallocate--> BACKING --> FREE
        FREE ------allocate---------------------> GRANTED      FREE --reclaim--> UNBACKED
        FREE, UNBACKED ------reserve------------> LOADING      (recover) --> ORPHAN

                      seal            commit
            GRANTED ---------> SEALING ------------> HOST
               |                                       ^
               | quarantine    LOADING --begin_load,---+
               v                         back, commit  |
          QUARANTINED           ORPHAN --verify,-------+
                                         commit

        GRANTED, SEALING, LOADING, HOST, QUARANTINED, ORPHAN --release--> FREE; UNBACKED if it never got its pages
        ORPHAN --free_orphans--> FREE or UNBACKED

    Owner of a slot, and so the only caller of what ends its state:

        UNBACKED, FREE   the tier; FREE slots keep their pages
        BACKING          the tier, until the call that makes its pages ends
        GRANTED          one session: its engine's processes may write the row, the daemon leaves it alone
        SEALING          the daemon's seal of that session: no process of the engine writes any longer
        LOADING          the promoter; its pages may be missing until `back`
        HOST             the chunk table: readable, by engines with a lease and by the daemon; ends with its eviction
        QUARANTINED      the lost session, until no process holds the session's lock file
        ORPHAN           the recovery: an engine of the previous daemon may still read or write the row

    What is in a HOST row survives the daemon: `commit` marks it in the arena for the next one. A mark goes before the
    row's owner changes, and a generation rises before the row's content does.

    All methods are for the loop thread and do not block, except `back` and `verify`, which are for worker threads.
    """

    @property
    def usage(self) -> HostUsage:
        """How full the tier is now."""
        ...

    @property
    def num_takable(self) -> int:
        """See `HostUsage`."""
        ...

    async def allocate(self, num_slots: int) -> list[SlotRef]:
        """Take slots for a session to write, with pages and with their generation set; they are GRANTED.

        First what is free, then new pages, then what eviction frees. Never raises for want of memory.

        Returns:
            As many as can be had, at most `num_slots`.
        """
        ...

    def reserve(self) -> SlotRef | None:
        """Take one slot to read a chunk into; it is LOADING. Evicts nothing and asks no one for memory.

        Its generation is no one's to know before `begin_load`: the next daemon may give it out again.

        Returns:
            None when no slot is FREE and no UNBACKED one affordable.
        """
        ...

    def ensure_takable(self, num_slots: int) -> None:
        """Ask other namespaces for memory if fewer than `num_slots` slots could be taken now. What comes of it shows
        in `num_takable`."""
        ...

    def lacks_pages(self, ref: SlotRef) -> bool:
        """Say whether a LOADING slot has to go through `back` before it is touched."""
        ...

    def begin_load(self, ref: SlotRef, key: ChunkKey) -> list[memoryview]:
        """Start a LOADING slot's generation: readers of an earlier one see that they lost it.

        Returns:
            Writable views of the chunk's bytes, in payload order; not to be touched while the slot lacks pages. They
            keep the mapping alive: drop them when the read is done.
        """
        ...

    def back(self, refs: Sequence[SlotRef]) -> int:
        """Make and map the pages of LOADING slots, in order. Worker thread; blocks about 0.3 ms per MiB.

        Returns:
            How many have them; fewer than asked for when memory ran out. The others stay LOADING without pages.

        Raises:
            ArenaError: The operating system refused for another reason; some may have got theirs.
        """
        ...

    def payload(self, ref: SlotRef, key: ChunkKey) -> list[memoryview]:
        """Return views of a chunk's bytes in its row. They keep the mapping alive: drop them soon."""
        ...

    def seal(self, ref: SlotRef) -> bool:
        """Take a GRANTED slot from its session; False, and nothing changes, when it is not so at that generation."""
        ...

    def verify(self, ref: SlotRef, key: ChunkKey) -> int | None:
        """Compute the checksum of a SEALING or ORPHAN row. Worker thread; blocks as long as reading it takes.

        Returns:
            None when it cannot hold the chunk: SEALING, and a writer has not stamped it with this key, generation and
            length; or ORPHAN, and it has not all of its pages.
        """
        ...

    def commit(self, ref: SlotRef, key: ChunkKey, checksum: int) -> None:
        """Mark that a SEALING, LOADING or ORPHAN row holds this chunk, whole and verified; it is HOST.

        Raises:
            ValueError: It is in another state, or at another generation.
        """
        ...

    def quarantine(self, ref: SlotRef) -> None:
        """The session of a GRANTED slot is lost: it is not to be given out until `release`.

        Raises:
            ValueError: It is in another state, or at another generation.
        """
        ...

    def release(self, ref: SlotRef) -> None:
        """Take a slot from its owner, after the mark that it may have; its pages stay.

        Raises:
            ValueError: It has no owner at this generation.
        """
        ...

    def reclaim(self, num_bytes: int, *, evict: bool = True) -> None:
        """Give the pages of FREE rows back to the system until `num_bytes` of the budget came free, or none is left.

        Nothing is given back while a previous daemon's engine may read any row, and less than asked for when the file
        system refuses: such rows stay FREE, with their pages.

        Args:
            num_bytes: What it comes to shows in the budget.
            evict: Evict chunks of this namespace when free rows do not suffice, those of pinned prompts last.
        """
        ...

    async def free_orphans(self, keep_bytes: int) -> FreedOrphans:
        """No process of the previous daemon's engines lives any longer: end its recovery, whatever became of its rows.

        Args:
            keep_bytes: ORPHAN rows of this many bytes become FREE, with their pages; the others UNBACKED. Rows whose
                pages the file system does not take back stay ORPHAN, for the next daemon.
        """
        ...

    def matches(self, ref: SlotRef, state: SlotState) -> bool:
        """Say whether the slot is in this state at this generation."""
        ...

    def counts(self) -> Counter[SlotState]:
        """Return how many slots are in each state; they add up to `num_slots`."""
        ...

    def check(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state."""
        ...


class RunInThread(Protocol):
    """Runs a short blocking call in a worker thread."""

    async def __call__(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the call returns."""
        ...


class TaskOwner(Protocol):
    """Runs coroutines to their end even if the caller is cancelled; see `kvtier/concurrency/tasks.py`."""

    def complete(self, name: str, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Return the coroutine's result."""
        ...
