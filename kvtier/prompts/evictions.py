"""What operators have dropped on command: chunks of a prompt, or of all, and prompts that are not pinned."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from kvtier.concurrency.tasks import Changes
from kvtier.concurrency.turns import slices
from kvtier.core.layout import ChunkKey
from kvtier.errors import NamespaceNotFoundError, PromptPinnedError
from kvtier.obs.log import log_event
from kvtier.prompts.book import PromptBook
from kvtier.prompts.pins import Pins
from kvtier.tiering.command_eviction import Evicted, EvictTier, evict_chunks
from kvtier.tiering.namespace import Namespace

logger = logging.getLogger(__name__)


class Evictions:
    """Carries them out. Loop thread only.

    Args:
        pins: Forgets prompts.
        prompts: All prompts; the cache's own, which change, as do its namespaces.
        verified: Set once nothing of a previous daemon's memory comes to be served any longer; no eviction runs before.
        retry_refused: Called when what the disk quota refused may fit.
    """

    def __init__(
        self,
        pins: Pins,
        prompts: PromptBook,
        namespaces: Mapping[str, Namespace],
        changes: Changes,
        verified: asyncio.Event,
        retry_refused: Callable[[], None],
    ) -> None:
        self._pins, self._prompts, self._namespaces, self._changes = pins, prompts, namespaces, changes
        self._verified, self._retry_refused = verified, retry_refused

    async def evict(
        self,
        name: str,
        *,
        force: bool,
        tier: EvictTier = EvictTier.ANY,
        precondition: Callable[[], None] | None = None,
    ) -> Evicted:
        """Drop a prompt's chunks from the tier, except what other pinned prompts share.

        `precondition` raises if nothing is to change; it is called while no other change runs.

        Raises:
            PromptNotFoundError: There is no such prompt.
            PromptPinnedError: It is pinned, its chunks would leave the last tier, and `force` is not set.
            LedgerError: The ledger refused.
        """
        return await self._changes.run_shielded("evict", self._evict(name, precondition, force=force, tier=tier))

    async def _evict(
        self, name: str, precondition: Callable[[], None] | None, *, force: bool, tier: EvictTier
    ) -> Evicted:
        await self._verified.wait()  # or what is dropped now would be adopted a moment later, its prompt being pinned
        done = Evicted()
        async with self._changes.lock:
            if precondition is not None:
                precondition()
            prompt = self._prompts.get(name)
            if prompt.pinned and not force and tier is not EvictTier.HOST:
                raise PromptPinnedError(name)
            for row in self._prompts.bindings_of(prompt.pin_id):
                namespace = self._namespaces.get(row.namespace_id)
                if namespace is None:  # ephemeral, and ended while the one before was dealt with
                    continue
                await _evict_slices(namespace, row.keys, tier, done, max_pins=int(prompt.pinned))
            if not prompt.pinned and tier is EvictTier.ANY:
                await self._pins.forget_now(prompt)
            self._retry_refused()
        log_event(logger, "prompt_evicted", name=name, tier=tier.name, chunks=done.num_chunks, forced=force)
        return done

    async def evict_all(self, *, force: bool, tier: EvictTier = EvictTier.ANY, namespace_id: str = "") -> Evicted:
        """Drop every chunk that no pinned prompt has from the tier; with `force` those of pinned prompts too.

        With a namespace, its chunks only; no prompt is forgotten then.

        Raises:
            NamespaceNotFoundError: There is no such namespace.
            LedgerError: The ledger refused; what was dropped until then stays dropped.
        """
        if namespace_id and namespace_id not in self._namespaces:
            raise NamespaceNotFoundError(namespace_id)
        return await self._changes.run_shielded("evict", self._evict_all(namespace_id, force=force, tier=tier))

    async def _evict_all(self, namespace_id: str, *, force: bool, tier: EvictTier) -> Evicted:
        await self._verified.wait()  # see _evict
        done = Evicted()
        async with self._changes.lock:
            for namespace in list(self._namespaces.values()):
                if namespace_id not in ("", namespace.namespace_id):
                    continue
                await _evict_slices(namespace, namespace.table.keys(), tier, done, max_pins=None if force else 0)
            if tier is EvictTier.ANY and not namespace_id:
                for part in slices([prompt for prompt in self._prompts if not prompt.pinned]):
                    await self._pins.forget_now(*part)  # together: each commit takes as long as the disk's fsyncs
            self._retry_refused()
        log_event(
            logger, "all_evicted", namespace=namespace_id or "all", tier=tier.name, chunks=done.num_chunks, forced=force
        )
        return done


async def _evict_slices(
    namespace: Namespace, keys: Sequence[ChunkKey], tier: EvictTier, done: Evicted, *, max_pins: int | None
) -> None:
    """Evict chunks that no more than `max_pins` prompts pin, in slices."""
    for part in slices(keys):
        chunks = [chunk for chunk in namespace.table.known(part) if chunk.held]
        evicted = [chunk.key for chunk in chunks if max_pins is None or chunk.num_pins <= max_pins]
        done.num_shared_chunks += len(chunks) - len(evicted)
        await evict_chunks(namespace.tiers, namespace.write_back, evicted, tier, done)
        await asyncio.sleep(0)
