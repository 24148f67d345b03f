"""Start: the ledger says what is held, the packs say what is true; what disagrees is dropped, never served.

What the ledger has lost comes back: promises from their copies, chunks from the packs that it does not know.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from kvtier.collector import gc_paused
from kvtier.core.stored import PackRecord
from kvtier.discovery.saved_traffic import SavedTraffic
from kvtier.disk.packs.only_copies import only_copies
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, FormatVersionError, LedgerError, TierIOError
from kvtier.ledger import LedgerSnapshot, PromptRow
from kvtier.ledger.namespace_files import load_namespaces
from kvtier.ledger.promise_copies import DAMAGED_SUFFIX, FOLDER_NAME
from kvtier.obs.log import log_event
from kvtier.printable import MAX_LISTED
from kvtier.prompts.book import PromptBook
from kvtier.service.namespace_registry import NamespaceRegistry
from kvtier.tiering.namespace import Namespace
from kvtier.tiering.resources import Resources
from kvtier.upkeep.orphans import adopt_orphans

logger = logging.getLogger(__name__)


async def load_from_disk(
    resources: Resources, registry: NamespaceRegistry, prompts: PromptBook, disk: PackTier
) -> None:
    """Fill empty namespaces and an empty prompt book from ledger, copies of promises and packs.

    A crash between a pack's rename and its ledger transaction leaves a pack without a row: it is adopted. A pack that
    is gone or shorter than the ledger says loses the chunks that lie beyond its end: they are counted as damaged, and
    stored again when next computed. Bytes themselves are verified at every read.

    Raises:
        LedgerError: The ledger cannot be read or written.
        TierIOError: The packs cannot be listed.
    """
    namespaces = registry.by_id
    await _restore_promises(resources)
    await _seal_ledger(resources)
    snapshot = await resources.in_ledger(resources.ledger.load)
    for row in snapshot.namespaces:
        registry.open(row)
    swept = await _sweep(resources, disk, snapshot)
    on_disk = await resources.in_io(disk.list_packs)
    with gc_paused():
        for namespace_id in {row.namespace_id for row in snapshot.stored.packs.values()}:
            stored = snapshot.stored.of_namespace(namespace_id)
            if (owner := namespaces.get(namespace_id)) is not None:
                lengths = [owner.layout.payload_bytes(group_idx) for group_idx in owner.layout.group_indexes()]
                await owner.index.load(stored, on_disk, lengths)
            else:  # rows that refer to none: for fsck to judge, and the files take their space until then
                for pack_id in stored.packs:
                    resources.disk_usage.add(pack_id, on_disk.get(pack_id, 0))
    orphans = sorted(on_disk.keys() - snapshot.stored.packs.keys())
    num_adopted = await adopt_orphans(resources, namespaces, registry.open, disk, orphans)
    for prompt in snapshot.prompts:
        prompts.put(await _public_as_configured(resources, prompt))
    for binding in snapshot.bindings:
        prompt_row, namespace = prompts.by_pin_id(binding.pin_id), namespaces.get(binding.namespace_id)
        if prompt_row is None or namespace is None:
            continue
        prompts.bind(binding)
        if prompt_row.pinned:
            namespace.table.pin(binding.keys)
    _say_what_lacks_its_key(resources, namespaces.values())
    log_event(
        logger,
        "recovered",
        namespaces=len(namespaces),
        prompts=len(prompts),
        packs=len(snapshot.stored.packs) + num_adopted,
        disk_bytes=resources.disk_usage.used_bytes,
        adopted=num_adopted,
        removed=len(swept),
        damaged=resources.counters.damaged_chunks_disk,
    )


async def _sweep(resources: Resources, disk: PackTier, snapshot: LedgerSnapshot) -> list[str]:
    """Unlink temporary files, and packs that were removed on purpose; return what is gone.

    Packs that may be the only copies are left to `adopt_orphans`, which reads before it deletes.
    """
    removed, kept = snapshot.removed_packs, set[str]()
    if removed:
        on_disk = await resources.in_io(disk.list_packs)
        if not snapshot.stored.packs.keys() <= on_disk.keys():
            header_of = partial(_header_of, disk)
            kept = await resources.in_io(only_copies, snapshot.packs, removed, on_disk, header_of)
    swept = await resources.in_io(disk.sweep, removed - kept)
    if removed:
        await resources.in_ledger(resources.ledger.packs.forget_removed, removed)
    return swept


def _header_of(disk: PackTier, pack_id: str) -> PackRecord | None:
    """Worker thread."""
    try:
        return disk.read_record(pack_id)
    except (ChunkDamagedError, FormatVersionError, TierIOError):
        return None


async def _seal_ledger(resources: Resources) -> None:
    """Seal rows that are plain, or sealed with an older key (they are few, and promises), and plain counts."""
    try:
        num_rows = await resources.in_ledger(resources.ledger.seal)
        await resources.in_io(SavedTraffic(resources.config.disk.disk_dir, resources.ledger.ring).seal)
    except (LedgerError, TierIOError, OSError) as error:  # the next start tries again
        log_event(logger, "ledger_not_sealed", level=logging.WARNING, problem=str(error))
        return
    if num_rows:
        log_event(logger, "ledger_sealed", prompts=num_rows, key=resources.disk.writes_with)
    if resources.ledger.ring is not None:
        await _say_what_may_be_plain(resources)


async def _say_what_may_be_plain(resources: Resources) -> None:
    """Log the names of damaged files that were set aside: nothing encrypts those that are older than the keys."""
    disk_dir = resources.config.disk.disk_dir
    patterns = "ledger.sqlite.damaged-*", f"{FOLDER_NAME}/*{DAMAGED_SUFFIX}"

    def find() -> list[str]:
        return sorted(path.name for pattern in patterns for path in disk_dir.glob(pattern))

    try:
        names = await resources.in_io(find)
    except (TierIOError, OSError):  # the next start looks again
        return
    if names:
        log_event(
            logger,
            "damaged_files_may_be_plain",
            level=logging.WARNING,
            num_files=len(names),
            names=",".join(names[:MAX_LISTED]),
            remedy="look at them, then delete them",
        )


def _say_what_lacks_its_key(resources: Resources, namespaces: Iterable[Namespace]) -> None:
    lacking: Counter[str] = Counter()
    for namespace in namespaces:
        packs = namespace.index.packs
        namespace.packs_without_key = frozenset(
            each for each in packs if not resources.disk.can_open(packs.key_of(each))
        )
        lacking.update(map(packs.key_of, namespace.packs_without_key))
    for key_name, num_packs in sorted(lacking.items()):
        log_event(
            logger,
            "key_missing",
            level=logging.WARNING,
            key=key_name,
            packs=num_packs,
            consequence="their chunks are misses; the packs stay",
            remedy="put the key back into the file that disk.key_file names, and restart; if it is lost, evict and "
            "warm what is pinned",
        )


async def _public_as_configured(resources: Resources, prompt: PromptRow) -> PromptRow:
    """Return a prompt, which is public no longer if it is an automatic pin and those are not to be."""
    if prompt.origin != "auto" or not prompt.public or resources.config.cache.auto_pin_public:
        return prompt
    prompt = replace(prompt, public=False)
    await resources.in_ledger(resources.ledger.promises.put_prompt, prompt)
    return prompt


async def _restore_promises(resources: Resources) -> None:
    copies = partial(load_namespaces, resources.config.disk.disk_dir)
    restored = await resources.in_ledger(resources.ledger.promises.restore, copies)
    if restored:
        log_event(
            logger,
            "promises_restored",
            level=logging.WARNING,
            prompts=len(restored.prompts),
            bindings=restored.num_bindings,
            damaged_copies=restored.num_damaged,
            names=",".join(restored.prompts[:MAX_LISTED]),
            perhaps_deleted_since=",".join(restored.without_copy[:MAX_LISTED]),
            why="the ledger had lost what was acknowledged, or an old backup of it was put back",
            remedy="compare `kvtier list` with what you pinned; `kvtier unpin` what was ended since the backup",
        )
