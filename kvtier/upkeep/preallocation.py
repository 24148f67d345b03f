"""Rows that get their pages ahead of need: making pages costs as much time as reading what goes there."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from kvtier.concurrency.pauses import LOOK_S, RETRY_S, until_next
from kvtier.concurrency.turns import BATCH_BYTES
from kvtier.core.slots import SlotRef
from kvtier.errors import DrainingError
from kvtier.obs import trace
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

_PAUSE_RATIO = 4
"""Pause after a slice, in times of what it took: a fifth of one core. 256 MiB are there within a second, and vLLM
listens two seconds after it has attached. See ADR 13 for what this is worth, and for what was more complicated."""


class Preallocator:
    """Keeps some free rows of every namespace with an engine backed and mapped, a slice at a time.

    Nothing is evicted for them, no slice begins while a request waits for the disk, and they stay below the low
    watermark. They are free rows like others: stores and promotions take them first, other namespaces get their memory
    when they are short. Loop thread only.

    Args:
        resources: Budget, threads, reads of requests and configuration.
        namespaces: By id; they come and go.
    """

    def __init__(self, resources: Resources, namespaces: Mapping[str, Namespace]) -> None:
        self._resources, self._namespaces = resources, namespaces
        self._preallocated_bytes = resources.config.host.preallocated_bytes

    async def run(self) -> None:
        """Make rows where they are short, until cancelled."""
        is_prepared = False
        while self._preallocated_bytes:
            await asyncio.sleep(until_next(LOOK_S))
            if not is_prepared and any(namespace.live for namespace in self._namespaces.values()):
                await self._resources.in_io(self._resources.disk.prepare_reads)
                is_prepared = True
            for namespace in list(self._namespaces.values()):
                while self._num_short(namespace):
                    await self._resources.request_reads.until_quiet()
                    began_s = time.monotonic()
                    has_memory = await self._made(namespace)
                    pause_s = _PAUSE_RATIO * (time.monotonic() - began_s)
                    await asyncio.sleep(pause_s if has_memory else RETRY_S)

    async def _made(self, namespace: Namespace) -> bool:
        """Make a slice of rows, as a task of the namespace, which may close; say whether there was memory for it."""
        try:
            return await namespace.tasks.run_shielded("preallocation", self._make(namespace))
        except DrainingError:
            return True
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return True  # it was the namespace that closed

    def _num_short(self, namespace: Namespace) -> int:
        if not namespace.live or not namespace.host.is_open or namespace.host.recovering:
            return 0
        usage = namespace.host.usage
        num_wanted = self._preallocated_bytes // usage.row_bytes - usage.num_free
        free_bytes = self._resources.config.host.low_watermark_bytes - self._resources.budget.used_bytes
        return max(0, min(num_wanted, free_bytes // usage.row_bytes, usage.num_slots - usage.num_backed))

    async def _make(self, namespace: Namespace) -> bool:
        host = namespace.host
        # At most an eighth of what could be taken: an acquire, which waits for no one, is to find the rest.
        num_rows = max(1, min(BATCH_BYTES // namespace.layout.row_bytes, host.num_takable // 8))
        num_rows = min(num_rows, 256, self._num_short(namespace))  # of small rows: a millisecond of the loop

        def back(refs: Sequence[SlotRef]) -> int:
            with trace.span("make pages", chunks=len(refs), background=True):
                return host.back(refs)

        has_memory = await host.preallocate(num_rows, back)
        namespace.top_up_all()  # a session may have no credits because memory was refused
        return has_memory
