"""Finishes replacements of durable pins: versions beside them, which take their names when durable (ADR 27).

Invariants:

- A name that has a pin has one at every moment, and after a kill at any moment.
- A pin whose replacement no engine can use, or is not durable yet, stays as it is.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from kvtier.concurrency.pauses import SLOW_POLL_S, until_next
from kvtier.concurrency.tasks import Changes
from kvtier.core.limits import parse_version
from kvtier.errors import DrainingError, LedgerError
from kvtier.ledger import PromptRow
from kvtier.obs.log import log_event
from kvtier.prompts.book import PromptBook
from kvtier.prompts.pins import Pins
from kvtier.prompts.states.status import PromptState
from kvtier.prompts.versions import old_versions

logger = logging.getLogger(__name__)

KEPT_VERSIONS = 3
"""Old versions of a prompt that stay known."""
ATTACH_S = 5.0
"""After a start; connectors try again every two seconds."""
_REFUSED_KEPT_S = 60.0
"""How long one that no engine can use stays, so that the client that asked for it learns why."""


class Replacements:
    """Loop thread only.

    Args:
        pins: Changes prompts.
        prompts: All prompts; the cache's own, which change.
    """

    def __init__(
        self, pins: Pins, prompts: PromptBook, changes: Changes, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._pins, self._prompts, self._changes, self._now_s = pins, prompts, changes, now_s
        self._refused_since_s: dict[str, float] = {}  # by pin id: every engine that answered refuses it

    async def run(self) -> None:
        """Look for ever, once engines have had time to attach again: durable is what is so for all of them."""
        await asyncio.sleep(ATTACH_S)
        while True:
            await asyncio.sleep(until_next(SLOW_POLL_S))
            await self.look()

    async def look(self) -> None:
        """Finish each replacement that is durable, and end each that has come to nothing."""
        staged_ids = {staged.pin_id for staged in self._prompts.replacements.values()}
        self._refused_since_s = {pin_id: s for pin_id, s in self._refused_since_s.items() if pin_id in staged_ids}
        for name, staged in list(self._prompts.replacements.items()):
            try:
                await self._look_at(staged)
            except (DrainingError, LedgerError) as error:  # the next turn tries again
                log_event(logger, "replacement_failed", level=logging.ERROR, name=name, problem=str(error))

    async def _look_at(self, seen: PromptRow) -> None:
        staged = self._prompts.standing(seen)  # it may have another name since, or none
        version = parse_version(staged.name) if staged is not None else None
        if staged is None or version is None:
            return
        name = version[0]
        pin, view = self._prompts.find(name), await self._pins.view_of(staged)
        is_refused = bool(view.error) and not view.num_confirmed
        if is_refused:
            since_s = self._refused_since_s.setdefault(staged.pin_id, self._now_s())
        else:
            self._refused_since_s.pop(staged.pin_id, None)
        if pin is None:  # the ledger has lost it
            await self._pins.finish_replacement(staged)
        elif not pin.pinned:  # it ended, and this was not ended with it
            await self._pins.forget(staged)
        elif is_refused and self._now_s() - since_s > _REFUSED_KEPT_S:
            await self._pins.forget(staged)
            log_event(logger, "replacement_refused", level=logging.WARNING, name=name, problem=view.error)
        elif view.state is PromptState.DURABLE:
            await self._pins.finish_replacement(staged)
            await self._changes.exclusively("forget", lambda: self._forget_oldest(name))

    async def _forget_oldest(self, name: str) -> None:
        for _, each in old_versions(self._prompts, name)[:-KEPT_VERSIONS]:
            await self._pins.forget_now(each)
