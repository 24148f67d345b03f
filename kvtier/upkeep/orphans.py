"""Packs that the ledger does not know: adopted at a start, or put where a repair finds them; not deleted for that.

A crash between a pack's rename and its row leaves such a pack, and so does a ledger that was lost or restored from an
old backup. What was removed on purpose has its name in the ledger (`removed_packs`) and is swept before.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from kvtier.core.layout import group_idx_of
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, FormatVersionError, TierIOError
from kvtier.ledger import NamespaceRow
from kvtier.ledger.namespace_files import load_namespaces
from kvtier.obs.log import log_event
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources

logger = logging.getLogger(__name__)


async def adopt_orphans(
    resources: Resources,
    namespaces: Mapping[str, Namespace],
    open_namespace: Callable[[NamespaceRow], Namespace],
    disk: PackTier,
    orphans: Sequence[str],
) -> int:
    """Give rows to what packs without rows hold, as far as it has none elsewhere; return how many packs got some.

    A header proves itself; bytes are verified at every read, and by the scrub. A pack whose header is damaged is set
    aside, one of a namespace that nothing describes is moved to `unclaimed/`, one that the system refuses
    to read stays. A copy of chunks that have rows takes over those that are damaged elsewhere and right in it; while
    either cannot be read, both packs stay as they are. One is unlinked only when every chunk of it was read elsewhere
    and is right.

    Raises:
        LedgerError: The ledger refused: no file is changed that would need it.
    """
    headers = await resources.in_io(_read_headers, disk, orphans)
    await _know_namespaces(resources, namespaces, open_namespace, {header.namespace_id for header in headers})
    num_packs = num_chunks = 0
    for header in headers:
        namespace = namespaces.get(header.namespace_id)
        if namespace is None:
            await resources.in_io(_move_unclaimed, disk, header)
        elif (record := await resources.in_io(_wanted, disk, namespace, header)) is not None:
            # What the new rows replace is not what was written (`_wanted`): if its pack is empty then, it is set aside.
            replaced = (_place(namespace, chunk) for chunk in record.chunks)
            namespace.index.packs.damaged.update(old.pack_id for old in replaced if old is not None)
            async with namespace.index.hold() as change:
                await change.record([record])
            num_packs += 1
            num_chunks += len(record.chunks)
    if num_packs:
        log_event(
            logger,
            "packs_adopted",
            level=logging.WARNING,
            packs=num_packs,
            chunks=num_chunks,
            why="the ledger did not know them: a write was cut off, or the ledger was lost or is an old backup",
            remedy="none is needed; `kvtier fsck --deep` verifies every byte now",
        )
    return num_packs


def _read_headers(disk: PackTier, pack_ids: Sequence[str]) -> list[PackRecord]:
    """Worker thread: what can be read; the rest is set aside, or stays, and is said."""
    headers = []
    for pack_id in pack_ids:
        try:
            headers.append(disk.read_record(pack_id))
        except ChunkDamagedError as error:
            _set_aside(disk, pack_id, str(error))
        except (FormatVersionError, TierIOError) as error:
            log_event(logger, "pack_unreadable", level=logging.WARNING, pack=pack_id, problem=str(error))
    return headers


def _set_aside(disk: PackTier, pack_id: str, problem: str) -> None:
    """Worker thread."""
    try:
        disk.set_aside_pack(pack_id)
    except TierIOError as error:  # it stays, and the next start finds it again
        log_event(logger, "pack_unreadable", level=logging.WARNING, pack=pack_id, problem=f"{problem}; {error}")
        return
    log_event(logger, "pack_set_aside", level=logging.WARNING, pack=pack_id, problem=problem)


async def _know_namespaces(
    resources: Resources,
    namespaces: Mapping[str, Namespace],
    open_namespace: Callable[[NamespaceRow], Namespace],
    wanted: Collection[str],
) -> None:
    """Bring back namespaces that only their copies still describe."""
    missing = set(wanted) - namespaces.keys()
    if not missing:
        return
    for row in await resources.in_io(load_namespaces, resources.config.disk.disk_dir):
        if row.namespace_id in missing:
            await resources.in_ledger(resources.ledger.put_namespace, row)
            open_namespace(row)


def _move_unclaimed(disk: PackTier, header: PackRecord) -> None:
    """Worker thread."""
    try:
        disk.move_unclaimed(header.pack_id)
    except TierIOError as error:
        log_event(logger, "pack_unreadable", level=logging.WARNING, pack=header.pack_id, problem=str(error))
        return
    log_event(
        logger,
        "pack_unclaimed",
        level=logging.WARNING,
        pack=header.pack_id,
        namespace=header.namespace_id,
        remedy="start the engine that it belongs to, then run `kvtier fsck --repair`",
    )


def _wanted(disk: PackTier, namespace: Namespace, header: PackRecord) -> PackRecord | None:
    """Worker thread, while nothing else runs: return what the pack shall have rows for, None if it needs none."""
    fitting = [chunk for chunk in header.chunks if _fits(namespace, chunk)]
    if not fitting:
        _set_aside(disk, header.pack_id, "its chunks do not fit the layout of its namespace")
        return None
    wanted = [chunk for chunk in fitting if _place(namespace, chunk) is None]
    if not wanted:  # a copy: the last one that is right stays
        try:
            lost = [chunk for chunk in fitting if not _is_right(disk, _place(namespace, chunk))]
            wanted = [chunk for chunk in lost if _is_right(disk, chunk)]
        except TierIOError as error:  # it says nothing about the bytes: the next start looks again
            log_event(logger, "pack_unreadable", level=logging.WARNING, pack=header.pack_id, problem=str(error))
            return None
        if not lost:
            with suppress(TierIOError):  # it stays, and the next start finds it again
                disk.delete_pack(header.pack_id)
        elif not wanted:
            _set_aside(disk, header.pack_id, "what is damaged elsewhere is damaged in it, too")
    return replace(header, chunks=tuple(wanted)) if wanted else None


def _fits(namespace: Namespace, chunk: StoredChunk) -> bool:
    is_known_group = group_idx_of(chunk.key) in namespace.layout.group_indexes()
    return is_known_group and namespace.tiers.payload_bytes(chunk.key) == chunk.raw_bytes


def _place(namespace: Namespace, chunk: StoredChunk) -> StoredChunk | None:
    found = namespace.table.get(chunk.key)
    return found.location if found is not None else None


def _is_right(disk: PackTier, chunk: StoredChunk | None) -> bool:
    """Worker thread: return whether the bytes are what was written; raises TierIOError if they cannot be read."""
    if chunk is None:
        return False
    try:
        disk.read_chunk(chunk, [memoryview(bytearray(chunk.raw_bytes))])
    except ChunkDamagedError:
        return False
    return True
