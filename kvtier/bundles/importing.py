"""From the bytes of a bundle to a pinned, durable prompt.

Order: the header is judged, and space for everything kept (`receiving`); the whole bundle is spooled and verified; its
chunks become packs, without rows; one ledger transaction records prompt, binding and packs. A crash before that
transaction leaves scratch files, which the next start sweeps, and packs without rows, which it adopts as cache that
nothing pins; after it everything is there. So the prompt was imported whole or not at all.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from operator import attrgetter

from kvtier.bundles.bundle import Bundle
from kvtier.bundles.receiving import (
    Reception,
    RequestedImport,
    admit,
    check_same_keys,
    drafted,
    no_space,
    not_on_disk,
    pack_bytes,
)
from kvtier.bundles.spool import Spool, in_batches, raw_bytes_of
from kvtier.concurrency.tasks import shielded
from kvtier.concurrency.turns import slices
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.chunk_index import IndexChange
from kvtier.disk.disk_usage import PackSpace, ScratchSpace
from kvtier.errors import (
    DrainingError,
    KvtierError,
    LedgerError,
    NamespaceMismatchError,
)
from kvtier.ledger import BindingRow, Ledger, PromptRow
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.states.status import PromptView
from kvtier.service import Cache
from kvtier.tiering.namespace import Namespace


async def import_bundle(cache: Cache, requested: RequestedImport, pieces: AsyncIterator[bytes]) -> PromptView:
    """Take a bundle in and pin its prompt; pin and chunks are durable on return. After an error nothing is left.

    Loop thread only.

    Args:
        cache: Gets the prompt.
        requested: Under which name, and for how long.
        pieces: The bundle's bytes in order, at most 1 MiB each.

    Raises:
        BundleDamagedError, NamespaceMismatchError, PromptExistsError, QuotaExceededError, DiskSpaceError,
        InvalidArgumentError: See `receive` and `admit`.
        TierIOError: The operating system refused.
        LedgerError: The ledger refused.
    """
    async with AsyncExitStack() as stack:
        space = stack.enter_context(cache.resources.disk_usage.scratch_space())
        disk, run = cache.resources.disk, cache.resources.in_io
        spool = await run(Spool.of_disk, cache.config.disk.disk_dir, disk, stack, run)
        bundle = await Reception(cache, requested, spool, space).receive(pieces)
        held = stack.pop_all()
    try:
        # From here to its end, even when the caller leaves: a pack that is being written cannot be called back.
        return await cache.changes.run_shielded("import", _take_in(cache, requested, bundle, spool, space, held))
    except DrainingError:  # it did not begin
        await held.aclose()
        raise


async def _take_in(
    cache: Cache, requested: RequestedImport, bundle: Bundle, spool: Spool, space: ScratchSpace, held: AsyncExitStack
) -> PromptView:
    async with held:
        # Things may have changed while it came.
        pin, namespace = await cache.pins.within_quota(lambda: admit(cache, requested, bundle))
        for part in await cache.resources.in_io(in_batches, bundle.chunks, raw_bytes_of):
            await cache.resources.in_io(spool.verify, part)
        space.release_packs()
        await _Import(cache, namespace, bundle, pin, spool).run()
        return await cache.pins.view(pin.name)


class _Import:
    """Writing and recording one verified bundle."""

    def __init__(self, cache: Cache, namespace: Namespace, bundle: Bundle, pin: RequestedPin, spool: Spool) -> None:
        self._cache, self._namespace, self._bundle, self._pin = cache, namespace, bundle, pin
        self._spool = spool
        self._written: list[PackRecord] = []
        self._keys_written: set[ChunkKey] = set()

    async def run(self) -> None:
        resources, missing = self._cache.resources, await self._missing()
        usage, key_name = resources.disk_usage, resources.disk.writes_with
        num_bytes = await resources.in_io(pack_bytes, self._namespace, self._bundle, missing, key_name)
        await self._cache.pins.within_quota(lambda: self._find_space(num_bytes))
        with usage.promised(num_bytes) as space:
            try:
                await self._write(await self._missing(), space)
                await self._cache.changes.exclusively("import", partial(self._record, space))
            except BaseException:
                await self._discard()
                raise

    async def _find_space(self, num_bytes: int) -> None:
        usage = self._cache.resources.disk_usage
        if not usage.fits(num_bytes):
            await self._namespace.find_disk_capacity(num_bytes, for_pins=True)
        if not usage.fits(num_bytes):
            raise no_space(self._pin.name, usage, num_bytes)

    async def _missing(self) -> list[ChunkKey]:
        """Chunks that are not on disk here yet."""
        return [key for key in await not_on_disk(self._namespace, self._bundle.keys) if key not in self._keys_written]

    async def _write(self, keys: Sequence[ChunkKey], space: PackSpace) -> None:
        resources = self._cache.resources
        if not keys:
            return
        for batch in await resources.in_io(self._batches, keys):
            record = await resources.in_io(
                resources.disk.write_stored, self._namespace.namespace_id, batch, self._spool.stored
            )
            self._written.append(record)
            space.written(record.pack_id, record.file_bytes)
            self._keys_written.update(chunk.key for chunk in batch)

    def _batches(self, keys: Sequence[ChunkKey]) -> list[list[StoredChunk]]:
        """Worker thread: what each pack is to hold."""
        chunks, max_bytes = [self._bundle.stored[key] for key in keys], self._cache.config.disk.pack_bytes
        return in_batches(chunks, attrgetter("raw_bytes"), max_bytes)

    async def _record(self, space: PackSpace) -> None:
        """Under the change lock. What is on disk stays there until it is pinned: eviction waits."""
        namespace = self._namespace
        if self._cache.namespaces.get(namespace.namespace_id) is not namespace:
            raise NamespaceMismatchError(f"namespace {namespace.namespace_id} ended meanwhile; import again")
        async with namespace.index.hold() as change:
            await self._record_here(change, space)

    async def _record_here(self, change: IndexChange, space: PackSpace) -> None:
        """While both locks are held nothing is deleted from disk: what is missing here is all that is missing."""
        cache, namespace = self._cache, self._namespace
        while missing := await self._missing():  # held when we looked, evicted since
            await self._write(missing, space)
        prompt, old = await drafted(cache, self._pin)  # other imports were recorded since it was judged
        check_same_keys(cache, prompt, namespace, self._bundle)
        binding = BindingRow(
            pin_id=prompt.pin_id,
            namespace_id=namespace.namespace_id,
            keys=self._bundle.keys,
            covered_tokens=self._bundle.covered_tokens,
        )
        # Not ours to discard from here on, but for a refusal: after a stop they have rows, or are adopted.
        written, self._written = self._written, []
        staged = cache.prompts.replacements.get(prompt.name)  # the bundle is what was asked for last
        try:
            await change.record(written, also=partial(_put_promise, prompt, binding, staged))
        except LedgerError:
            self._written = written
            raise
        await cache.pins.take_in(prompt, old)
        if staged is not None:
            await cache.pins.forgotten(staged)
        bound = cache.prompts.binding(prompt.pin_id, namespace.namespace_id)
        await cache.pins.count(namespace, binding.keys, pinned=True)
        await cache.pins.count(namespace, bound.keys if bound is not None else (), pinned=False)
        cache.prompts.bind(binding)
        for part in slices(binding.keys):
            namespace.inventory.announce(part, held=True)
            await asyncio.sleep(0)

    @shielded
    async def _discard(self) -> None:
        """What has no row must not stay; what cannot be removed now counts, and the next start adopts it."""
        resources = self._cache.resources
        for record in self._written:
            try:
                await resources.in_io(resources.disk.delete_pack, record.pack_id)
            except KvtierError:
                continue
            resources.disk_usage.remove(record.pack_id)


def _put_promise(prompt: PromptRow, binding: BindingRow, staged: PromptRow | None, ledger: Ledger) -> None:
    """Ledger thread. `staged`: what was to replace the pin."""
    ledger.promises.put_prompt(prompt)
    ledger.promises.put_binding(binding)
    if staged is not None:
        ledger.promises.delete_prompt(staged.name)
