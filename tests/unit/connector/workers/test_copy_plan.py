"""The workers' lists of copies against the layout, page by page."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvtier_connector.workers.copy_plan import (
    GroupCopies,
    GroupPages,
    TransferMismatchError,
    WorkerLayout,
    plan_copies,
)

BLOCKS = 3


class Page(NamedTuple):
    base: int
    stride: int
    size: int
    offset: int


@st.composite
def groups_of_pages(draw: st.DrawFn) -> list[list[Page]]:
    groups = []
    for sizes in draw(st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=4), min_size=1, max_size=3)):
        pages, offset = [], 0
        for size in sizes:
            pages.append(Page(draw(st.integers(0, 2**47)), size + draw(st.integers(0, 9)), size, offset))
            offset += size * BLOCKS
        groups.append(pages)
    return groups


@given(groups_of_pages(), st.data())
def test_every_page_of_every_block_is_moved(pages: list[list[Page]], data: st.DataObject) -> None:
    columns = [GroupPages(*np.array(group, np.int64).T.reshape(4, -1, 1)) for group in pages]
    layout = WorkerLayout(region=1, rank_bytes=1000, blocks_per_chunk=BLOCKS, group_positions={}, pages=columns)
    rows = data.draw(st.lists(st.integers(0, 2**47), min_size=1, max_size=5))
    copied = st.tuples(st.integers(0, len(rows) - 1), st.integers(0, 1000), st.integers(0, BLOCKS - 1))
    groups = [data.draw(st.lists(copied, max_size=9)) for _ in pages]
    copies = layout.copies(
        np.array(rows, np.int64), [GroupCopies(*np.array(each, np.int64).reshape(-1, 3).T) for each in groups]
    )
    expected: list[tuple[int, int, int, int]] = []
    for of_group, each in zip(pages, groups, strict=True):
        for page, (chunk, block_id, place) in itertools.product(of_group, each):
            arena = rows[chunk] + 1000 + page.offset + place * page.size
            expected.append((page.base + block_id * page.stride, arena, page.size, rows[chunk] + 1000))
    assert sorted(zip(*(column.tolist() for column in copies), strict=True)) == sorted(expected)
    assert copies.num_bytes == sum(size for _, _, size, _ in expected)
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
    blocks = GPULoadStoreSpec(all_blocks, [size for _, size in runs], [first for first, _ in runs])
    for position, plan in enumerate(plan_copies(chunk_groups, blocks, per_chunk, is_load=True)):
        of_group = [number for number, group in enumerate(chunk_groups) if group == position]
        first_chunk = runs[position][0] // per_chunk
        expected = [(of_group[chunk - first_chunk], block, place) for block, chunk, place in groups[position]]
        assert list(zip(*(column.tolist() for column in plan), strict=True)) == expected
    for position, plan in enumerate(plan_copies(chunk_groups, blocks, per_chunk, is_load=False)):
        of_group = [number for number, group in enumerate(chunk_groups) if group == position]
        is_whole = len(groups[position]) == len(of_group) * per_chunk
        expected = [
            (of_group[number // per_chunk], block, number % per_chunk)
            for number, (block, *_) in enumerate(groups[position] if is_whole else [])
        ]
        assert list(zip(*(column.tolist() for column in plan), strict=True)) == expected


def test_a_load_of_other_blocks_than_its_chunks_have_is_refused() -> None:
    with pytest.raises(TransferMismatchError, match="group 0: 3 blocks from index 1 are 2 chunks of 2, the job has 1"):
        plan_copies([0], GPULoadStoreSpec([7, 8, 9], [3], [1]), 2, is_load=True)
