"""Which rows of an arena that a dead daemon left hold which chunk: a statement, verified before anything is served."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvtier.core.arena_format import SlotEntry, key_tag_of
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.slots import SlotRef


@dataclass(frozen=True)
class LeftRow:
    """A row with a valid commit mark.

    Attributes:
        key: The chunk that it holds.
        ref: Slot and generation.
        checksum: xxh3_64 of the payload, as the mark says.
    """

    key: ChunkKey
    ref: SlotRef
    checksum: int


@dataclass
class LeftRows:
    """What a slot table says, taken at its word.

    Attributes:
        rows: By slot; each chunk once.
        doubtful: Slots with a mark that is not to be believed.
    """

    rows: list[LeftRow] = field(default_factory=list)
    doubtful: list[int] = field(default_factory=list)


def index_by_tag(keys: Iterable[ChunkKey]) -> dict[int, ChunkKey | None]:
    """Return the key of each tag, None where two keys have one tag. About 0.5 us a key."""
    by_tag: dict[int, ChunkKey | None] = {}
    for key in keys:
        tag = key_tag_of(key)
        by_tag[tag] = None if tag in by_tag else key
    return by_tag


def read_left_rows(entries: Iterable[SlotEntry], by_tag: Mapping[int, ChunkKey | None], layout: KVLayout) -> LeftRows:
    """Find the chunk of every marked slot.

    Doubtful is a mark that does not fit its words, a tag that no known chunk has or that two have, a length that is not
    the chunk's, and a second row of one chunk.
    """
    found, seen = LeftRows(), set[ChunkKey]()
    for entry in entries:
        if not entry.mark:
            continue
        key = by_tag.get(entry.key_tag) if entry.committed and entry.backed else None
        if key is None or key in seen or entry.length != _rank_bytes(layout, key):
            found.doubtful.append(entry.slot)
            continue
        seen.add(key)
        found.rows.append(LeftRow(key, SlotRef(entry.slot, entry.generation), entry.checksum))
    return found


def _rank_bytes(layout: KVLayout, key: ChunkKey) -> int | None:
    group_idx = group_idx_of(key)
    return layout.group(group_idx).useful_bytes if group_idx in layout.group_indexes() else None
