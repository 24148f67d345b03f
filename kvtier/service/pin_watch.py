"""How far each pinned prompt is durable, known ahead: counting its chunks takes too long for those who ask often."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvtier.ledger import PromptRow
from kvtier.obs.histogram import Histogram
from kvtier.service.prompts import PromptBook
from kvtier.service.views import PromptState

_POLL_S = 0.5
_LONGEST_S = 30.0
_PATIENCE = 10


@dataclass
class _Seen:
    """A pinned prompt as it was last looked at; `since_s`: when it began to be not durable, or was durable first."""

    state: PromptState
    since_s: float
    next_look_s: float


class PinWatch:
    """Looks at one pinned prompt per turn of the loop. Loop thread only.

    A prompt that has waited for some time is looked at after a tenth of that again, every prompt each half minute: what
    is told is late by no more than that, and a prompt that can never become durable costs next to nothing.

    Args:
        prompts: All prompts.
        state_of: Judges one, by counting its chunks.
        durable: Observes how long each took to become durable.
        now_s: Monotonic clock.
        sleep: Waits for the next turn.
    """

    def __init__(
        self,
        prompts: PromptBook,
        state_of: Callable[[PromptRow], PromptState],
        durable: Histogram,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._prompts, self._state_of, self._durable = prompts, state_of, durable
        self._now_s, self._sleep = now_s, sleep
        self._seen: dict[str, _Seen] = {}

    def pinned(self, pin_id: str) -> None:
        """A prompt was pinned now; one that is known goes on as it is."""
        now_s = self._now_s()
        self._seen.setdefault(pin_id, _Seen(PromptState.WAITING, now_s, now_s))

    def counts(self) -> Counter[PromptState]:
        """Return how many pinned prompts are in each state."""
        return Counter(seen.state for seen in self._seen.values())

    def oldest_wait_s(self, state: PromptState) -> float:
        """Return how long the one of this state that has waited longest has waited, 0 when there is none."""
        began_s = [seen.since_s for seen in self._seen.values() if seen.state is state]
        return self._now_s() - min(began_s) if began_s else 0.0

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await self._sleep(_POLL_S)

    async def look(self) -> None:
        """Look at each prompt whose time has come."""
        pinned = {prompt.pin_id: prompt for prompt in self._prompts if prompt.pinned}
        for pin_id in self._seen.keys() - pinned.keys():
            del self._seen[pin_id]
        for pin_id in pinned:
            seen = self._seen.get(pin_id)
            if seen is None or seen.next_look_s <= self._now_s():
                self._look_at(pin_id, seen)
                await self._sleep(0)

    def _look_at(self, pin_id: str, seen: _Seen | None) -> None:
        prompt = self._prompts.by_pin_id(pin_id)
        if prompt is None:  # forgotten while others were looked at
            return
        now_s, state = self._now_s(), self._state_of(prompt)
        if seen is None:  # the daemon began with it
            seen = self._seen[pin_id] = _Seen(state, now_s, now_s)
        was_durable, is_durable = seen.state is PromptState.DURABLE, state is PromptState.DURABLE
        if is_durable and not was_durable:
            self._durable.observe(now_s - seen.since_s)
        if is_durable != was_durable:
            seen.since_s = now_s
        patience_s = _LONGEST_S if is_durable else min(_LONGEST_S, (now_s - seen.since_s) / _PATIENCE)
        seen.state, seen.next_look_s = state, now_s + patience_s
