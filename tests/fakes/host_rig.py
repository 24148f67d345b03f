"""The arena tier, and the daemons that use it one after the other: for its contract and its model."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from kvtier.core.arena_format import key_tag_of, overhead_bytes
from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier.core.slots import HostBudget, SlotRef
from kvtier.host.arena import Arena
from kvtier.host.arena_tier import ArenaTier
from kvtier.obs.counters import Counters
from kvtier.pages import PageOps
from tests.fakes.limited_pages import LimitedPages
from tests.fakes.scripted_engine import ONE_GROUP

P = ParamSpec("P")
T = TypeVar("T")
ROW_BYTES = ONE_GROUP.row_bytes


class _Keeping(PageOps):
    """Takes back the pages of this many rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Take some, or refuse."""
        if not self.num_rows:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self.num_rows -= 1
        super().punch(fd, offset, length)


class HostRig:
    """One tier of ONE_GROUP after the other, each with `num_slots` slots, over the same memory.

    Attributes:
        tier: Of the daemon that lives now.
        budget: Of that daemon; rows may take `num_affordable` of it.
        evictable: What the tier may have evicted: HOST slots, in this order.
        wanted_bytes: What the tier asked other namespaces for.
    """

    def __init__(self, num_slots: int, num_affordable: int) -> None:
        self.evictable: list[SlotRef] = []
        self.wanted_bytes: list[int] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-test-")
        self._overhead_bytes = overhead_bytes(num_slots, ONE_GROUP.num_ranks)
        self._limit_bytes = num_affordable * ROW_BYTES + self._overhead_bytes
        self.counters = Counters()
        self.budget = HostBudget(num_slots * ROW_BYTES + self._overhead_bytes)
        self.tier = self.new_tier()
        assert self.tier.usage.num_slots == num_slots
        self.tier.open(Path(self._folder.name))
        self.budget.limit_bytes = self._limit_bytes  # fewer rows than slots, as after a namespace beside it came

    def new_tier(self) -> ArenaTier:
        """Return one without an arena."""
        return ArenaTier(
            "ns",
            ONE_GROUP,
            budget=self.budget,
            counters=self.counters,
            in_thread=_at_once,
            find_bytes=self.wanted_bytes.append,
            evict=self.evict,
        )

    def write(self, ref: SlotRef, key: ChunkKey, data: bytes) -> None:
        """Write and stamp a row, as an engine does."""
        (view,) = self.tier.payload(ref, key)
        view[:] = data
        arena, length = self.tier.arena, ONE_GROUP.group(group_idx_of(key)).useful_bytes
        first = arena.geometry.stamp_word(ref.slot, 0)
        for word, value in enumerate((key_tag_of(key), ref.generation, length), first):
            arena._words[word] = value

    def marks(self) -> dict[int, tuple[int, int]]:
        """Return generation and checksum of every slot that is marked for the next daemon."""
        marked = [entry for entry in self.tier.arena.entries() if entry.mark and entry.committed and entry.backed]
        return {entry.slot: (entry.generation, entry.checksum) for entry in marked}

    def system_gives(self, num_rows: int) -> None:
        """The file system has memory for this many more rows."""
        self.tier.arena._pages = LimitedPages(num_rows * ROW_BYTES)

    def system_takes(self, num_rows: int) -> None:
        """The file system takes back the pages of this many more rows, and refuses those of others."""
        self.tier.arena._pages = _Keeping(num_rows)

    def restart(self, *, killed: bool = True) -> None:
        """The daemon is killed, or stopped and leaves its memory; the next one takes over what it left."""
        self.evictable.clear()
        path, pages = self.tier.arena.path, self.tier.arena._pages
        if killed:
            self.tier.arena.close(unlink=False)
        else:
            self.tier.close(keep=True)
        arena = Arena.reopen(path, ONE_GROUP, pages=pages)
        entries = arena.entries()
        self.budget = HostBudget(self._limit_bytes)
        self.tier = self.new_tier()
        self.tier.recover(
            arena, [entry.generation for entry in entries], {entry.slot for entry in entries if entry.backed}
        )

    def evict(self, num_slots: int) -> int:
        """Release the first of what may be evicted."""
        evicted = self.evictable[:num_slots]
        del self.evictable[:num_slots]
        for ref in evicted:
            self.tier.release(ref)
        return len(evicted)

    def close(self) -> None:
        """Remove the file."""
        self.tier.close(keep=False)
        self._folder.cleanup()


async def _at_once(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return call(*args, **kwargs)
