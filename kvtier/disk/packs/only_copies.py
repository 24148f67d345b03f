"""Which packs that were removed on purpose may be the only copies of what the ledger has rows for."""

from collections.abc import Callable, Collection, Mapping

from kvtier.core.stored import PackRecord


def only_copies(
    packs: Mapping[str, PackRecord],
    removed: Collection[str],
    on_disk: Collection[str],
    header_of: Callable[[str], PackRecord | None],
) -> set[str]:
    """Return those of the removed packs that are not to be deleted unread.

    A commit of which SQLite has reported an error may be in the ledger all the same after a crash. Then its rows name a
    pack that was unlinked because of that error, and what this had replaced was called removed in the same commit.

    Args:
        packs: Those that have rows, by id.
        removed: Ids of packs whose rows were dropped.
        on_disk: Ids of packs that have a file.
        header_of: Reads what a pack's file states; None: it cannot be read.
    """
    gone = packs.keys() - set(on_disk)
    lost = {(packs[pack_id].namespace_id, chunk.key) for pack_id in gone for chunk in packs[pack_id].chunks}
    if not lost:
        return set()
    headers = {pack_id: header_of(pack_id) for pack_id in set(removed) & set(on_disk)}
    return {
        pack_id
        for pack_id, header in headers.items()
        if header is None or any((header.namespace_id, chunk.key) in lost for chunk in header.chunks)
    }
