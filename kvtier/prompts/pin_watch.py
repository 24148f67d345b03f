"""How far each pinned prompt is durable, known ahead: counting its chunks takes too long for those who ask often."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvtier.ledger import PromptRow
from kvtier.obs.histogram import Histogram
from kvtier.prompts.book import PromptBook
from kvtier.prompts.status import PromptState

_POLL_S = 0.5
_TURN_S = 0.001
_LONGEST_S = 30.0
_PATIENCE = 10


@dataclass
class _Seen:
    """A pinned prompt as it was last looked at; `since_s`: when it began to be not durable, or was durable first."""

    state: PromptState
    since_s: float


class Standing(NamedTuple):
    """How many pinned prompts are in a state, and how long the one that has been in it longest has waited."""

    num_pins: int
    oldest_wait_s: float


class PinWatch:
    """Looks at pinned prompts for a millisecond per turn of the loop, and only at those due. Loop thread only.

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
        self._due: list[tuple[float, str]] = []  # a heap of (next look, pin id)
        self._knows_all = False  # what the daemon began with is in the heap

    def pinned(self, pin_id: str) -> None:
        """A prompt was pinned now; one that is known goes on as it is."""
        now_s = self._now_s()
        if pin_id not in self._seen:
            self._seen[pin_id] = _Seen(PromptState.WAITING, now_s)
            heappush(self._due, (now_s, pin_id))

    def counts(self) -> Counter[PromptState]:
        """Return how many pinned prompts are in each state."""
        return +Counter({state: standing.num_pins for state, standing in self.standing().items()})

    def oldest_wait_s(self, state: PromptState) -> float:
        """Return how long the one of this state that has waited longest has waited, 0 when there is none."""
        return self.standing()[state].oldest_wait_s

    def standing(self) -> dict[PromptState, Standing]:
        """Return how many pinned prompts are in each state, and for how long; looks at each once."""
        numbers, oldest_s, now_s = Counter[PromptState](), dict[PromptState, float](), self._now_s()
        for seen in self._standing():
            numbers[seen.state] += 1
            if seen.since_s < oldest_s.get(seen.state, math.inf):
                oldest_s[seen.state] = seen.since_s
        return {state: Standing(numbers[state], now_s - oldest_s.get(state, now_s)) for state in PromptState}

    def _standing(self) -> Iterator[_Seen]:
        """Yield what was seen and is pinned still; of what is not, the next look would tell."""
        for pin_id, seen in self._seen.items():
            prompt = self._prompts.by_pin_id(pin_id)
            if prompt is not None and prompt.pinned:
                yield seen

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await self._sleep(_POLL_S)

    async def look(self) -> None:
        """Look at each prompt whose time has come."""
        if not self._knows_all:
            self._knows_all = True
            new = [prompt.pin_id for prompt in self._prompts.pinned() if prompt.pin_id not in self._seen]
            self._due += [(self._now_s(), pin_id) for pin_id in new]
            heapify(self._due)
        began_s = self._now_s()
        for pin_id in self._take_due():
            self._look_at(pin_id)
            if self._now_s() - began_s >= _TURN_S:  # a turn costs more than a look at a short prompt
                await self._sleep(0)
                began_s = self._now_s()

    def _take_due(self) -> list[str]:
        taken, now_s = [], self._now_s()
        while self._due and self._due[0][0] <= now_s:
            taken.append(heappop(self._due)[1])
        return taken

    def _look_at(self, pin_id: str) -> None:
        prompt = self._prompts.by_pin_id(pin_id)
        if prompt is None or not prompt.pinned:
            self._seen.pop(pin_id, None)
            return
        now_s, state = self._now_s(), self._state_of(prompt)
        seen = self._seen.get(pin_id)
        if seen is None:  # the daemon began with it
            seen = self._seen[pin_id] = _Seen(state, now_s)
        was_durable, is_durable = seen.state is PromptState.DURABLE, state is PromptState.DURABLE
        if is_durable and not was_durable:
            self._durable.observe(now_s - seen.since_s)
        if is_durable != was_durable:
            seen.since_s = now_s
        seen.state = state
        patience_s = _LONGEST_S if is_durable else min(_LONGEST_S, (now_s - seen.since_s) / _PATIENCE)
        heappush(self._due, (now_s + patience_s, pin_id))
