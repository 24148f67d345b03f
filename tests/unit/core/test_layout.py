"""Layouts: what fits where, and what is refused."""

from dataclasses import replace

import pytest

from kvtier.core.arena_format import ArenaGeometry, pack_header, unpack_header
from kvtier.core.fingerprint import differing_fields, namespace_id
from kvtier.core.layout import GroupLayout, KVLayout, group_idx_of, suffix_of
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
        ({"num_ranks": -1}, "layout.num_ranks"),
        ({"rank_bytes": 0}, "layout.rank_bytes"),
        ({"num_writers": 0}, "layout.num_writers"),
        ({"groups": (GroupLayout(group_idx=4, chunk_tokens=0, useful_bytes=1),)}, r"groups\[4\]\.chunk_tokens"),
        ({"groups": (GroupLayout(group_idx=4, chunk_tokens=1, useful_bytes=0),)}, r"groups\[4\]\.useful_bytes"),
        ({"groups": (GroupLayout(group_idx=4, chunk_tokens=1, useful_bytes=5001),)}, r"groups\[4\]\.useful_bytes"),
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


def test_the_least_and_the_most_that_fit_are_taken() -> None:
    least = GroupLayout(group_idx=0, chunk_tokens=1, useful_bytes=1)
    assert layout(num_ranks=1, rank_bytes=1, num_writers=1, groups=(least,)).payload_bytes(0) == 1
    most = GroupLayout(group_idx=0, chunk_tokens=1, useful_bytes=5000)
    assert layout(groups=(most,)).payload_bytes(0) == 10_000


@pytest.mark.parametrize(
    ("num_ranks", "rank_bytes", "row_bytes"),
    [(1, 4000, 4096), (1, 4096, 4096), (1, 4097, 8192), (3, 4096, 12288), (3, 4000, 12288), (2, 4000, 8192)],
)
def test_a_row_is_the_regions_of_all_ranks_in_whole_pages(num_ranks: int, rank_bytes: int, row_bytes: int) -> None:
    assert layout(num_ranks=num_ranks, num_writers=1, rank_bytes=rank_bytes).row_bytes == row_bytes


def test_groups_are_found_by_the_end_of_a_key() -> None:
    for group_idx in (0, 1, 255, 256, 65_535):
        assert group_idx_of(b"\xff" * 32 + suffix_of(group_idx)) == group_idx
    one, other = (GroupLayout(group_idx=idx, chunk_tokens=16, useful_bytes=idx) for idx in (3, 7))
    both = layout(groups=(one, other))
    assert (both.group(3), both.group(7), both.group_indexes()) == (one, other, [3, 7])
    assert both.segments(7) == [(0, 7), (5000, 7)]
    for group_idx in (0, 4, 8):
        with pytest.raises(InvalidArgumentError, match=r"\[3, 7\]"):
            both.group(group_idx)


def test_the_digest_differs_when_anything_of_a_layout_does() -> None:
    group = GroupLayout(group_idx=1, chunk_tokens=16, useful_bytes=4000)
    layouts = [
        layout(),
        layout(num_ranks=3),
        layout(num_writers=1),
        layout(rank_bytes=5001),
        layout(groups=(group, replace(group, group_idx=2))),
        *(
            layout(groups=(replace(group, **changes),))
            for changes in ({"group_idx": 2}, {"chunk_tokens": 17}, {"useful_bytes": 4001}, {"window_chunks": 1})
        ),
    ]
    assert layout().digest == layout().digest
    assert {len(each.digest) for each in layouts} == {32}
    assert len({each.digest for each in layouts}) == len(layouts)


def test_the_id_of_a_namespace_stays_from_version_to_version() -> None:
    """What is on disk is found by it."""
    assert namespace_id({"b": "\N{SNOWMAN}", "a": "1"}) == "f6f5f5b6dbef70b27cc8ef9433358f71"
    assert differing_fields({}, {}) == []
    assert differing_fields({"a": "1"}, {"a": "1"}) == []
    assert differing_fields({"c": "1", "a": "1"}, {"b": "1", "a": "2"}) == ["a", "b", "c"]
