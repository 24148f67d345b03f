"""Small pages through a ring: the same bytes as copies of one page each, and what a driver and the kernel can take."""

import ctypes
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier_connector.workers.copy_plan import CopyList, Int64s
from kvtier_connector.workers.cuda import page_ring
from kvtier_connector.workers.cuda.page_ring import SMALL_PAGE_BYTES, WORD_BYTES, split_copies

RING = 0x7000_0000_0000


class Region(NamedTuple):
    """A rank's region of a row: its pages, and whether each is part of the job; and what lies before the next one."""

    pages: list[tuple[int, bool]]
    gap: int


sizes = st.one_of(
    st.integers(1, 40).map(lambda words: words * WORD_BYTES),
    st.sampled_from([12, 8192, SMALL_PAGE_BYTES - 8, SMALL_PAGE_BYTES, 40_000]),
)
regions = st.builds(
    Region,
    st.lists(st.tuples(sizes, st.integers(0, 4).map(bool)), min_size=1, max_size=40),
    st.sampled_from([0, 0, 4096, 4]),
)


def job(
    rows: list[Region], arena_address: int, vllm_address: int, seed: int, gaps: Sequence[int] = (0, 8, 4)
) -> CopyList:
    """Return the copies of a job in any order; its pages lie scattered in vLLM's memory, with `gaps` between them."""
    rng = random.Random(seed)
    copies, begin = [], arena_address
    for row in rows:
        place = begin
        for size, is_copied in row.pages:
            copies += [(place, size, begin)] * is_copied
            place += size
        begin = place + row.gap
    rng.shuffle(copies)
    columns, place = [], vllm_address
    for arena, size, region in copies:
        columns.append((place, arena, size, region))
        place += size + rng.choice(gaps)
    rng.shuffle(columns)
    return CopyList(*np.array(columns, np.int64).reshape(-1, 4).T.copy())


def move(target: Int64s, source: Int64s, num_bytes: Int64s) -> None:
    for to, origin, size in zip(target.tolist(), source.tolist(), num_bytes.tolist(), strict=True):
        ctypes.memmove(to, origin, size)


def carry_out(copies: CopyList, ring: "ctypes.Array[ctypes.c_char]", ring_bytes: int, *, is_load: bool) -> None:
    """Do what the device does, in order."""
    direct, batches = split_copies(copies, ctypes.addressof(ring), ring_bytes)
    steps = [direct]
    for spans, pages in batches:
        steps += [spans, pages] if is_load else [pages, spans]
    for step in steps:
        if is_load:
            move(step.vllm, step.arena, step.sizes)
        else:
            move(step.arena, step.vllm, step.sizes)


def memory(num_bytes: int, seed: int) -> "ctypes.Array[ctypes.c_char]":
    return ctypes.create_string_buffer(random.Random(seed).randbytes(num_bytes), num_bytes)


@given(st.lists(regions, min_size=1, max_size=6), st.integers(0, 2**32), st.booleans(), st.sampled_from([1, 2, 9]))
@example([Region([(64, True)] * 40, 0), Region([(64, True)] * 40, 0)], 1, True, 1)
def test_the_same_bytes_arrive_as_with_a_copy_for_each_page(
    rows: list[Region], seed: int, is_load: bool, ring_pages: int
) -> None:
    num_bytes = sum(size + 8 for row in rows for size, _ in row.pages) + sum(row.gap for row in rows)
    found = []
    ring = memory(ring_pages * SMALL_PAGE_BYTES, seed + 2)
    for has_ring in (True, False):
        arena, vllm = memory(num_bytes, seed), memory(num_bytes, seed + 1)
        copies = job(rows, ctypes.addressof(arena), ctypes.addressof(vllm), seed)
        if has_ring:
            carry_out(copies, ring, len(ring), is_load=is_load)
        elif is_load:
            move(copies.vllm, copies.arena, copies.sizes)
        else:
            move(copies.arena, copies.vllm, copies.sizes)
        found.append((arena.raw, vllm.raw))
    assert found[0] == found[1]


