"""What the ledger needs when there is time: copies that are missing, an empty WAL, no names of packs that are gone."""

import asyncio
import itertools
import logging

from kvtier.concurrency.pauses import SLOW_POLL_S, until_next
from kvtier.errors import LedgerError, TierIOError
from kvtier.obs.log import LastProblem, log_event
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)


async def keep_ledger(resources: Resources) -> None:
    """Look after the ledger, for ever. Loop thread."""
    last = LastProblem()
    for turn in itertools.count(1):
        try:
            await _catch_up(resources)
            last.becomes("")
        except LedgerError as error:  # the next turn tries again
            if last.becomes(str(error)):
                log_event(logger, "ledger_upkeep_failed", level=logging.WARNING, problem=str(error))
        if turn % 600 == 0:
            await _forget_removed(resources)
        await asyncio.sleep(until_next(SLOW_POLL_S))


async def _catch_up(resources: Resources) -> None:
    """Write missing copies, a few per call of the ledger so that others get their turn, and empty the WAL."""
    if resources.ledger.is_behind:
        await resources.in_ledger(resources.ledger.catch_up)
    while resources.ledger.promises.misses_copies:
        await resources.in_ledger(resources.ledger.catch_up)


async def _forget_removed(resources: Resources) -> None:
    """Drop the names of removed packs whose files are gone."""
    try:
        removed = await resources.in_ledger(resources.ledger.packs.removed_packs)
        gone = await resources.in_io(resources.disk.gone, removed)
        if gone:
            await resources.in_ledger(resources.ledger.packs.forget_removed, gone)
    except (LedgerError, TierIOError) as error:
        log_event(logger, "removed_packs_not_forgotten", level=logging.WARNING, problem=str(error))
