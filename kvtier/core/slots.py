"""Arena slots of one namespace: who owns each, at which generation, and how many bytes the host tier has given out.

Each slot is in exactly one state, and the counts of all states add up to `num_slots` (`check`). A slot is named by a
`SlotRef`, its number at one generation. The generation rises each time that the slot gets an owner, so a ref of an
earlier owner is refused. `kvtier.host.arena_tier.ArenaTier`, the only owner of a `SlotTable`, makes and drops pages:

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
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

from kvtier.core.layout import ChunkKey


class SlotState(Enum):
    """What a slot is used for, and who alone may end that."""

    UNBACKED = auto()
    """It has no pages: to back it takes bytes of the budget. The tier's."""
    FREE = auto()
    """It has pages and no owner. The tier's."""
    BACKING = auto()
    """It gets its pages ahead of need. The tier's, until the call that makes them ends."""
    GRANTED = auto()
    """A session's store credit: processes of its engine may write the row, the daemon leaves it alone."""
    SEALING = auto()
    """Written, and no process of the engine writes any longer; the session verifies stamps and checksum."""
    LOADING = auto()
    """The promoter reads a chunk from disk into it, or is about to; its pages may be missing until `back`."""
    HOST = auto()
    """It holds a readable chunk of the chunk table, which evicts it. Engines with a lease and the daemon read it."""
    QUARANTINED = auto()
    """Its session is lost, and owns it until no process of that engine, which may still write, holds the lock file."""
    ORPHAN = auto()
    """The recovery's: a previous daemon left it, and an engine of that daemon may still read or write the row."""


class SlotRef(NamedTuple):
    """An arena slot at one generation."""

    slot: int
    generation: int


# Tuples, not sets: an enum's hash is a call in Python, for every chunk.
_COMMITTED_FROM = (SlotState.SEALING, SlotState.LOADING, SlotState.ORPHAN)
_OWNED = tuple(state for state in SlotState if state not in (SlotState.FREE, SlotState.UNBACKED))


