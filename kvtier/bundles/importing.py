"""From the bytes of a bundle to a pinned, durable prompt.

Order: the whole bundle is spooled and verified; its chunks become packs, without rows; one ledger transaction records
prompt, binding and packs. A crash before that transaction leaves scratch files and packs without rows, which the next
start sweeps; after it everything is there. So an import happened or it did not.
"""

import os
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier.bundles.bundle_format import Bundle, BundleChunk
from kvtier.bundles.spool import Spool, in_batches
from kvtier.core.fingerprint import differing_fields
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.core.stored import PackRecord
from kvtier.errors import (
    BundleDamagedError,
    InvalidArgumentError,
    KvtierError,
    LedgerError,
    NamespaceMismatchError,
    QuotaExceededError,
    TierIOError,
)
from kvtier.ledger import BindingRow, Ledger, PromptRow
from kvtier.service import Cache
from kvtier.service.namespace import Namespace
from kvtier.service.prompts import PinWish, pinned_bytes
from kvtier.service.scratch import scratch_folder
from kvtier.service.views import PromptView
from kvtier.tiers.pack_format import reserve_bytes

MAX_PIECE_BYTES = 1024**2
_SHOWN_CHARS = 40


@dataclass(frozen=True, kw_only=True)
class ImportWish:
    """ImportStart of proto/kvtier/v1/cache.proto.

    Attributes:
        name: Empty: the bundle's.
        replace: Take the place of another prompt of this name.
        ttl_s: 0: the pin does not end by itself.
    """

    name: str = ""
    replace: bool = False
    ttl_s: int = 0


async def import_bundle(cache: Cache, wish: ImportWish, pieces: AsyncIterator[bytes]) -> PromptView:
    """Take a bundle in and pin its prompt; pin and chunks are durable on return. After an error nothing is left.

    Args:
        cache: Loop thread only.
        wish: How.
        pieces: The bundle's bytes in order, at most 1 MiB each.

    Raises:
        BundleDamagedError: It is not a whole, undamaged bundle.
        NamespaceMismatchError: No namespace here has its fingerprint and layout.
        PromptExistsError: The name is taken.
        QuotaExceededError: It would not fit on disk.
        InvalidArgumentError: The name cannot be used, or a piece is too long.
        TierIOError: The operating system refused.
        LedgerError: The ledger refused.
    """
    spool = await cache.stores.in_io(_spool_in, cache.config.disk.disk_dir)
    try:
        await _receive(cache, spool, pieces)
    except BaseException:
        spool.close()
        raise
    # From here to its end, even when the caller leaves: a pack that is being written cannot be called back.
    return await cache.changes.to_end("import", _take_in(cache, wish, spool))


async def _take_in(cache: Cache, wish: ImportWish, spool: Spool) -> PromptView:
    with spool:
        bundle, data_offset = await cache.stores.in_io(spool.header)
        pin = _pin_wish(wish, bundle)
        namespace = find_namespace(cache, bundle)
        _check_chunks(namespace, bundle)
        cache.prompts.draft(pin, time.time())  # says now, not after the work, that the name is taken
        _check_quota(cache, namespace, pin.name, bundle)
        placed = list(bundle.offsets(data_offset))
        for part in in_batches(placed, [chunk.raw_bytes for chunk in bundle.chunks]):
            await cache.stores.in_io(spool.verify, part)
        await _Import(cache, namespace, bundle, pin, spool, {chunk.key: (at, chunk) for at, chunk in placed}).run()
        return cache.pins.view(pin.name)


def _spool_in(state_dir: Path) -> Spool:
    return Spool(scratch_folder(state_dir))


async def _receive(cache: Cache, spool: Spool, pieces: AsyncIterator[bytes]) -> None:
    limit_bytes = cache.config.disk.disk_bytes
    async for piece in pieces:
        if len(piece) > MAX_PIECE_BYTES:
            raise InvalidArgumentError("piece.data", f"{len(piece)} bytes", f"at most {MAX_PIECE_BYTES} at a time")
        if spool.num_bytes + len(piece) > limit_bytes:
            raise QuotaExceededError("(bundle)", spool.num_bytes + len(piece), 0, limit_bytes)
        await cache.stores.in_io(spool.append, piece)


