"""What the ledger needs when there is time: copies that are missing, an empty WAL, no names of packs that are gone."""

import asyncio
import itertools
import logging

from kvtier.errors import LedgerError, TierIOError
from kvtier.obs.log import log_event
from kvtier.service.stores import Stores

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_FORGET_TURNS = 600


class LedgerUpkeep:
    """One task of the cache. Loop thread only."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
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
        stores = self._stores
        try:
            if stores.ledger.is_behind:
                await stores.in_ledger(stores.ledger.catch_up)
            while stores.ledger.misses_copies:
                await stores.in_ledger(stores.ledger.catch_up)
        except LedgerError as error:  # the next turn tries again
            if not self._failed:
                log_event(logger, "promise_not_copied", level=logging.WARNING, problem=str(error))
            self._failed = True
        else:
            self._failed = False

    async def forget_removed(self) -> None:
        """Drop the names of removed packs whose files are gone."""
        stores = self._stores
        try:
            removed = await stores.in_ledger(stores.ledger.removed_packs)
            gone = removed - (await stores.in_io(stores.disk.list_packs)).keys()
            if gone:
                await stores.in_ledger(stores.ledger.forget_removed, gone)
        except (LedgerError, TierIOError) as error:
            log_event(logger, "removed_packs_not_forgotten", level=logging.WARNING, problem=str(error))
