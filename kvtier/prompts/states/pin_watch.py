"""How far each pinned prompt is durable, known ahead: counting its chunks takes too long for those who ask often."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvtier.concurrency.turns import slices
from kvtier.ledger import PromptRow
from kvtier.obs.histogram import Histogram
from kvtier.prompts.book import PromptBook
from kvtier.prompts.states.status import PromptState

_POLL_S = 0.5
_TURN_S = 0.001
_MAX_INTERVAL_S = 30.0
_INTERVAL_SHARE = 10
_MAX_AGAIN = 256
"""Pins that are looked at once more in one turn of the loop, when what they waited for has come back."""


@dataclass
class _Seen:
    """A pinned prompt as it was last looked at; `since_s`: when it began to be not durable, or was durable first."""

    state: PromptState
    since_s: float
    due_s: float


class Standing(NamedTuple):
    """How many pinned prompts are in a state, and how long the one that has been in it longest has waited."""

    num_pins: int
    oldest_wait_s: float


class PinWatch:
    """Looks at pinned prompts for a millisecond per turn of the loop, and only at those due. Loop thread only.

    A prompt that has waited for some time is looked at after a tenth of that again, every prompt each half minute: what
    is reported is late by no more than that, and a prompt that can never become durable costs next to nothing.

    Args:
        state_of: Judges a prompt, by counting its chunks.
        durable: Observes how long each took to become durable.

    Attributes:
        has_looked: Every prompt was looked at once.
        ignores: Says of a pin that no one waits for it on this host.
        why_not_readable: Says of a durable pin why it cannot be read from disk now; empty: it can.
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
        self._turn_began_s = 0.0
        self._waiting: set[str] = set()  # pins of operators that were not durable when last looked at
        self.has_looked = False
        self.ignores: Callable[[PromptRow], bool] = lambda prompt: False
        # Durable pins of operators that could not be read from disk at the last look, and why.
        self._unreadable: dict[str, str] = {}
        self.why_not_readable: Callable[[PromptRow], str] = lambda prompt: ""

    def pinned(self, pin_id: str) -> None:
        """A prompt was pinned now; one that is known goes on as it is."""
        now_s, prompt = self._now_s(), self._prompts.by_pin_id(pin_id)
        if pin_id not in self._seen and prompt is not None and prompt.origin == "named":
            self._waiting.add(pin_id)
        self._seen.setdefault(pin_id, _Seen(PromptState.WAITING, now_s, now_s))

    def is_any_waiting(self) -> bool:
        """Say whether a pin of operators (not found in requests, no replacement) was not durable at the last look."""
        return any(map(self._counts, self._waiting))

    def why_unreadable(self) -> str:
        """Say why one of those pins, durable at the last look, cannot be read from disk now; empty: each can."""
        for pin_id in list(islice(self._unreadable, _MAX_AGAIN)):
            prompt = self._prompts.by_pin_id(pin_id)
            if prompt is not None and self._counts(pin_id) and (why := self.why_not_readable(prompt)):
                return why
            del self._unreadable[pin_id]
        return next(iter(self._unreadable.values()), "")

    def _counts(self, pin_id: str) -> bool:
        prompt = self._prompts.by_pin_id(pin_id)
        return prompt is not None and prompt.pinned and not self.ignores(prompt)

    def is_durable(self, pin_id: str) -> bool:
        """Say whether the prompt was durable when last looked at, at most half a minute ago."""
        seen = self._seen.get(pin_id)
        return seen is not None and seen.state is PromptState.DURABLE

    def look_again(self) -> None:
        """An engine attached, so that any prompt may be durable no longer, or the disk is off: look at each soon."""
        for seen in self._seen.values():
            seen.due_s = 0.0

    def standing(self) -> dict[PromptState, Standing]:
        """Return how many pinned prompts are in each state, and for how long; looks at each once."""
        numbers, oldest_s, now_s = Counter[PromptState](), dict[PromptState, float](), self._now_s()
        for pin_id, seen in self._seen.items():
            prompt = self._prompts.by_pin_id(pin_id)
            if prompt is None or not prompt.pinned:  # since the last look
                continue
            numbers[seen.state] += 1
            if seen.since_s < oldest_s.get(seen.state, math.inf):
                oldest_s[seen.state] = seen.since_s
        return {state: Standing(numbers[state], now_s - oldest_s.get(state, now_s)) for state in PromptState}

    def unfinished(self) -> list[PromptRow]:
        """Return pinned prompts that were not durable when they were last looked at, by name."""
        ids = [pin_id for pin_id, seen in self._seen.items() if seen.state is not PromptState.DURABLE]
        prompts = (self._prompts.by_pin_id(pin_id) for pin_id in ids)
        return sorted((each for each in prompts if each is not None and each.pinned), key=lambda each: each.name)

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await self._sleep(_POLL_S)

    async def look(self) -> None:
        """Look at each prompt whose time has come."""
        began_s = self._turn_began_s = self._now_s()
        for pins in slices([prompt.pin_id for prompt in self._prompts.pinned()]):
            for pin_id in [each for each in pins if each not in self._seen or self._seen[each].due_s <= began_s]:
                prompt = self._prompts.by_pin_id(pin_id)
                if prompt is not None and prompt.pinned:  # still, after the last turn of the loop
                    self._look_at(prompt)
                await self._pause()
            await self._pause()
        for pins in slices(list(self._seen)):
            for pin_id in pins:
                prompt = self._prompts.by_pin_id(pin_id)
                if prompt is None or not prompt.pinned:
                    self._seen.pop(pin_id, None)
                    self._waiting.discard(pin_id)
                    self._unreadable.pop(pin_id, None)
            await self._pause()
        self.has_looked = True

    async def _pause(self) -> None:
        now_s = self._now_s()
        if now_s - self._turn_began_s >= _TURN_S:  # a turn costs more than a look at a short prompt
            await self._sleep(0)
            self._turn_began_s = self._now_s()

    def _look_at(self, prompt: PromptRow) -> None:
        now_s, state = self._now_s(), self._state_of(prompt)
        seen = self._seen.setdefault(prompt.pin_id, _Seen(state, now_s, now_s))  # or the daemon began with it
        was_durable, is_durable = seen.state is PromptState.DURABLE, state is PromptState.DURABLE
        if is_durable and not was_durable:
            self._durable.observe(now_s - seen.since_s)
        if is_durable != was_durable:
            seen.since_s = now_s
        seen.state = state
        (self._waiting.add if prompt.origin == "named" and not is_durable else self._waiting.discard)(prompt.pin_id)
        self._unreadable.pop(prompt.pin_id, None)
        if prompt.origin == "named" and is_durable and (why := self.why_not_readable(prompt)):
            self._unreadable[prompt.pin_id] = why
        interval_s = _MAX_INTERVAL_S if is_durable else min(_MAX_INTERVAL_S, (now_s - seen.since_s) / _INTERVAL_SHARE)
        seen.due_s = now_s + interval_s
