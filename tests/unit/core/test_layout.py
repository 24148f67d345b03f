"""Layouts: what fits where, and what is refused."""

import pytest

from kvtier.core.arena_format import ArenaGeometry, pack_header, unpack_header
from kvtier.core.fingerprint import differing_fields, namespace_id
from kvtier.core.layout import GroupLayout, KVLayout, group_idx_of
from kvtier.errors import ArenaError, InvalidArgumentError


def layout(**changes: object) -> KVLayout:
    fields: dict[str, object] = {
        "num_ranks": 2,
        "rank_bytes": 5000,
        "num_writers": 2,
        "groups": (GroupLayout(group_idx=1, chunk_tokens=16, useful_bytes=4000),),
    }
    return KVLayout(**(fields | changes))  # type: ignore[arg-type]


def test_rows_are_page_aligned_and_segments_lie_in_their_ranks_region() -> None:
    assert layout().row_bytes == 12288
    assert layout().segments(1) == [(0, 4000), (5000, 4000)]
    assert layout().payload_bytes(1) == 8000
    assert layout(num_writers=1).segments(1) == [(0, 4000)]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_ranks": 0}, "layout.num_ranks"),
        ({"num_writers": 3}, "layout.num_writers"),
        ({"groups": ()}, "layout.groups"),
        ({"rank_bytes": 3999}, "useful_bytes"),
    ],
)
def test_an_impossible_layout_names_the_field(changes: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        layout(**changes)


def test_an_unknown_group_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"\[1\]"):
        layout().segments(group_idx_of(b"h" * 32 + b"\0\0\0\x07"))


def test_arena_header_round_trip_and_refusals() -> None:
    geometry = ArenaGeometry(arena_id=b"i" * 16, num_slots=3, row_bytes=8192, num_ranks=2, rank_bytes=4096)
    assert unpack_header(pack_header(geometry)) == geometry
    assert geometry.rows_offset % 4096 == 0
    assert geometry.stamp_word(1, 1) == geometry.entry_words + 7
    with pytest.raises(ArenaError, match="not a kvtier arena"):
        unpack_header(b"x" * 4096)
    with pytest.raises(ArenaError, match="bytes, needs"):
        unpack_header(b"")


def test_namespace_ids_follow_the_fields_only() -> None:
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert namespace_id(one) == namespace_id(other)
    assert namespace_id(one) != namespace_id(one | {"c": "3"})
    assert differing_fields(one, {"a": "1", "b": "3", "c": "0"}) == ["b", "c"]


def test_total_payload_bytes_is_the_sum_over_the_chunks() -> None:
    one = GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=100)
    other = GroupLayout(group_idx=3, chunk_tokens=16, useful_bytes=7, window_chunks=1)
    for groups in ((one,), (one, other)):
        layout = KVLayout(num_ranks=2, rank_bytes=128, num_writers=2, groups=groups)
        keys = [bytes(8) + group.group_idx.to_bytes(4, "big") for group in groups for _ in range(3)]
        assert layout.total_payload_bytes(keys) == sum(layout.payload_bytes(group_idx_of(key)) for key in keys)
