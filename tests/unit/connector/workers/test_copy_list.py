"""The workers' lists of copies against the layout, page by page."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_connector.workers.copy_list import CopyLists
from kvtier_connector.workers.copy_plan import GroupCopies, TransferMismatchError, plan_load, plan_store, split_groups
from kvtier_connector.workers.page_layout import PagePlace, WorkerLayout

BLOCKS = 3


@st.composite
def groups_of_pages(draw: st.DrawFn) -> list[list[PagePlace]]:
    groups = []
    for sizes in draw(st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=4), min_size=1, max_size=3)):
        pages, offset = [], 0
        for size in sizes:
            base, padding = draw(st.integers(0, 2**47)), draw(st.integers(0, 9))
            pages.append(
                PagePlace(base_address=base, block_stride=size + padding, page_bytes=size, region_offset=offset)
            )
            offset += size * BLOCKS
        groups.append(pages)
    return groups


@given(groups_of_pages(), st.data())
def test_every_page_of_every_block_is_moved(pages: list[list[PagePlace]], data: st.DataObject) -> None:
    layout = WorkerLayout(region=0, rank_bytes=0, blocks_per_chunk=BLOCKS, group_positions={}, pages=pages)
    regions = data.draw(st.lists(st.integers(0, 2**47), min_size=1, max_size=5))
    copied = st.tuples(st.integers(0, len(regions) - 1), st.integers(0, 1000), st.integers(0, BLOCKS - 1))
    groups = [data.draw(st.lists(copied, max_size=9)) for _ in pages]
    copies = CopyLists(layout).of(
        np.array(regions, np.int64),
        [GroupCopies(*np.array(each, np.int64).reshape(-1, 3).T) for each in groups],
    )
    expected: list[tuple[int, int, int]] = []
    for of_group, each in zip(pages, groups, strict=True):
        for page, (chunk, block_id, place) in itertools.product(of_group, each):
            vllm = page.base_address + block_id * page.block_stride
            arena = regions[chunk] + page.region_offset + place * page.page_bytes
            expected.append((vllm, arena, page.page_bytes))
    assert sorted(zip(*(column.tolist() for column in copies), strict=True)) == sorted(expected)
    assert copies.num_bytes == sum(size for *_, size in expected)
    assert all(column.flags.carray and column.dtype == np.int64 for column in copies)


@given(st.data())
def test_plans_say_where_each_block_goes(data: st.DataObject) -> None:
    """Chunks of groups in any order, runs of blocks that begin and end inside chunks; against a slow model."""
    num_groups, per_chunk = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    runs = [(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 12))) for _ in range(num_groups)]
    ids = itertools.count(100)
    groups, chunk_groups = [], []
    for position, (first, size) in enumerate(runs):
        groups.append([(next(ids), *divmod(index, per_chunk)) for index in range(first, first + size)])
        chunk_groups += [position] * len({chunk for _, chunk, _ in groups[-1]})
    chunk_groups = data.draw(st.permutations(chunk_groups))
    all_blocks = [block for each in groups for block, *_ in each]
    split = split_groups(all_blocks, [size for _, size in runs], [first for first, _ in runs])
    for position, plan in enumerate(plan_load(chunk_groups, split, per_chunk)):
        of_group = [number for number, group in enumerate(chunk_groups) if group == position]
        first_chunk = runs[position][0] // per_chunk
        expected = [(of_group[chunk - first_chunk], block, place) for block, chunk, place in groups[position]]
        assert list(zip(*(column.tolist() for column in plan), strict=True)) == expected
    for position, plan in enumerate(plan_store(chunk_groups, split, per_chunk)):
        of_group = [number for number, group in enumerate(chunk_groups) if group == position]
        is_whole = len(groups[position]) == len(of_group) * per_chunk
        expected = [
            (of_group[number // per_chunk], block, number % per_chunk)
            for number, (block, *_) in enumerate(groups[position] if is_whole else [])
        ]
        assert list(zip(*(column.tolist() for column in plan), strict=True)) == expected


def test_a_load_of_other_blocks_than_its_chunks_have_is_refused() -> None:
    with pytest.raises(TransferMismatchError, match="group 0: 3 blocks from index 1 are 2 chunks of 2, the job has 1"):
        plan_load([0], split_groups([7, 8, 9], [3], [1]), 2)