@given(st.lists(regions, min_size=1, max_size=6), st.integers(0, 2**32), st.sampled_from([1, 2, 9]))
def test_what_is_planned_keeps_to_the_rules(rows: list[Region], seed: int, ring_pages: int) -> None:
    copies, ring_bytes = job(rows, 2**40, 2**41, seed), ring_pages * SMALL_PAGE_BYTES
    direct, batches = split_copies(copies, RING, ring_bytes)
    moved = [*direct.arena.tolist()]
    lengths = dict(zip(copies.arena.tolist(), copies.sizes.tolist(), strict=True))
    homes = dict(zip(copies.arena.tolist(), copies.regions.tolist(), strict=True))
    for spans, pages in batches:
        assert all(column.flags.carray and column.dtype == np.int64 for column in (*spans, *pages))
        assert (pages.sizes < SMALL_PAGE_BYTES).all()
        assert not ((pages.vllm | pages.arena | pages.sizes) % WORD_BYTES).any()
        assert pages.arena.min() >= RING
        assert (pages.arena + pages.sizes).max() <= RING + ring_bytes
        assert spans.num_bytes == pages.num_bytes
        for begin, length, region in zip(
            spans.arena.tolist(), spans.sizes.tolist(), spans.regions.tolist(), strict=True
        ):
            end = begin + length
            while begin < end:
                assert homes[begin] == region, "a span of two rows would lie in two locks"
                moved.append(begin)
                begin += lengths[begin]
            assert begin == end
    assert sorted(moved) == sorted(copies.arena.tolist()), "each page once"


def layers(num_rows: int, num_pages: int, page_bytes: int) -> CopyList:
    return job([Region([(page_bytes, True)] * num_pages, 0)] * num_rows, 2**40, 2**41, 0, gaps=(0, 8))


def test_a_row_is_one_copy_over_the_link() -> None:
    direct, batches = split_copies(layers(num_rows=3, num_pages=64, page_bytes=8192), RING, 2**21)
    assert direct.sizes.size == 0
    assert [batch.spans.sizes.tolist() for batch in batches] == [[64 * 8192] * 3]


def test_a_row_that_does_not_fit_the_ring_is_cut_between_pages() -> None:
    _, batches = split_copies(layers(num_rows=1, num_pages=64, page_bytes=8192), RING, 30 * 8192 + 100)
    assert [batch.spans.sizes.tolist() for batch in batches] == [[30 * 8192], [30 * 8192], [4 * 8192]]


def test_addresses_of_a_batch_are_few_enough_for_the_driver_to_take_them_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert page_ring.MAX_BATCH_PAGES * 3 * 8 <= 64 * 1024
    assert page_ring.MAX_BATCH_PAGES % 16 == 0
    monkeypatch.setattr(page_ring, "MAX_BATCH_PAGES", 48)
    _, batches = split_copies(layers(num_rows=2, num_pages=64, page_bytes=64), RING, 2**21)
    assert [batch.spans.sizes.tolist() for batch in batches] == [[48 * 64], [16 * 64, 32 * 64], [32 * 64]]


@pytest.mark.parametrize(
    "copies",
    [
        layers(num_rows=40, num_pages=1, page_bytes=8192),
        layers(num_rows=1, num_pages=16, page_bytes=8192),
        layers(num_rows=4, num_pages=64, page_bytes=SMALL_PAGE_BYTES),
        layers(num_rows=4, num_pages=64, page_bytes=8196),
        layers(num_rows=0, num_pages=0, page_bytes=0),
    ],
    ids=["pages that lie alone", "a few pages", "large pages", "not whole words", "nothing"],
)
def test_where_a_ring_saves_nothing_each_page_is_a_copy(copies: CopyList) -> None:
    direct, batches = split_copies(copies, RING, 2**21)
    assert direct is copies
    assert batches == []


def test_large_pages_of_a_job_go_directly_and_small_ones_through_the_ring() -> None:
    row = Region([(65536, True), *[(4096, True)] * 32, (32768, True)], 0)
    direct, batches = split_copies(job([row] * 2, 2**40, 2**41, 0, gaps=(0, 8)), RING, 2**21)
    assert sorted(direct.sizes.tolist()) == [32768, 32768, 65536, 65536]
    assert [batch.spans.sizes.tolist() for batch in batches] == [[32 * 4096] * 2]
