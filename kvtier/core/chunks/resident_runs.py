"""Lists of chunks that engines acquire again and again, with what was found of them the last time.

Most acquires ask for a pinned prompt whose chunks are all in host memory, and were so a moment before. To look each
chunk up, to lease it, to note its use and to name its slot was nine tenths of what such an acquire took.
"""

from collections.abc import Mapping, Sequence

from kvtier.core.chunks.chunk import Chunk, HostCopy
from kvtier.core.chunks.host_chunks import HostChunks

MAX_RUN_CHUNKS = 2048
"""Of one list; a longer one takes several turns of the loop, and everything may change between them."""
MAX_CHUNKS = 2**15
"""Of all lists of a namespace together; each takes some 200 bytes."""


class ResidentRun(dict[int, Chunk]):
    """All chunks of an acquire, by index. It never changes, so its leases share it.

    Attributes:
        by_importance: The chunks, the first of them to be kept the longest.
        payload_bytes: Of all of them.
        num_leases: Acquires that hold the run. All together have one lease of each chunk.
        found_at: `HostChunks.num_changes` when the rest was found out, and as long as that is so it is true.
        copies: Of the chunks in host memory, all of them readable, in the order of the acquire.
        unpinned, pinned: The same by eviction queue, in the order of their use. Lists that never change.
        answer: What a peer has made of the copies' slots, for the next time.
    """

    __slots__ = (
        "answer", "by_importance", "copies", "found_at", "num_leases", "payload_bytes", "pinned", "unpinned",
    )  # fmt: skip

    def __init__(self, chunks: Mapping[int, Chunk], by_importance: Sequence[Chunk], payload_bytes: int) -> None:
        super().__init__(chunks)
        self.by_importance, self.payload_bytes = by_importance, payload_bytes
        self.num_leases, self.found_at = 0, -1
        self.copies, self.unpinned, self.pinned = list[HostCopy](), list[HostCopy](), list[HostCopy]()
        self.answer: bytes | None = None

    def find(self, num_changes: int) -> bool:
        """Look the chunks up; say whether all of them are readable in host memory, and are to stay."""
        copies = [host for chunk in self.values() if (host := chunk.host) is not None]
        if len(copies) < len(self) or any(host.promoting or host.eviction_pending for host in copies):
            return False
        if copies != self.copies:
            self.copies, self.answer = copies, None
        used = [(chunk.num_pins, host) for chunk in reversed(self.by_importance) if (host := chunk.host) is not None]
        self.unpinned = [host for num_pins, host in used if not num_pins]
        self.pinned = [host for num_pins, host in used if num_pins]
        self.found_at = num_changes
        return True


class ResidentRuns:
    """The runs of one namespace, by name: bytes that are equal for equal lists of keys only. Loop thread only."""

    def __init__(self, host: HostChunks) -> None:
        self._host = host
        self._runs: dict[bytes, ResidentRun] = {}  # the oldest first
        self._num_chunks = 0

    def get(self, name: bytes) -> ResidentRun | None:
        """Return the run of this name, if all its chunks are readable in host memory as before."""
        run = self._runs.get(name)
        if run is None or run.found_at == self._host.num_changes or run.find(self._host.num_changes):
            return run
        self._forget(name)
        return None

    def add(self, name: bytes, run: ResidentRun) -> None:
        """Remember a run of at most MAX_RUN_CHUNKS, and forget the oldest ones beyond MAX_CHUNKS."""
        if name in self._runs or len(run) > MAX_RUN_CHUNKS:
            return
        self._runs[name] = run
        self._num_chunks += len(run)
        while self._num_chunks > MAX_CHUNKS:
            self._forget(next(iter(self._runs)))

    def _forget(self, name: bytes) -> None:
        self._num_chunks -= len(self._runs.pop(name))  # who has leased it goes on with the object

    def acquire(self, run: ResidentRun) -> None:
        """Lease a run that `get` has just returned, until `release`, and note a use of its chunks."""
        if not run.num_leases:
            self._lease_each(run)
        run.num_leases += 1
        if run.unpinned:
            self._host.unpinned.note_use(run.unpinned)
        if run.pinned:
            self._host.pinned.note_use(run.pinned)

    def _lease_each(self, run: ResidentRun) -> None:
        for host in run.copies:
            host.num_leases += 1  # `HostChunks.lease`, spelled out

    def release(self, run: ResidentRun) -> None:
        """End one lease of a run."""
        run.num_leases -= 1
        if not run.num_leases:
            self._host.unlease(run.values())

    def split(self, run: ResidentRun) -> dict[int, Chunk]:
        """Turn a lease of a run into one of each chunk, so that they can end one by one; return these by index."""
        self._lease_each(run)
        self.release(run)
        return dict(run)

    def check(self) -> None:
        """Raise AssertionError if something that is believed of a run is not so."""
        if self._num_chunks != sum(map(len, self._runs.values())):
            raise AssertionError("the chunks of all runs are not those of each")
        for run in self._runs.values():
            if run.num_leases and not all(host.num_leases for host in run.copies):
                raise AssertionError("a chunk of a leased run has no lease")
            now = ResidentRun(run, run.by_importance, run.payload_bytes)
            if run.found_at == self._host.num_changes and not (
                now.find(run.found_at)
                and (now.copies, now.unpinned, now.pinned) == (run.copies, run.unpinned, run.pinned)
            ):
                raise AssertionError("what was found of a run is not so, and nothing has changed since")