class HostBudget:
    """Bytes of arenas, over all namespaces, against `host_bytes`: backed rows, header pages and slot tables."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be backed."""
        return self.limit_bytes - self.used_bytes

    def reserve(self, num_bytes: int) -> bool:
        """Count `num_bytes` as used if they fit; say whether they did."""
        if num_bytes > self.free_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def count(self, num_bytes: int) -> None:
        """Count `num_bytes` that are used whether they fit or not: a previous daemon's arena has its pages."""
        self.used_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count `num_bytes` as unused again."""
        self.used_bytes -= num_bytes


class SlotTable:
    """States and generations of one arena's slots. Loop thread only; decides, touches no memory.

    Args:
        num_slots: Rows of the arena.
        row_bytes: Bytes of a row.
        budget: Shared by all namespaces.
        on_free: Called with every owned slot before it loses its owner: what it held must not be found any longer.
        on_commit: Called with slot, key and checksum once a slot is HOST: what it holds may be found from now on.
    """

    def __init__(
        self,
        num_slots: int,
        row_bytes: int,
        budget: HostBudget,
        on_free: Callable[[int], None] = lambda slot: None,
        on_commit: Callable[[SlotRef, ChunkKey, int], None] = lambda ref, key, checksum: None,
    ) -> None:
        self.num_slots, self.row_bytes = num_slots, row_bytes
        self._budget, self._on_free, self._on_commit = budget, on_free, on_commit
        self._free: list[int] = []
        self._unbacked: list[int] = []
        self._num_untouched = num_slots  # slots num_slots-_num_untouched.. were never used: no list of them is kept
        self._states: dict[int, SlotState] = {}  # neither FREE nor UNBACKED
        self._pageless: set[int] = set()  # owned, and their owner has not backed them yet
        self._generations: dict[int, int] = {}
        self.num_orphans = 0
        """Slots with pages that a previous daemon left, and that were neither committed nor released since."""

    def resume(self, generations: Sequence[int], backed: Iterable[int]) -> None:
        """Take up the slots of an arena that a previous daemon left; only while no slot was ever taken.

        Args:
            generations: Of every slot; they go on from there, and their number is that of the slots from now on.
            backed: Slots that have pages, or may have: orphans, which count whether they fit the budget or not.
        """
        if self._num_untouched != self.num_slots:
            raise ValueError("slots are in use already")
        self._states = dict.fromkeys(backed, SlotState.ORPHAN)
        self.num_orphans = len(self._states)
        self._generations = {slot: generation for slot, generation in enumerate(generations) if generation}
        num_touched = 1 + max([-1, *self._states, *self._generations])
        self.num_slots, self._num_untouched = len(generations), len(generations) - num_touched
        self._unbacked = [slot for slot in range(num_touched) if slot not in self._states]
        self._budget.count(self.row_bytes * len(self._states))

    def reset(self, num_slots: int) -> list[int]:
        """Begin as a new arena of `num_slots` rows, none of which has pages; only while no slot is owned.

        Returns:
            Slots of the old arena that have pages. The budget still counts them.
        """
        if self._states:
            raise ValueError(f"{len(self._states)} slots are in use")
        backed, self._free, self._unbacked, self._generations = self._free, [], [], {}
        self.num_slots = self._num_untouched = num_slots
        return backed

    def orphans(self) -> list[SlotRef]:
        """Return those that `num_orphans` counts, in the order of their slots."""
        slots = sorted(slot for slot, state in self._states.items() if state is SlotState.ORPHAN)
        return [SlotRef(slot, self.generation(slot)) for slot in slots]

    @property
    def num_free(self) -> int:
        """Backed slots without an owner."""
        return len(self._free)

    @property
    def num_unbacked(self) -> int:
        """Slots without pages."""
        return len(self._unbacked) + self._num_untouched

    @property
    def num_takable(self) -> int:
        """FREE slots, and UNBACKED ones for which the budget has bytes now."""
        return self.num_free + min(self.num_unbacked, max(0, self._budget.free_bytes) // self.row_bytes)

    def state(self, slot: int) -> SlotState | None:
        """Return the state of an owned slot, None when it is free or unbacked."""
        return self._states.get(slot)

    def generation(self, slot: int) -> int:
        """Return the slot's generation: 0 until it is first taken."""
        return self._generations.get(slot, 0)

    def take(self, state: SlotState) -> SlotRef | None:
        """Give out a backed free slot at a new generation, None when there is none."""
        return self._own(self._free.pop(), state) if self._free else None

    def take_unbacked(self, state: SlotState) -> SlotRef | None:
        """Give out a slot that the caller must back before use; None when slots or budget are exhausted."""
        if not self.num_unbacked or not self._budget.reserve(self.row_bytes):
            return None
        if self._unbacked:
            slot = self._unbacked.pop()
        else:
            slot = self.num_slots - self._num_untouched
            self._num_untouched -= 1
        self._pageless.add(slot)
        return self._own(slot, state)

    def reserve(self) -> SlotRef | None:
        """Take a slot to read a chunk into; it is LOADING. Evicts nothing and asks no one for memory.

        Its generation is known to no one before `begin_load`: the next daemon may give it out again.

        Returns:
            None when no slot is FREE and no UNBACKED one affordable.
        """
        return self.take(SlotState.LOADING) or self.take_unbacked(SlotState.LOADING)

    def lacks_pages(self, ref: SlotRef) -> bool:
        """Say whether an owned slot has to go through `back` before it is touched."""
        return ref.slot in self._pageless

    def mark_backed(self, ref: SlotRef) -> None:
        """The slot's pages exist now. Its owner calls this in whatever thread backed it: one atomic step."""
        self._pageless.discard(ref.slot)

    def _own(self, slot: int, state: SlotState) -> SlotRef:
        self._generations[slot] = generation = self._generations.get(slot, 0) + 1
        self._states[slot] = state
        return SlotRef(slot, generation)

    def matches(self, ref: SlotRef, state: SlotState) -> bool:
        """Say whether the slot is in this state at this generation."""
        return self._states.get(ref.slot) is state and self.generation(ref.slot) == ref.generation

    def seal(self, ref: SlotRef) -> bool:
        """Take a GRANTED slot from its session; False, and nothing changes, when it is not so at that generation."""
        if not self.matches(ref, SlotState.GRANTED):
            return False
        self._states[ref.slot] = SlotState.SEALING
        return True

    def commit(self, ref: SlotRef, key: ChunkKey, checksum: int) -> None:
        """The SEALING, LOADING or ORPHAN slot holds this chunk, whole and verified; it is HOST.

        Raises:
            ValueError: It is in another state, or at another generation.
        """
        self._check_owned(ref, _COMMITTED_FROM)
        self.num_orphans -= self._states[ref.slot] is SlotState.ORPHAN
        self._states[ref.slot] = SlotState.HOST
        self._on_commit(ref, key, checksum)

    def quarantine(self, ref: SlotRef) -> None:
        """The session of a GRANTED slot is lost: it is not given out again until `release`.

        Raises:
            ValueError: It is in another state, or at another generation.
        """
        self._check_owned(ref, (SlotState.GRANTED,))
        self._states[ref.slot] = SlotState.QUARANTINED

    def _check_owned(self, ref: SlotRef, states: tuple[SlotState, ...]) -> None:
        state, now = self._states.get(ref.slot), self.generation(ref.slot)
        if state not in states or now != ref.generation:
            is_now = f"{state.name.lower() if state else 'free'} at generation {now}"
            raise ValueError(f"slot {ref.slot} at generation {ref.generation} is {is_now}")

    def release(self, ref: SlotRef, *, without_pages: bool = False) -> None:
        """Take a slot from its owner, after its mark: it is free, or unbacked when it never got its pages.

        Args:
            ref: As it was given out.
            without_pages: The caller has dropped its pages: it is unbacked.

        Raises:
            ValueError: It has no owner at this generation.
        """
        self._check_owned(ref, _OWNED)
        slot = ref.slot
        self._on_free(slot)
        self.num_orphans -= self._states.pop(slot) is SlotState.ORPHAN
        if slot in self._pageless or without_pages:
            self._pageless.discard(slot)
            self._unbacked.append(slot)
            self._budget.release(self.row_bytes)
        else:
            self._free.append(slot)

    def unback_free(self, max_slots: int, drop_pages: Callable[[int], None]) -> None:
        """Turn up to `max_slots` free slots into unbacked ones; ends where `drop_pages` raises, which is passed on."""
        for _ in range(min(max_slots, len(self._free))):
            drop_pages(self._free[-1])
            self._unbacked.append(self._free.pop())
            self._budget.release(self.row_bytes)

    def counts(self) -> Counter[SlotState]:
        """Return how many slots are in each state."""
        counts = Counter(self._states.values())
        counts[SlotState.FREE] = self.num_free
        counts[SlotState.UNBACKED] = self.num_unbacked
        return counts

    def check(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state."""
        if self.num_orphans != sum(state is SlotState.ORPHAN for state in self._states.values()):
            raise AssertionError(f"{self.num_orphans} is not the number of orphans")
        everywhere = [*self._states, *self._free, *self._unbacked]
        if len(everywhere) != len(set(everywhere)):
            raise AssertionError("a slot is in two states")
        if self.counts().total() != self.num_slots:
            raise AssertionError(f"{self.counts()} does not add up to {self.num_slots} slots")
