"""What the ledger needs when there is time: copies that are missing, an empty WAL, no names of packs that are gone."""

import asyncio
import itertools
import logging

from kvtier.errors import LedgerError, TierIOError
from kvtier.obs.log import log_event
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_FORGET_TURNS = 600


class LedgerUpkeep:
    """One task of the cache. Loop thread only."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._failed = False

    async def run(self) -> None:
        """Look after the ledger, for ever."""
        for turn in itertools.count(1):
            await self.catch_up()
            if turn % _FORGET_TURNS == 0:
                await self.forget_removed()
            await asyncio.sleep(_POLL_S)

    async def catch_up(self) -> None:
        """Write missing copies, a few per call of the ledger so that others get their turn, and empty the WAL."""
        resources = self._resources
        try:
            if resources.ledger.is_behind:
                await resources.in_ledger(resources.ledger.catch_up)
            while resources.ledger.promises.misses_copies:
                await resources.in_ledger(resources.ledger.catch_up)
        except LedgerError as error:  # the next turn tries again
            if not self._failed:
                log_event(logger, "promise_not_copied", level=logging.WARNING, problem=str(error))
            self._failed = True
        else:
            self._failed = False

    async def forget_removed(self) -> None:
        """Drop the names of removed packs whose files are gone."""
        resources = self._resources
        try:
            removed = await resources.in_ledger(resources.ledger.packs.removed_packs)
            gone = removed - (await resources.in_io(resources.disk.list_packs)).keys()
            if gone:
                await resources.in_ledger(resources.ledger.packs.forget_removed, gone)
        except (LedgerError, TierIOError) as error:
            log_event(logger, "removed_packs_not_forgotten", level=logging.WARNING, problem=str(error))
