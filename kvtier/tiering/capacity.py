"""Capacity of both tiers: what is evicted when there is none, and the background work that keeps some free.

Only unpinned chunks are dropped here, those that no pinned prompt has, with two exceptions, each the last resort: for
slots pinned chunks that are on disk too; for pins that an engine uses, on disk, what a superseded namespace holds. Of
the namespaces those that no engine uses are evicted first, then the lowest value: what is lost is compared in seconds
of prefill per byte, whatever model it belongs to.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate, groupby

from kvtier.errors import LedgerError
from kvtier.obs.log import LastProblem, log_event
from kvtier.tiering.namespace import NO_MODELS, Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

STALE_S = 24 * 3600.0
"""Unpinned chunks on disk of a namespace that no engine used for this long are dropped before any other's. Its
row is forgotten then too, if it has no chunks and prompts."""
_MIN_STEP_SHARE = 8


class _NotUnlinkedError(Exception):
    """The file of a pack that is empty by now could not be unlinked."""


class Capacity:
    """Reclaims memory and disk over all namespaces, which change. Loop thread only."""

    def __init__(
        self, resources: Resources, namespaces: Mapping[str, Namespace], now_unix_s: Callable[[], float] = time.time
    ) -> None:
        self._resources = resources
        self._namespaces = namespaces
        self._now_unix_s = now_unix_s
        self._trim_problem = LastProblem()

    # On demand

    def find_host_capacity(self, claimant: Namespace, num_bytes: int) -> None:
        """Reclaim host memory of other namespaces until `num_bytes` are free: rows that hold nothing, then chunks.

        One with an engine loses chunks only to a claimant that has none in memory, or none that is worth less.
        """
        budget = self._resources.budget
        for other in self._namespaces.values():
            if other is not claimant and other.host.usage.num_free and budget.free_bytes < num_bytes:
                other.host.reclaim(num_bytes - budget.free_bytes, evict=False)
        spent: set[str] = set()
        while budget.free_bytes < num_bytes:
            victims = [other for other in self._namespaces.values() if self._may_lose_to(claimant, other, spent)]
            if not victims:
                return
            victim = min(victims, key=lambda other: (other.live, _host_rank(other)))
            used_bytes = budget.used_bytes
            # In steps, because values change as chunks go; not row by row, because each step is a system call.
            victim.host.reclaim(max(victim.layout.row_bytes, (num_bytes - budget.free_bytes) // _MIN_STEP_SHARE))
            if budget.used_bytes == used_bytes:
                spent.add(victim.namespace_id)

    def _may_lose_to(self, claimant: Namespace, other: Namespace, spent: set[str]) -> bool:
        if other is claimant or other.namespace_id in spent or not other.host.usage.num_backed:
            return False
        # Slots that an engine of the claimant is to write into are no use to one that has to read.
        return not other.live or not claimant.table.host.num_chunks or _host_rank(other) < _host_rank(claimant)

    async def find_disk_capacity(
        self, num_bytes: int, *, pins_of: frozenset[str] = NO_MODELS, is_refused: bool = False
    ) -> None:
        """Drop chunks from disk until a pack of `num_bytes` fits; see `drop_until_enough`.

        `is_refused`: The system has refused one though it says that it has space, as a quota of a project or a
        container does: packs of as many bytes go.
        """
        usage = self._resources.disk_usage
        until_bytes = usage.used_bytes - num_bytes

        def shortage() -> int:
            return usage.used_bytes - until_bytes if is_refused else usage.shortage(num_bytes)

        await self.drop_until_enough(shortage, pins_of=pins_of)

    async def drop_until_enough(self, shortage: Callable[[], int], *, pins_of: frozenset[str] = NO_MODELS) -> None:
        """Drop unpinned chunks from disk until no more bytes are short, or none is left to drop.

        First the cheapest chunks, as many bytes as are short. Where these leave holes only, then whole packs, those of
        which the least is left: going on chunk by chunk would drop almost everything before a pack comes free.

        Args:
            shortage: Returns how many bytes are short.
            pins_of: They are for pins of a namespace whose engines serve these models. Then pinned chunks of their
                superseded namespaces are dropped too, as the last ones, if that is enough.

        Raises:
            LedgerError: The ledger refused to drop them.
        """
        with suppress(_NotUnlinkedError):  # to go on would drop everything, and free nothing
            await self._drop_until_enough(shortage, pins_of)

    async def _drop_until_enough(self, shortage: Callable[[], int], pins_of: frozenset[str]) -> None:
        short_bytes = shortage()
        while short_bytes > 0 and (dropped_bytes := await self._drop_cheapest(short_bytes)):
            short_bytes -= dropped_bytes
        while shortage() > 0:
            if await self._drop_emptiest_packs(shortage):
                continue
            if not await self._drop_superseded(pins_of, shortage):
                return

    async def _drop_emptiest_packs(self, shortage: Callable[[], int]) -> int:
        """Drop the unpinned chunks of packs that free the most for the least; return their bytes.

        Several packs of a namespace at once, as many as free what is short: to find their chunks takes a walk through
        its table.
        """
        file_bytes = self._resources.disk_usage.file_bytes
        packs = [
            (self._is_in_use(each), each.index.packs.live_bytes(pack_id) / max(1, file_bytes(pack_id)), pack_id, each)
            for each in self._namespaces.values()
            if each.table.disk.num_unpinned
            for pack_id in each.index.packs
        ]
        packs.sort(key=lambda each: each[:3])
        # The namespaces themselves, not their ids: one of them may be forgotten while another's chunks are dropped.
        for namespace, neighbours in groupby(packs, key=_namespace_of):
            pack_ids = [pack_id for _, _, pack_id, _ in neighbours]
            if dropped_bytes := await self._drop_packs(namespace, pack_ids, shortage):
                return dropped_bytes
        return 0

    async def _drop_superseded(self, models: frozenset[str], shortage: Callable[[], int]) -> int:
        """Drop packs with what is pinned in them, of the superseded namespace that no engine used for longest.

        Nothing, if all of them together are less than what is short.
        """
        if not models or shortage() > self.superseded_bytes(models):
            return 0
        for namespace in sorted(self._superseded_on_disk(models), key=lambda each: each.row.seen_unix_s):
            pack_ids = list(namespace.index.packs)
            if dropped_bytes := await self._drop_packs(namespace, pack_ids, shortage, unpinned_only=False):
                log_event(
                    logger,
                    "superseded_kv_dropped",
                    namespace=namespace.namespace_id,
                    model=namespace.row.model,
                    bytes=dropped_bytes,
                    left=namespace.table.disk.num_bytes,
                )
                return dropped_bytes
        return 0

    async def _drop_packs(
        self,
        namespace: Namespace,
        pack_ids: list[str],
        shortage: Callable[[], int],
        *,
        unpinned_only: bool = True,
    ) -> int:
        """Drop the first of these packs, as many as free what is short; go on while nothing was dropped."""
        file_bytes = self._resources.disk_usage.file_bytes
        while pack_ids and (short_bytes := shortage()) > 0:
            if not (unpinned_only or self.is_superseded(namespace)):  # an engine came while others were dropped
                return 0
            num_packs = 1 + bisect_left(list(accumulate(map(file_bytes, pack_ids))), short_bytes)
            taken, pack_ids = pack_ids[:num_packs], pack_ids[num_packs:]
            num_before = namespace.index.num_not_unlinked
            dropped_bytes = await namespace.index.drop_packs(taken, unpinned_only=unpinned_only)
            if namespace.index.num_not_unlinked > num_before:
                raise _NotUnlinkedError
            if dropped_bytes:
                return dropped_bytes
        return 0

    def superseded_bytes(self, models: frozenset[str]) -> int:
        """Return the length of the packs that are dropped for pins of a namespace whose engines serve these models."""
        file_bytes = self._resources.disk_usage.file_bytes
        return sum(file_bytes(pack_id) for each in self._superseded_on_disk(models) for pack_id in each.index.packs)

    def _superseded_on_disk(self, models: frozenset[str]) -> list[Namespace]:
        found = [each for each in self._namespaces.values() if each.row.model in models and each.table.disk.num_chunks]
        return [each for each in found if self.is_superseded(each)]

    def is_superseded(self, namespace: Namespace) -> bool:
        """Return whether no engine has used a namespace for a day, and one of the same model uses another.

        So it is after an update of vLLM, of the weights or of an option: the pins are stored again for that engine. The
        day is one in which this daemon ran: before that it does not know, and a clock may be set. What is quarantined
        is kept to be looked at.
        """
        if namespace.quarantine is not None or time.monotonic() - namespace.idle_since_s <= STALE_S:
            return False
        return self.has_successor(namespace)

    def has_successor(self, namespace: Namespace) -> bool:
        """Return whether no engine uses a namespace, and one of the same model uses another."""
        if namespace.sessions or namespace.attaching:
            return False
        others = [each for each in self._namespaces.values() if each is not namespace]
        return any(namespace.row.model in each.superseded_models for each in others)

    async def _drop_cheapest(self, num_bytes: int) -> int:
        """Drop about `num_bytes` in the namespace that is evicted first; in steps, since values change as chunks go."""
        holders = [namespace for namespace in self._namespaces.values() if namespace.table.disk.num_unpinned]
        if not holders:
            return 0
        return await min(holders, key=self._disk_rank).index.drop_cheapest(min(num_bytes, 256 * 1024**2))

    def _disk_rank(self, namespace: Namespace) -> tuple[bool, float]:
        value = namespace.table.disk.lowest_value
        return self._is_in_use(namespace), float("inf") if value is None else value

    def _is_in_use(self, namespace: Namespace) -> bool:
        return namespace.live or self._now_unix_s() - namespace.row.seen_unix_s <= STALE_S

    # In the background

    def trim_host(self) -> int:
        """Above the high watermark evict unpinned chunks from host memory down to the low one; return how many rows.

        What is in use, or on its way to disk, stays; so may the tier above its watermark.
        """
        config = self._resources.config.host
        occupied_bytes = sum(namespace.host.usage.occupied_bytes for namespace in self._namespaces.values())
        if occupied_bytes <= config.high_watermark * config.host_bytes:
            return 0
        num_freed, excess_bytes = 0, occupied_bytes - config.low_watermark_bytes
        spent: set[str] = set()
        while excess_bytes > 0:
            holders = [each for each in self._namespaces.values() if each.namespace_id not in spent]
            holders = [each for each in holders if each.table.host.unpinned.lowest() is not None]
            if not holders:
                break
            holder = min(holders, key=lambda each: (each.live, _host_rank(each)))
            num_slots = max(1, excess_bytes // holder.layout.row_bytes // _MIN_STEP_SHARE)
            freed = holder.tiers.evict_rows(num_slots, unpinned_only=True)
            if not freed:
                spent.add(holder.namespace_id)
            num_freed += freed
            excess_bytes -= freed * holder.layout.row_bytes
        return num_freed

    async def trim_disk(self) -> int:
        """Above the high watermark drop unpinned chunks from disk down to the low one; return their stored bytes.

        High is counted in bytes of packs, low in bytes of chunks: what lies between is holes, and compaction's matter.
        """
        config = self._resources.config.disk
        if self._resources.disk_usage.used_bytes <= config.high_watermark * config.disk_bytes:
            return 0
        num_dropped, low_bytes = 0, int(config.low_watermark * config.disk_bytes)
        try:
            while (live_bytes := sum(each.table.disk.num_bytes for each in self._namespaces.values())) > low_bytes:
                num_bytes = await self._drop_cheapest(live_bytes - low_bytes)
                if not num_bytes:
                    break
                num_dropped += num_bytes
            self._trim_problem.becomes("")
        except LedgerError as error:  # the next turn tries again, four times a second
            if self._trim_problem.becomes(str(error)):
                log_event(logger, "disk_not_trimmed", level=logging.ERROR, problem=str(error))
        return num_dropped


def _host_rank(namespace: Namespace) -> tuple[bool, float]:
    """Return what its next chunk to leave host memory is worth; pinned ones come last."""
    unpinned, pinned = namespace.table.host.unpinned.lowest(), namespace.table.host.pinned.lowest()
    if unpinned is not None:
        return False, unpinned
    return True, float("inf") if pinned is None else pinned


def _namespace_of(ranked: tuple[bool, float, str, Namespace]) -> Namespace:
    return ranked[3]
