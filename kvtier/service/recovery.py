"""Start: the ledger says what is held, the packs say what is true; what disagrees is dropped, never served.

What the ledger has lost comes back: promises from their copies, chunks from the packs that it does not know.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from kvtier.collector import collector_off
from kvtier.ledger import LedgerSnapshot
from kvtier.ledger.namespace_files import load_namespaces
from kvtier.obs.log import log_event
from kvtier.service.orphans import adopt_orphans

if TYPE_CHECKING:
    from kvtier.disk.packs.pack_tier import PackTier
    from kvtier.service.cache import Cache

logger = logging.getLogger(__name__)

_MAX_NAMES = 20


async def recover(cache: "Cache", disk: "PackTier") -> None:
    """Fill a new cache from ledger, copies of promises and packs.

    A crash between a pack's rename and its ledger transaction leaves a pack without a row: it is adopted. A pack that
    is gone or shorter than the ledger says loses the chunks that lie beyond its end: they are counted as damaged, and
    stored again when next computed. Bytes themselves are verified at every read.

    Raises:
        LedgerError: The ledger cannot be read or written.
        TierIOError: The packs cannot be listed.
    """
    stores = cache.stores
    await _restore_promises(cache)
    snapshot = await stores.in_ledger(stores.ledger.load)
    for row in snapshot.namespaces:
        cache.adopt_namespace(row, ephemeral=False)
    removed = await stores.in_ledger(stores.ledger.removed_packs)
    swept = await stores.in_io(disk.sweep, removed)
    if removed:
        await stores.in_ledger(stores.ledger.forget_removed, removed)
    on_disk = await stores.in_io(disk.list_packs)
    with collector_off():
        await _load_index(cache, snapshot, on_disk)
    num_adopted = await adopt_orphans(cache, disk, sorted(on_disk.keys() - snapshot.packs.keys()))
    for prompt in snapshot.prompts:
        cache.prompts.put(prompt)
    for binding in snapshot.bindings:
        prompt_row, namespace = cache.prompts.by_pin_id(binding.pin_id), cache.namespaces.get(binding.namespace_id)
        if prompt_row is None or namespace is None:
            continue
        cache.prompts.bind(binding)
        if prompt_row.pinned:
            namespace.table.pin(binding.keys)
    log_event(
        logger,
        "recovered",
        namespaces=len(cache.namespaces),
        prompts=len(cache.prompts),
        packs=len(snapshot.packs) + num_adopted,
        disk_bytes=stores.disk_usage.used_bytes,
        adopted=num_adopted,
        removed=len(swept),
        damaged=stores.counters.chunks_damaged,
    )


async def _restore_promises(cache: "Cache") -> None:
    stores = cache.stores
    copies = partial(load_namespaces, cache.config.disk.disk_dir)
    restored = await stores.in_ledger(stores.ledger.restore_promises, copies)
    if restored:
        log_event(
            logger,
            "promises_restored",
            level=logging.WARNING,
            prompts=len(restored.prompts),
            bindings=restored.num_bindings,
            damaged_copies=restored.num_damaged,
            names=",".join(restored.prompts[:_MAX_NAMES]),
            perhaps_deleted_since=",".join(restored.without_copy[:_MAX_NAMES]),
            why="the ledger had lost what was acknowledged, or an old backup of it was put back",
            remedy="compare `kvtier list` with what you pinned; `kvtier unpin` what was ended since the backup",
        )


async def _load_index(cache: "Cache", snapshot: LedgerSnapshot, on_disk: Mapping[str, int]) -> None:
    for pack_id, record in snapshot.packs.items():
        file_bytes = on_disk.get(pack_id, 0)
        if (namespace := cache.namespaces.get(record.namespace_id)) is not None:
            await namespace.index.load(record, file_bytes)
        else:  # a row that refers to none: for fsck to judge, and the file takes its space until then
            cache.stores.disk_usage.add(pack_id, file_bytes)
