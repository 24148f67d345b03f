"""Which chunks of a batch are fetched together."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.stored import StoredChunk
from kvtier.disk.packs.pack_spans import Span, plan_spans
from tests.fakes.chunks import key_of

PACKS = ("a" * 32, "b" * 32)


def chunk_at(offset: int, stored_bytes: int, pack: int = 0) -> StoredChunk:
    return StoredChunk(
        key=key_of(offset),
        pack_id=PACKS[pack],
        offset=offset,
        stored_bytes=stored_bytes,
        raw_bytes=stored_bytes,
        codec="raw",
        checksum=0,
    )


def spans_of(*chunks: StoredChunk, span_bytes: int = 1000, max_waste_bytes: int = 50) -> list[list[int]]:
    return [span.members for span in plan_spans(chunks, span_bytes, max_waste_bytes)]


def test_neighbours_are_one_span() -> None:
    chunks = [chunk_at(offset, 100) for offset in (4096, 4196, 4296)]
    assert plan_spans(chunks) == [Span(pack_id=PACKS[0], start=4096, end=4396, members=[0, 1, 2])]


def test_the_order_of_neighbours_does_not_matter() -> None:
    assert spans_of(chunk_at(300, 100), chunk_at(200, 100), chunk_at(400, 100)) == [[0, 1, 2]]


def test_a_span_ends_at_its_limit_at_another_pack_and_at_a_gap() -> None:
    assert spans_of(chunk_at(0, 600), chunk_at(600, 400), chunk_at(1000, 1)) == [[0, 1], [2]]
    assert spans_of(chunk_at(0, 100), chunk_at(100, 100, pack=1), chunk_at(100, 100)) == [[0], [1], [2]]
    assert spans_of(chunk_at(0, 100), chunk_at(150, 100), chunk_at(251, 100)) == [[0, 1], [2]]


def test_a_chunk_longer_than_a_span_is_one_of_its_own() -> None:
    assert spans_of(chunk_at(0, 10), chunk_at(10, 5000), chunk_at(5010, 10)) == [[0], [1], [2]]


def test_the_first_spans_are_short_so_that_decoding_begins_soon() -> None:
    spans = plan_spans([chunk_at(100 * n, 100) for n in range(30)], span_bytes=800, first_bytes=200)
    assert [len(span.members) for span in spans] == [2, 4, 8, 8, 8]


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 1500), st.integers(0, 1)), max_size=40),
    st.integers(1, 3000),
    st.integers(0, 500),
)
def test_every_chunk_is_in_one_span_in_order_and_within_the_limits(
    places: list[tuple[int, int, int]], span_bytes: int, max_waste_bytes: int
) -> None:
    chunks = [chunk_at(*place) for place in places]
    spans = plan_spans(chunks, span_bytes, max_waste_bytes)
    assert [member for span in spans for member in span.members] == list(range(len(chunks)))
    for span in spans:
        members = [chunks[member] for member in span.members]
        assert {chunk.pack_id for chunk in members} == {span.pack_id}
        assert span.start == min(chunk.offset for chunk in members)
        assert span.end == max(chunk.offset + chunk.stored_bytes for chunk in members)
        assert len(members) == 1 or span.end - span.start <= span_bytes
        assert span.end - span.start - sum(chunk.stored_bytes for chunk in members) <= max_waste_bytes