def _pin_wish(wish: ImportWish, bundle: Bundle) -> PinWish:
    prompt = bundle.prompt
    return PinWish(
        name=wish.name or prompt.name,
        tokens=prompt.tokens,
        model=prompt.model,
        lora_name=prompt.lora_name,
        lora_path=prompt.lora_path,
        cache_salt=prompt.cache_salt,
        recipe_json=prompt.recipe_json,
        ttl_s=wish.ttl_s,
        replace=wish.replace,
        priority=prompt.priority,
    )


def find_namespace(cache: Cache, bundle: Bundle) -> Namespace:
    """Return the namespace whose KV the bundle's is interchangeable with.

    Raises:
        NamespaceMismatchError: There is none; names the fields in which the nearest one differs.
    """
    known = [namespace for namespace in cache.namespaces.values() if not namespace.ephemeral]
    for namespace in known:
        if namespace.fingerprint == dict(bundle.fingerprint):
            if namespace.layout != bundle.layout:
                fields = ", ".join(_differing_layout(namespace.layout, bundle.layout))
                raise NamespaceMismatchError(
                    f"the bundle has another layout than namespace {namespace.namespace_id} here ({fields}); "
                    "the kvtier versions of the two machines differ: upgrade both, and export again"
                )
            return namespace
    if not known:
        raise NamespaceMismatchError(
            f"no engine has attached to this daemon yet, so no namespace can take the bundle; start vLLM with "
            f"{bundle.model} and the kvtier connector once, then import"
        )
    nearest = min(
        known,
        key=lambda other: (
            len(differing_fields(bundle.fingerprint, other.fingerprint)),
            other.row.model != bundle.model,
            other.namespace_id,
        ),
    )
    raise NamespaceMismatchError(
        f"the bundle's KV cannot be used here: it was made for {bundle.model}, and the nearest namespace here "
        f"({nearest.namespace_id[:12]}, {nearest.row.model}) differs in {_told(bundle, nearest)}; start vLLM with the "
        "same model and settings once, then import"
    )


