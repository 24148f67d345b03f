"""Start with cold host memory: pinned prompts are promoted in the background, before their first request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from kvtier.concurrency.turns import Breather, slices
from kvtier.core.layout import ChunkKey
from kvtier.errors import ArenaError
from kvtier.obs.log import log_event
from kvtier.prompts.book import PromptBook
from kvtier.tiering.namespace import Namespace

logger = logging.getLogger(__name__)


class Prefetcher:
    """Has promoters prefetch pinned prompts; each yields to every request.

    It takes free memory only, up to the low watermark of `host_bytes`: it evicts nothing, of any namespace. A namespace
    without an arena gets one by `open_arena`, if there is capacity for one; that says whether it has one.
    """

    def __init__(self, prompts: PromptBook, open_arena: Callable[[Namespace], bool]) -> None:
        self._prompts = prompts
        self._open_arena = open_arena

    async def run(self, namespaces: Iterable[Namespace]) -> None:
        """Promote what is pinned and only on disk: the namespace last used first, prompts by priority, heads first."""
        for namespace in sorted(namespaces, key=lambda namespace: namespace.row.seen_unix_s, reverse=True):
            keys = await self._on_disk(namespace)
            if namespace.ephemeral or not keys or not self._open(namespace):
                continue
            namespace.promoter.prefetch(keys, has_capacity=namespace.has_spare_memory)
            await namespace.promoter.until_prefetched()
            num_chunks = 0
            for part in slices(keys):
                num_chunks += sum(not _only_on_disk(namespace, key) for key in part)
                await asyncio.sleep(0)
            log_event(logger, "prefetched", namespace=namespace.namespace_id, chunks=num_chunks)

    async def _on_disk(self, namespace: Namespace) -> list[ChunkKey]:
        """Return the keys of what is pinned and only on disk, each once."""
        keys: dict[ChunkKey, None] = {}
        async for part in _pinned_keys(self._prompts, namespace.namespace_id):
            keys.update((key, None) for key in part if _only_on_disk(namespace, key))
        return list(keys)

    def _open(self, namespace: Namespace) -> bool:
        """Say whether there is capacity, and an arena to promote into."""
        if not namespace.has_spare_memory():
            return False
        try:
            return self._open_arena(namespace)
        except ArenaError as error:
            log_event(logger, "not_prefetched", level=logging.WARNING, problem=str(error))
            return False


async def rank_pinned(prompts: PromptBook, namespace_id: str) -> dict[ChunkKey, int]:
    """Return a namespace's pinned chunks, each with a number: the more important, the higher."""
    rank: dict[ChunkKey, int] = {}
    async for part in _pinned_keys(prompts, namespace_id):
        rank.update((key, -number) for number, key in enumerate(part, len(rank)))
    return rank


async def _pinned_keys(prompts: PromptBook, namespace_id: str) -> AsyncIterator[Sequence[ChunkKey]]:
    """Yield a namespace's pinned keys in slices, with turns of the loop between them, the most important first."""
    breather = Breather()
    for row in prompts.pinned_bindings(namespace_id):
        for part in slices(row.keys):
            yield part
            await breather.pause()


def _only_on_disk(namespace: Namespace, key: ChunkKey) -> bool:
    chunk = namespace.table.get(key)
    return chunk is not None and chunk.slot is None and chunk.on_disk
