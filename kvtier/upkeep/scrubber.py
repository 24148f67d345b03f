"""Scrub: everything on disk is read and verified in the background, so that damage is found while it can be mended."""

import asyncio
import heapq
import json
import logging
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

from kvtier.concurrency.pauses import SLOW_POLL_S
from kvtier.concurrency.turns import BATCH_BYTES, Breather, slices
from kvtier.errors import TierIOError
from kvtier.obs.log import log_event
from kvtier.tiering.disk_verification import verify_on_disk
from kvtier.tiering.pacing import Pace
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers

logger = logging.getLogger(__name__)

CURSOR_FILE = "scrub.json"
_PERIOD_S = 24 * 3600.0
_PACKS_AT_ONCE = 256


class Scrubber:
    """Goes through all packs in the order of their ids, again and again, at most once in `_PERIOD_S`. Loop thread only.

    `cursor_path` is a small file that says where it is, so that a daemon that is restarted every day comes to the end
    too; without it a pass begins again. Ids are random: a pack that is written behind it, or among the few that come
    next, is verified in the next pass.
    """

    def __init__(
        self,
        resources: Resources,
        all_tiers: Callable[[], Sequence[Tiers]],
        cursor_path: Path,
        *,
        pace: Pace | None = None,
        unix_s: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._resources, self._all_tiers, self._path = resources, all_tiers, cursor_path
        self._unix_s, self._sleep = unix_s, sleep
        self._pace = pace or Pace(resources.config.disk.scrub_bytes_per_s)
        self._after = ""
        self._pass_began_unix_s = 0.0

    async def run(self) -> None:
        """Scrub for ever."""
        await self._resources.in_background(self._load)
        while True:
            if self._after or not 0 <= self._unix_s() - self._pass_began_unix_s < _PERIOD_S:
                await self.scrub_pass()
            await self._sleep(SLOW_POLL_S)

    async def scrub_pass(self) -> None:
        """Go on from where it stopped to the end of all packs."""
        if not self._after:
            self._pass_began_unix_s = self._unix_s()
        while found := await self._next_packs():
            for pack_id, tiers in found:
                await self._scrub_pack(tiers, pack_id)
                self._after = pack_id
                await self._resources.in_background(self._save)
        self._after = ""
        self._resources.counters.scrub_passes += 1
        await self._resources.in_background(self._save)

    async def _next_packs(self) -> list[tuple[str, Tiers]]:
        """Return some packs that come next, found by one look at all: there may be a hundred thousand."""
        nearest: list[tuple[str, Tiers]] = []
        breather = Breather()
        for tiers in self._all_tiers():
            packs = tiers.index.packs
            for part in slices(list(packs)):
                behind = [(pack_id, tiers) for pack_id in part if pack_id > self._after]
                wanted = [each for each in behind if self._resources.disk.can_open(packs.key_of(each[0]))]
                nearest = heapq.nsmallest(_PACKS_AT_ONCE, nearest + wanted, key=itemgetter(0))
                await breather.pause()
        return nearest

    async def _scrub_pack(self, tiers: Tiers, pack_id: str) -> None:
        """Verify what is read from one pack. What the system refuses to read waits for the next pass."""
        chunks, refused = await tiers.index.chunks_in([pack_id]), list[TierIOError]()
        while chunks:
            await self._resources.disk_health.until_closed()
            await self._resources.request_reads.until_quiet()
            await self._pace.wait()
            num_chunks = 1 + bisect_left(list(accumulate(stored.raw_bytes for stored in chunks)), BATCH_BYTES)
            verified = await verify_on_disk(self._resources, tiers, chunks[:num_chunks])
            self._pace.spent(verified.stored_bytes)
            refused += [error for _, error in verified.refused]
            chunks[:num_chunks] = verified.left
        if refused:
            problem = str(refused[0])
            log_event(
                logger, "scrub_refused", level=logging.WARNING, pack=pack_id, chunks=len(refused), problem=problem
            )

    # Where it is

    def _load(self) -> None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            state = json.loads(self._path.read_text())
            after, began_unix_s = str(state["after"]), float(state["pass_began_unix_s"])
            self._after, self._pass_began_unix_s = after, began_unix_s

    def _save(self) -> None:
        # Without fsync: at worst some packs are verified twice.
        state = json.dumps({"after": self._after, "pass_began_unix_s": self._pass_began_unix_s})
        temp = self._path.with_suffix(".tmp")
        with suppress(OSError):
            temp.write_text(state)
            temp.replace(self._path)
