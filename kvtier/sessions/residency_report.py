"""Reports to an engine what of its pins is in host memory; the engine announces that to routers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from kvtier.concurrency.turns import Breather, slices
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.layout import ChunkKey
from kvtier.core.limits import MAX_ASKED_PINS
from kvtier.sessions.session import Session

_POLL_S = 0.5
_PAUSE_SHARE = 20
"""A look is followed by a pause of this many times what it took: at most a twentieth of the loop."""


class ResidencyReport:
    """Looks at the pins that one engine has bound, again when host memory has changed. Loop thread only.

    It is late by half a second, by more where pins have very many chunks: what a router receives is a hint, and leases
    decide what is loaded.

    Args:
        session: The engine's.
        keys_of: Returns the keys of a pin that are served, by its id; none of one that is not pinned.
    """

    def __init__(self, session: Session, keys_of: Callable[[str], Sequence[ChunkKey]]) -> None:
        self._session, self._keys_of = session, keys_of
        self._reported: dict[str, int] = {}
        self._seen: object = None  # differs when host memory has changed; as of the last look at all pins
        self._look_at_s = 0.0  # when all pins are looked at again, at the earliest

    async def run(self) -> None:
        """Report until the session is over."""
        while not self._session.ended:
            await self.report_new()
            if time.monotonic() >= self._look_at_s:
                began_s = time.monotonic()
                await self.report_changes()
                now_s = time.monotonic()
                self._look_at_s = now_s + (now_s - began_s) * _PAUSE_SHARE
            await asyncio.sleep(_POLL_S)

    async def report_new(self) -> None:
        """Report each pin that the engine has bound since the last call."""
        self._session.unreported &= self._session.bound
        await self._report(list(self._session.unreported))

    async def report_changes(self) -> None:
        """Report each pin whose number has changed."""
        host, bound = self._session.tiers.table.host, self._session.bound
        state = (host.num_changes, host.num_chunks, self._session.namespace.quarantine)
        if state == self._seen:
            return
        self._seen = state
        self._reported = {pin_id: num for pin_id, num in self._reported.items() if pin_id in bound}
        await self._report(list(bound))

    async def _report(self, pin_ids: Sequence[str]) -> None:
        breather, unreported, changed = Breather(), self._session.unreported, dict[str, int]()
        for pin_id in pin_ids:
            num = await self._num_resident(pin_id, breather)
            if self._session.ended:
                return
            if pin_id in unreported or self._reported.get(pin_id) != num:
                self._reported[pin_id] = changed[pin_id] = num
                unreported.discard(pin_id)
            if len(changed) == MAX_ASKED_PINS:
                self._session.peer.pins_resident(changed)
                changed = {}
        if changed:
            self._session.peer.pins_resident(changed)

    async def _num_resident(self, pin_id: str, breather: Breather) -> int:
        num_resident = 0
        for keys in slices(self._keys_of(pin_id)):
            await breather.pause()
            chunks = self._session.tiers.table.get_all(keys)
            num = sum(1 for _ in takewhile(_is_resident, chunks))
            num_resident += num
            if num < len(keys):
                break
        return num_resident


def _is_resident(chunk: Chunk | None) -> bool:
    return chunk is not None and chunk.readable and not chunk.eviction_pending
