"""When pins end by themselves: their time is over, which with a sliding TTL begins again at each use.

Engines report the longest pin that a request begins with. Pins that this one begins with were used by it, too.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from kvtier.concurrency.pauses import SLOW_POLL_S, until_next
from kvtier.concurrency.tasks import Changes
from kvtier.concurrency.turns import Breather
from kvtier.core.limits import parse_version
from kvtier.errors import DrainingError, LedgerError
from kvtier.ledger import PromptRow
from kvtier.obs.log import LastProblem, log_event
from kvtier.prompts.beginnings import Beginnings
from kvtier.prompts.book import PromptBook
from kvtier.prompts.pins import Pins
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)

_WRITTEN_SHARE = 0.1
"""Of the TTL: a use within that after the end was last written writes nothing. A pin may end that much too early."""


class Expiry:
    """Ends pins, and moves their ends. Loop thread only.

    Args:
        pins: Changes prompts.
        prompts: All prompts; the cache's own, which change.

    Attributes:
        may_end: Says whether it is known that a pin's time is over, if the clock says so.
        confirmed_s: How far the clock by which pins end was ahead of what counted until then: all steps together.
    """

    def __init__(self, pins: Pins, prompts: PromptBook, resources: Resources, changes: Changes) -> None:
        self._pins, self._prompts, self._resources, self._changes = pins, prompts, resources, changes
        self.may_end: Callable[[PromptRow], bool] = lambda prompt: True
        self.confirmed_s: Callable[[], float] = lambda: pins.host_clock.confirmed_s
        self._allowed_s = 0.0  # of these steps
        self._last_problem = LastProblem()
        self._digests: Mapping[tuple[str, int], bytes] = {}  # of the beginnings of the last look
        self._used: dict[str, float] = {}  # by pin id: the last use of one whose end is to be moved

    def used(self, pin_id: str, unix_s: float) -> None:
        """A request used a pin, by this host's clock; cheap, and without effect unless a TTL is sliding."""
        self._used[pin_id] = unix_s + self._pins.now_unix_s() - time.time()

    async def run(self) -> None:
        """Move ends, and end pins whose time is over, for ever."""
        while True:
            await asyncio.sleep(until_next(SLOW_POLL_S))
            await self.look()

    async def look(self) -> None:
        """Move the ends of pins that were used; end those whose time is over."""
        used, self._used = self._used, {}
        for pin_id, unix_s in (await self._with_beginnings(used)).items():
            if not any(_is_due(each, unix_s) for each in self._moving(pin_id)):
                continue
            try:
                await self._changes.exclusively("extend", partial(self._move_end, pin_id, unix_s))
            except (DrainingError, LedgerError) as error:  # the next use tries again
                log_event(logger, "pin_not_extended", level=logging.ERROR, pin_id=pin_id, problem=str(error))
        now_unix_s = self._pins.now_unix_s()  # before the next look at steps: what counts later ends nothing now
        if await self._allow_for_steps(now_unix_s):
            await self._end_expired(now_unix_s)

    async def _with_beginnings(self, used: Mapping[str, float]) -> Mapping[str, float]:
        """Return when pins were used, those included that the used ones begin with; with turns of the loop."""
        if not used:
            return used
        breather, last_unix_s = Breather(), max(used.values())
        due = Beginnings(self._digests)
        for prompt in self._prompts.pinned():
            if _slides(prompt) and _is_due(prompt, last_unix_s):
                covered = max((row.covered_tokens for row in self._prompts.bindings_of(prompt.pin_id)), default=0)
                if covered:
                    due.add(prompt, covered)
            await breather.pause()
        self._digests = due.digests
        all_used = dict(used)
        for pin_id, unix_s in used.items():
            longer = self._prompts.by_pin_id(pin_id)
            for shorter in await due.of(longer, breather) if longer is not None else ():
                all_used[shorter.pin_id] = max(all_used.get(shorter.pin_id, 0.0), unix_s)
        return all_used

    async def _move_end(self, pin_id: str, used_unix_s: float) -> None:
        moved = [
            replace(each, expires_unix_s=max(each.expires_unix_s, used_unix_s + each.ttl_s))
            for each in self._moving(pin_id)
        ]
        if moved:
            await self._put(moved)

    def _moving(self, pin_id: str) -> list[PromptRow]:
        """Return whose ends a use moves: the pin, and what is to replace it. Who uses the one needs the other."""
        prompt = self._prompts.by_pin_id(pin_id)
        if prompt is None:
            return []
        version = parse_version(prompt.name) if prompt.origin == "replacement" else None
        name = version[0] if version is not None else prompt.name
        known = (self._prompts.find(name), self._prompts.replacements.get(name))
        return [each for each in known if each is not None and _slides(each)]

    async def _allow_for_steps(self, now_unix_s: float) -> bool:
        """When a step of the clock begins to count: pins that it would end keep what was left of their TTL before it.

        Returns:
            Whether that is done.
        """
        confirmed_s = self.confirmed_s()
        if (step_s := confirmed_s - self._allowed_s) > 0:
            try:
                await self._changes.exclusively("extend", partial(self._keep_over, step_s, now_unix_s))
            except (DrainingError, LedgerError) as error:  # the next turn tries again, and nothing ends before
                log_event(logger, "pin_not_extended", level=logging.ERROR, problem=str(error))
                return False
            self._allowed_s = confirmed_s
        return True

    async def _keep_over(self, step_s: float, now_unix_s: float) -> None:
        kept = [
            replace(each, expires_unix_s=min(each.expires_unix_s + step_s, now_unix_s + each.ttl_s))
            for each in self._prompts.expired(now_unix_s)
            if each.ttl_s and each.expires_unix_s > now_unix_s - step_s
        ]
        if kept:
            await self._put(kept)

    async def _put(self, moved: list[PromptRow]) -> None:
        await self._resources.in_ledger(self._resources.ledger.promises.change_prompts, put=moved)
        for each in moved:
            self._prompts.put(each)

    async def _end_expired(self, now_unix_s: float) -> None:
        problem = ""
        for prompt in filter(self.may_end, self._prompts.expired(now_unix_s)):
            async with self._changes.lock:
                if self._prompts.by_pin_id(prompt.pin_id) != prompt:
                    continue
                try:
                    # A prompt that no one named is known by its pin only: kept, such prompts would grow for ever.
                    if prompt.origin == "named":
                        await self._pins.unpin_now(prompt, by_ttl=True)
                    else:
                        await self._pins.end_now(prompt)
                except LedgerError as error:  # the next turn tries again, a second later
                    problem = str(error)
                    if self._last_problem.becomes(problem):
                        log_event(logger, "pin_not_ended", level=logging.ERROR, name=prompt.name, problem=problem)
        if not problem:
            self._last_problem.becomes("")


def _is_due(prompt: PromptRow, used_unix_s: float) -> bool:
    """Return whether a use moves the end of a pin by so much that it is written."""
    return used_unix_s + prompt.ttl_s > prompt.expires_unix_s + _WRITTEN_SHARE * prompt.ttl_s


def _slides(prompt: PromptRow) -> bool:
    """Return whether a use moves the end of a pin; one that never ends has none to move."""
    return prompt.pinned and prompt.sliding and bool(prompt.expires_unix_s)
