"""Which namespaces have an arena: opened for an engine, closed again when nothing uses it and others need its place.

An arena takes shared memory (rows, slot table, header page) and two descriptors of the daemon. States, by namespace:

    NONE        no file; chunks are on disk only
    SERVING     a session is attached, or an ended one whose lock a process of its engine still holds
    IDLE        no session; chunks in memory are unpinned, on disk, or on their way there
    TAKEN OVER  a previous daemon left it, and a process may still hold a session lock of that daemon (`recovering`)
    CLOSING     a worker thread drops its pages and unlinks it; its bytes count until that is done

    NONE --attach, prefetch--> SERVING, IDLE    the header and slot table are counted before the file is made
    SERVING --last lock released--> IDLE       until then processes may read and write rows
    IDLE --attach--> SERVING                   same file: what is in memory is a hit
    IDLE --close--> CLOSING --> NONE           see below
    (start) --recover--> TAKEN OVER --all old locks released--> IDLE

IDLE is closed when an engine of another namespace attaches and descriptors, `host.bytes` or the file system have no
place for its arena, the longest unused first; and, in the background, when no row has pages any longer (others took
them): slot tables of unused models would add up. What is pinned and not yet on disk is not evictable, so its arena is
closed only once it is written. A process that still maps a closed file keeps a valid mapping: the path is unlinked, and
the file is never shortened.
"""

import logging
import resource
from collections.abc import Callable, Mapping

from kvtier.concurrency.tasks import Tasks
from kvtier.core.arena_format import WORD_BYTES, entry_words
from kvtier.errors import ArenaFullError
from kvtier.host.arena_tier import DetachedArena, drop_rows
from kvtier.obs.log import log_event
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 64
"""Of the daemon without arenas and engines: 21 at rest; packs that are read and written, exports, a scrape."""


def max_open_arenas() -> int:
    """Return how many arenas may be open: half of the descriptors that this process may have are for connections."""
    soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft_limit == resource.RLIM_INFINITY:
        soft_limit = 2**20
    # An arena has two: the file's, and the one that mmap duplicates.
    return max(4, (soft_limit - _OTHER_DESCRIPTORS) // (2 * 2))


class Arenas:
    """Opens and closes arenas over all namespaces. Loop thread only.

    Args:
        resources: Budget, threads and configuration.
        namespaces: By id; they come and go.
        tasks: Closing goes on in one of these when the caller is cancelled.
        top_up_all: Called when memory has come free.

    Attributes:
        max_open: At most this many at once.
    """

    def __init__(
        self, resources: Resources, namespaces: Mapping[str, Namespace], tasks: Tasks, top_up_all: Callable[[], None]
    ) -> None:
        self._resources, self._namespaces, self._tasks, self._top_up_all = resources, namespaces, tasks, top_up_all
        self.max_open = max_open_arenas()
        self._num_closing = 0

    @property
    def num_open(self) -> int:
        """Arenas that have descriptors."""
        return self._num_closing + sum(namespace.host.is_open for namespace in self._namespaces.values())

    async def open(self, namespace: Namespace) -> None:
        """Make the namespace's arena if there is none; idle ones are closed if they are in the way.

        Nothing else runs between its return and the caller's next `await`: a session attached until then keeps it.

        Raises:
            ArenaFullError: host.bytes, the file system or the descriptors have no place for it; the message says which.
            ArenaError: The file cannot be made.
        """
        self._check_fits(namespace)
        while not namespace.host.is_open:
            try:
                self._check_descriptors()
                self._open(namespace)
            except ArenaFullError:
                if not await self._close_longest_unused():
                    raise

    def open_if_it_fits(self, namespace: Namespace) -> bool:
        """Make the namespace's arena if nothing has to make way for it; say whether there is one.

        Raises:
            ArenaError: The file cannot be made.
        """
        if not namespace.host.is_open:
            has_memory = namespace.host.needed_bytes + namespace.layout.row_bytes <= self._resources.budget.free_bytes
            if not has_memory or self.num_open >= self.max_open:
                return False
            self._check_fits(namespace)
            self._open(namespace)
        return True

    def _open(self, namespace: Namespace) -> None:
        config = self._resources.config
        namespace.host.open(config.host.arena_dir, config.server.gid)
        namespace.arena_changed()

    def _check_descriptors(self) -> None:
        if self.num_open >= self.max_open:
            raise ArenaFullError(
                f"{self.num_open} models have an arena, as many as this daemon's limit of "
                f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files allows, and all of them are in use; raise "
                "it (`ulimit -n`; LimitNOFILE= in a systemd unit), or end an engine of another model"
            )

    async def close_empty(self) -> None:
        """Close idle arenas that have no row with pages: others took them all, or there never was one."""
        for namespace in list(self._namespaces.values()):
            if namespace.is_idle and namespace.is_prefetched and not namespace.host.usage.num_backed:
                await self._close(namespace)

    async def _close_longest_unused(self) -> bool:
        """Close an idle arena; say whether there was one that could be closed."""
        idle = [each for each in self._namespaces.values() if each.is_idle and not each.unwritten_bytes]
        for namespace in sorted(idle, key=lambda each: each.seen_unix_s):
            if namespace.is_idle and await self._close(namespace):
                return True
        return False

    async def _close(self, namespace: Namespace) -> bool:
        if not await namespace.evict_all() or not namespace.is_idle:
            return False
        detached = namespace.host.detach()
        if detached is None:
            return False
        namespace.arena_changed()
        path, model = detached.arena.path, namespace.model
        log_event(logger, "arena_closed", namespace=namespace.namespace_id, model=model, path=path)
        self._num_closing += 1
        await self._tasks.run_shielded("close-arena", self._discard(detached))
        return True

    async def _discard(self, detached: DetachedArena) -> None:
        try:
            await self._resources.in_io(_discard, detached)
        finally:
            self._num_closing -= 1
            self._resources.budget.release(detached.num_bytes)
            self._top_up_all()

    def _check_fits(self, namespace: Namespace) -> None:
        """Refuse what no arena within host.bytes could hold: not even one row."""
        layout = namespace.layout
        if namespace.host.usage.num_slots < 1:
            raise ArenaFullError(
                f"one chunk of this model takes {layout.row_bytes} bytes and, with {layout.num_ranks} ranks, "
                f"{entry_words(layout.num_ranks) * WORD_BYTES} bytes of the slot table; host.bytes is "
                f"{self._resources.budget.limit_bytes}; raise host.bytes"
            )


def _discard(detached: DetachedArena) -> None:
    """Worker thread: the pages too, since a process that maps the file would keep those of an unlinked one."""
    drop_rows(detached.arena, detached.backed)
    try:
        detached.arena.close(unlink=True)
    except OSError as error:
        log_event(logger, "arena_not_dropped", level=logging.WARNING, path=detached.arena.path, problem=str(error))
