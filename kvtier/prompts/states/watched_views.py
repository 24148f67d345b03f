"""Views for those who watch prompts: one for all watchers of a prompt, and never more of them than the loop can spare.

To look at a prompt of a million tokens takes the loop some 10 ms, and engines wait for that loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvtier.concurrency.pauses import POLL_S
from kvtier.ledger import PromptRow
from kvtier.prompts.states.status import PromptView

REST = 4.0
"""After a look the next one waits this many times as long: all watches together take a fifth of the loop at most."""
MAX_REST_S = 1.0


class _Seen(NamedTuple):
    at_s: float
    prompt: PromptRow
    view: PromptView


class WatchedViews:
    """Loop thread only."""

    def __init__(
        self, view_of: Callable[[PromptRow], Awaitable[PromptView]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take what looks at a prompt."""
        self._view_of, self._clock = view_of, clock
        self._seen: dict[str, _Seen] = {}  # by pin id, the oldest first
        self._looking = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    async def view_since(self, prompt: PromptRow, since_s: float) -> PromptView:
        """Return a view that is no older than this time of the clock; it waits for its turn."""
        if (seen := self._usable(prompt, since_s)) is not None:
            return seen
        async with self._looking:
            if (seen := self._usable(prompt, since_s)) is not None:
                return seen
            began_s = self._clock()
            view = await self._view_of(prompt)
            now_s = self._clock()
            self._keep(_Seen(began_s, prompt, view), now_s)
            await asyncio.sleep(min(MAX_REST_S, REST * (now_s - began_s)))
        return view

    def _usable(self, prompt: PromptRow, since_s: float) -> PromptView | None:
        seen = self._seen.get(prompt.pin_id)
        return seen.view if seen is not None and seen.prompt is prompt and seen.at_s >= since_s else None

    def _keep(self, seen: _Seen, now_s: float) -> None:
        self._seen.pop(seen.prompt.pin_id, None)
        self._seen[seen.prompt.pin_id] = seen
        while (oldest := next(iter(self._seen.values()))).at_s < now_s - POLL_S and oldest is not seen:
            del self._seen[oldest.prompt.pin_id]
