"""Start: the ledger says what is held, the packs say what is true; what disagrees is dropped, never served."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.collector import collector_off
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import StoredChunk
from kvtier.errors import LedgerError
from kvtier.ledger import LedgerSnapshot
from kvtier.obs.log import log_event

if TYPE_CHECKING:
    from kvtier.service.cache import Cache
    from kvtier.tiers.packs import PackTier

logger = logging.getLogger(__name__)


def refuse_packs_without_ledger(ledger_path: Path, disk: "PackTier") -> None:
    """A start sweeps packs that the ledger does not know: a lost ledger must not mean that all of them are deleted."""
    # An empty file is a new database to SQLite; a ledger has had a page since before its first pack.
    is_empty = ledger_path.exists() and not ledger_path.stat().st_size
    if (is_empty or not ledger_path.exists()) and (num_packs := len(disk.list_packs())):
        raise LedgerError(
            f"{ledger_path} is {'empty' if is_empty else 'missing'}, but {disk.directory} holds {num_packs} packs; put "
            "the ledger back, rebuild it with `kvtier fsck --offline --repair`, or move the packs away to begin anew"
        )


async def recover(cache: "Cache") -> None:
    """Fill a new cache from ledger and packs.

    A crash between a pack's rename and its ledger transaction leaves an orphan file: it is removed. A pack that is
    gone or shorter than the ledger says loses the chunks that lie beyond its end: they are counted as damaged, and
    stored anew when next computed. Bytes themselves are verified at every read.
    """
    stores = cache.stores
    snapshot = await stores.in_ledger(stores.ledger.load)
    for row in snapshot.namespaces:
        cache.adopt_namespace(row, ephemeral=False)
    with collector_off():
        await _place_chunks(cache, snapshot)
    for prompt in snapshot.prompts:
        cache.prompts.put(prompt)
    for binding in snapshot.bindings:
        prompt_row, namespace = cache.prompts.by_pin_id(binding.pin_id), cache.namespaces.get(binding.namespace_id)
        if prompt_row is None or namespace is None:
            continue
        cache.prompts.bind(binding)
        if prompt_row.pinned:
            namespace.table.pin(binding.keys)
    removed = await stores.in_io(stores.disk.sweep, set(snapshot.packs))
    log_event(
        logger,
        "recovered",
        namespaces=len(cache.namespaces),
        prompts=len(cache.prompts),
        packs=len(snapshot.packs),
        disk_bytes=stores.disk_usage.used_bytes,
        orphans_removed=len(removed),
        damaged=stores.counters.chunks_damaged,
    )


async def _place_chunks(cache: "Cache", snapshot: LedgerSnapshot) -> None:
    stores = cache.stores
    on_disk = await stores.in_io(stores.disk.list_packs)
    for pack_id, record in snapshot.packs.items():
        file_bytes = on_disk.get(pack_id, 0)
        namespace = cache.namespaces.get(record.namespace_id)
        whole, lost = _split_at(record.chunks, file_bytes)
        if lost:
            stores.counters.chunks_damaged += len(lost)
            log_event(
                logger, "pack_damaged", level=logging.WARNING, pack=pack_id, lost=len(lost), file_bytes=file_bytes
            )
            for emptied in await stores.in_ledger(stores.ledger.drop_chunks, record.namespace_id, lost):
                await stores.in_io(stores.disk.quarantine_pack, emptied)
                stores.counters.packs_quarantined += file_bytes > 0
            if namespace is not None and whole:
                namespace.packs.damaged.add(pack_id)  # compaction takes the good ones out of it
        if namespace is not None:
            for chunk in whole:
                namespace.table.place(chunk.key, chunk)
        if whole or not lost:  # without chunks it is fsck's to judge, and takes its room until then
            stores.disk_usage.add(pack_id, file_bytes)


def _split_at(chunks: Sequence[StoredChunk], file_bytes: int) -> tuple[Sequence[StoredChunk], list[ChunkKey]]:
    """Return the chunks that lie within a file of this length, and the keys of the others."""
    whole = [chunk for chunk in chunks if chunk.offset + chunk.stored_bytes <= file_bytes]
    if len(whole) == len(chunks):
        return whole, []
    return whole, [chunk.key for chunk in chunks if chunk.offset + chunk.stored_bytes > file_bytes]
