"""A host tier between two lives of a daemon, for its contract and its model."""

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
from kvtier.host.base import HostTier
from kvtier.obs.counters import Counters
from kvtier.pages import PageOps
from tests.fakes.limited_pages import LimitedPages
from tests.fakes.memory_host import LastingMemory, MemoryHostTier
from tests.fakes.scripted_engine import ONE_GROUP

P = ParamSpec("P")
T = TypeVar("T")
ROW_BYTES = ONE_GROUP.row_bytes


class _HostRig:
    """Who evicts, and who is asked for memory."""

    tier: HostTier
    budget: HostBudget

    def __init__(self) -> None:
        self.evictable: list[SlotRef] = []
        self.wanted_bytes: list[int] = []

    def evict(self, num_slots: int) -> int:
        """Release the first of what may be evicted."""
        evicted = self.evictable[:num_slots]
        del self.evictable[:num_slots]
        for ref in evicted:
            self.tier.release(ref)
        return len(evicted)


class MemoryHostRig(_HostRig):
    """The fake."""

    def __init__(self, num_slots: int, num_affordable: int) -> None:
        super().__init__()
        self.memory = LastingMemory()
        self._num_slots, self._limit_bytes = num_slots, num_affordable * ROW_BYTES
        self._start(recovering=False)

    def _start(self, *, recovering: bool) -> None:
        self.budget = HostBudget(self._limit_bytes)
        self.tier = MemoryHostTier(
            ONE_GROUP,
            self._num_slots,
            self.memory,
            budget=self.budget,
            find_bytes=self.wanted_bytes.append,
            evict=self.evict,
            recovering=recovering,
        )

    def write(self, ref: SlotRef, key: ChunkKey, data: bytes) -> None:
        """See HostRig."""
        (view,) = self.tier.payload(ref, key)
        view[:] = data
        self.memory.stamps[ref.slot] = key, ref.generation

    def marks(self) -> dict[int, tuple[int, int]]:
        """See HostRig."""
        return dict(self.memory.marks)

    def system_gives(self, num_rows: int) -> None:
        """See HostRig."""
        self.memory.free_rows = num_rows

    def system_takes(self, num_rows: int) -> None:
        """See HostRig."""
        self.memory.takeable_rows = num_rows

    def restart(self, *, killed: bool = True) -> None:
        """See HostRig."""
        self.evictable.clear()
        self._start(recovering=True)

    def close(self) -> None:
        """There is nothing to remove."""


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


class ArenaHostRig(_HostRig):
    """The real one, over a real file."""

    tier: ArenaTier

    def __init__(self, num_slots: int, num_affordable: int) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-test-")
        self._overhead_bytes = overhead_bytes(num_slots, ONE_GROUP.num_ranks)
        self._limit_bytes = num_affordable * ROW_BYTES + self._overhead_bytes
        self.counters = Counters()
        self.budget = HostBudget(num_slots * ROW_BYTES + self._overhead_bytes)
        self.tier = self._new_tier()
        assert self.tier.usage.num_slots == num_slots
        self.tier.open(Path(self._folder.name))
        self.budget.limit_bytes = self._limit_bytes  # fewer rows than slots, as after a namespace beside it came

    def _new_tier(self) -> ArenaTier:
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
        """See HostRig."""
        (view,) = self.tier.payload(ref, key)
        view[:] = data
        arena, length = self.tier.arena, ONE_GROUP.group(group_idx_of(key)).useful_bytes
        first = arena.geometry.stamp_word(ref.slot, 0)
        for word, value in enumerate((key_tag_of(key), ref.generation, length), first):
            arena._words[word] = value

    def marks(self) -> dict[int, tuple[int, int]]:
        """See HostRig."""
        marked = [entry for entry in self.tier.arena.entries() if entry.mark and entry.committed and entry.backed]
        return {entry.slot: (entry.generation, entry.checksum) for entry in marked}

    def system_gives(self, num_rows: int) -> None:
        """See HostRig."""
        self.tier.arena._pages = LimitedPages(num_rows * ROW_BYTES)

    def system_takes(self, num_rows: int) -> None:
        """See HostRig."""
        self.tier.arena._pages = _Keeping(num_rows)

    def restart(self, *, killed: bool = True) -> None:
        """See HostRig."""
        self.evictable.clear()
        path, pages = self.tier.arena.path, self.tier.arena._pages
        if killed:
            self.tier.arena.close(unlink=False)
        else:
            self.tier.close(keep=True)
        arena = Arena.reopen(path, ONE_GROUP, pages=pages)
        entries = arena.entries()
        self.budget = HostBudget(self._limit_bytes)
        self.tier = self._new_tier()
        self.tier.recover(
            arena, [entry.generation for entry in entries], {entry.slot for entry in entries if entry.backed}
        )

    def close(self) -> None:
        """Remove the file."""
        self.tier.close(keep=False)
        self._folder.cleanup()


async def _at_once(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return call(*args, **kwargs)
