"""Rows that get their pages ahead of need: making pages costs as much time as reading what goes there."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvtier.core.slots import HostBudget, SlotRef
from kvtier.errors import DrainingError
from kvtier.host.tenant import Tenant
from kvtier.obs import trace

_SLICE_BYTES = 8 * 1024**2
"""Made at once: 4 ms of one core."""
_SLICE_ROWS = 256
_POLL_S = 0.1
_PAUSE_S = 0.015
_PAUSE_RATIO = 4
"""Between two slices, and at least so many times what the last one took: a fifth of one core."""
_STARTING_PAUSE_S = 0.002
_STARTING_PAUSE_RATIO = 1
"""Half a core, while no engine serves: vLLM starts, and what is made then is made beside nobody's request."""
_CROWDED_RATIO = 1.5
_CROWDED_PAUSE_RATIO = 24
"""A slice that took so many times its CPU time was short of cores: somebody computes. A twenty-fifth of one, then."""
_MAX_PAUSE_S = 0.5
_CALM_S = 0.25
"""After a hit: its engine copies the chunks and computes the question, and wants the cores for that. Not waited for
when less than half of the spare rows are left, and little: where hits follow each other, it might never be calm."""
_URGENT_BYTES = 128 * 1024**2
_RETRY_S = 30.0
_SLICE_SHARE = 8
"""At most an eighth of what could be taken is made at once: an acquire, which waits for nobody, is to find the rest."""


class Preallocator:
    """Keeps some free rows of every namespace with an engine backed and mapped, a slice at a time.

    Nothing is evicted for them, no request that waits for the disk waits for them, and they stay below the low
    watermark. To everybody else they are free rows: stores and promotions take them first, other namespaces get their
    memory when they are short. Loop thread only.

    Args:
        namespaces: Those there are now.
        budget: Shared by all namespaces.
        spare_bytes: Of free rows with pages that each namespace with an engine shall have.
        low_watermark_bytes: Of the budget: not above that.
        until_quiet: Returns when no request waits for the disk, and none was served for so many seconds.
        prepare: Called once, before the first rows.
    """

    def __init__(
        self,
        namespaces: Callable[[], Iterable[Tenant]],
        *,
        budget: HostBudget,
        spare_bytes: int,
        low_watermark_bytes: int,
        until_quiet: Callable[[float], Awaitable[None]],
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        self._namespaces, self._budget = namespaces, budget
        self._spare_bytes, self._low_watermark_bytes = spare_bytes, low_watermark_bytes
        self._until_quiet, self._prepare = until_quiet, prepare
        self._is_crowded = False

    async def run(self) -> None:
        """Make rows where they are short, until cancelled."""
        is_prepared = False
        while self._spare_bytes:
            await asyncio.sleep(_POLL_S)
            if not is_prepared and any(namespace.live for namespace in self._namespaces()):
                await self._prepare()
                is_prepared = True
            for namespace in list(self._namespaces()):
                while self._num_short(namespace):
                    is_urgent = self._is_urgent(namespace)
                    await self._until_quiet(0.0 if is_urgent else _CALM_S)
                    began_s = time.monotonic()
                    has_memory = await self._made(namespace)
                    pause_s = self._pause_s(time.monotonic() - began_s, is_urgent=is_urgent)
                    await asyncio.sleep(pause_s if has_memory else _RETRY_S)

    def _is_urgent(self, namespace: Tenant) -> bool:
        free_bytes = namespace.host.usage.num_free * namespace.layout.row_bytes
        return free_bytes < min(_URGENT_BYTES, self._spare_bytes / 2)

    def _pause_s(self, slice_s: float, *, is_urgent: bool) -> float:
        if not any(namespace.serving for namespace in self._namespaces()):
            return max(_STARTING_PAUSE_S, _STARTING_PAUSE_RATIO * slice_s)
        ratio = _CROWDED_PAUSE_RATIO if self._is_crowded and not is_urgent else _PAUSE_RATIO
        return max(_PAUSE_S, min(ratio * slice_s, _MAX_PAUSE_S))

    async def _made(self, namespace: Tenant) -> bool:
        """Make a slice of rows, as a task of the namespace, which may close; say whether there was memory for it."""
        try:
            return await namespace.tasks.complete("preallocation", self._make(namespace))
        except DrainingError:
            return True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return True  # it was the namespace that closed

    def _num_short(self, namespace: Tenant) -> int:
        if not namespace.live or not namespace.host.is_open or namespace.host.recovering:
            return 0
        usage = namespace.host.usage
        num_wanted = self._spare_bytes // usage.row_bytes - usage.num_free
        num_affordable = (self._low_watermark_bytes - self._budget.used_bytes) // usage.row_bytes
        return max(0, min(num_wanted, num_affordable, usage.num_slots - usage.num_backed))

    async def _make(self, namespace: Tenant) -> bool:
        host = namespace.host
        num_rows = max(1, min(_SLICE_BYTES // namespace.layout.row_bytes, host.num_takable // _SLICE_SHARE))
        num_rows = min(num_rows, _SLICE_ROWS, self._num_short(namespace))

        def back(refs: Sequence[SlotRef]) -> int:
            wall_s, cpu_s = time.monotonic(), time.thread_time()
            with trace.span("make pages", chunks=len(refs), background=True):
                num_backed = host.back(refs)
            wall_s, cpu_s = time.monotonic() - wall_s, time.thread_time() - cpu_s
            self._is_crowded = wall_s > _CROWDED_RATIO * cpu_s
            return num_backed

        return await host.preallocate(num_rows, back)