def _told(bundle: Bundle, other: Namespace) -> str:
    fields = differing_fields(bundle.fingerprint, other.fingerprint)
    return ", ".join(
        f"{field} ({_shown(bundle.fingerprint.get(field))} in the bundle, {_shown(other.fingerprint.get(field))} here)"
        for field in fields
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= _SHOWN_CHARS else value[: _SHOWN_CHARS - 1] + "…"


def _differing_layout(one: KVLayout, other: KVLayout) -> list[str]:
    return [name for name in KVLayout.__dataclass_fields__ if getattr(one, name) != getattr(other, name)]


def _check_chunks(namespace: Namespace, bundle: Bundle) -> None:
    """What the digests cannot know: that keys and lengths are ones of this namespace."""
    try:
        namespace.check_keys("bundle.keys", bundle.keys)
    except InvalidArgumentError as error:
        raise BundleDamagedError(str(error)) from error
    for chunk in bundle.chunks:
        expected = namespace.payload_bytes(chunk.key)
        if chunk.raw_bytes != expected:
            raise BundleDamagedError(f"chunk {chunk.key.hex()} has {chunk.raw_bytes} bytes, one here has {expected}")


def _check_quota(cache: Cache, namespace: Namespace, name: str, bundle: Bundle) -> None:
    limit_bytes = cache.config.disk.disk_bytes
    used_bytes = sum(
        pinned_bytes(namespace, other, cache.prompts) for other in cache.prompts if other.pinned and other.name != name
    )
    if bundle.data_bytes + used_bytes > limit_bytes:
        raise QuotaExceededError(name, bundle.data_bytes, used_bytes, limit_bytes)


class _Import:
    """Writing and recording one verified bundle."""

    def __init__(
        self,
        cache: Cache,
        namespace: Namespace,
        bundle: Bundle,
        pin: PinWish,
        spool: Spool,
        placed: dict[ChunkKey, tuple[int, BundleChunk]],
    ) -> None:
        self._cache, self._namespace, self._bundle, self._pin = cache, namespace, bundle, pin
        self._spool, self._placed = spool, placed
        self._written: list[PackRecord] = []

    async def run(self) -> None:
        usage = self._cache.stores.disk_usage
        num_bytes = self._largest_bytes(self._missing())
        if not usage.fits(num_bytes):
            await self._namespace.find_disk_room(num_bytes)
        if not usage.fits(num_bytes):
            raise QuotaExceededError(self._pin.name, num_bytes, usage.used_bytes, usage.limit_bytes)
        # Promised until rows are there: a check of the running daemon waits for these packs, as for any.
        with usage.promised(num_bytes):
            try:
                await self._write(self._missing())
                await self._cache.changes.exclusively("import", self._record)
            except BaseException:
                await self._discard()
                raise

    def _missing(self) -> list[ChunkKey]:
        """Chunks that are not on disk here yet."""
        written = {chunk.key for record in self._written for chunk in record.chunks}
        return [key for key in self._placed if key not in written and not self._on_disk(key)]

    def _on_disk(self, key: ChunkKey) -> bool:
        chunk = self._namespace.table.get(key)
        return chunk is not None and chunk.location is not None

    def _largest_bytes(self, keys: Collection[ChunkKey]) -> int:
        sizes = [(key, self._placed[key][1].raw_bytes) for key in keys]
        stored_bytes = sum(self._placed[key][1].stored_bytes for key in keys)
        return stored_bytes + (reserve_bytes(self._namespace.namespace_id, sizes) if sizes else 0)

    async def _write(self, keys: Sequence[ChunkKey]) -> None:
        stores = self._cache.stores
        if not keys:
            return
        sizes = [self._placed[key][1].raw_bytes for key in keys]
        # The pack tier reads its own directory only. The ledger calls the link removed before it is there: whatever
        # happens, the next start sweeps it.
        link = self._cache.config.disk.disk_dir / "packs" / self._spool.path.name
        await stores.in_ledger(stores.ledger.mark_removed, [link.stem])
        await stores.in_io(_link, self._spool.path, link)
        try:
            for batch in in_batches(keys, sizes, stores.config.disk.pack_bytes):
                chunks = [self._spool.stored(*self._placed[key]) for key in batch]
                record = await stores.in_io(stores.disk.rewrite_pack, self._namespace.namespace_id, chunks)
                self._written.append(record)
        finally:
            await stores.in_io(link.unlink, missing_ok=True)

    async def _record(self) -> None:
        """Under the change lock. What is on disk stays there until it is pinned: eviction waits."""
        namespace = self._namespace
        if self._cache.namespaces.get(namespace.namespace_id) is not namespace:
            raise NamespaceMismatchError(f"namespace {namespace.namespace_id} ended meanwhile; import again")
        async with namespace.relocating:
            emptied = await self._record_here()
        await namespace.delete_packs(emptied)

    async def _record_here(self) -> list[str]:
        """Nothing is awaited between the ledger's answer and what memory does about it."""
        cache, namespace, stores = self._cache, self._namespace, self._cache.stores
        while missing := self._missing():  # held when we looked, evicted since
            await self._write(missing)
        prompt, old = cache.prompts.draft(self._pin, time.time())
        binding = BindingRow(
            pin_id=prompt.pin_id,
            namespace_id=namespace.namespace_id,
            keys=self._bundle.keys,
            covered_tokens=self._bundle.covered_tokens,
        )
        # Not ours to discard from here on, but for a refusal: after a stop they have their rows, or are swept.
        written, self._written = self._written, []
        try:
            emptied = await stores.in_ledger(_record_in, stores.ledger, prompt, binding, written)
        except LedgerError:
            self._written = written
            raise
        for record in written:
            stores.disk_usage.add(record.pack_id, record.file_bytes)
            for chunk in record.chunks:
                namespace.table.place(chunk.key, chunk)
        cache.pins.take_in(prompt, old)
        bound = cache.prompts.binding(prompt.pin_id, namespace.namespace_id)
        namespace.table.pin(binding.keys)
        namespace.table.unpin(bound.keys if bound is not None else ())
        cache.prompts.bind(binding)
        namespace.announce(binding.keys, held=True)
        return emptied

    async def _discard(self) -> None:
        """What has no row must not stay; what cannot be removed now, the next start sweeps."""
        for record in self._written:
            try:
                await self._cache.stores.in_io(self._cache.stores.disk.delete_pack, record.pack_id)
            except KvtierError:
                continue


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as exc:
        raise TierIOError(target, "link", exc) from exc


def _record_in(ledger: Ledger, prompt: PromptRow, binding: BindingRow, records: Sequence[PackRecord]) -> list[str]:
    """Ledger thread: all in one transaction; returns packs left without chunks."""
    with ledger.together():
        ledger.put_prompt(prompt)
        ledger.put_binding(binding)
        return [pack_id for record in records for pack_id in ledger.commit_pack(record)]
