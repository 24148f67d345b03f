"""The workers' lists of copies against the layout, page by page."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvtier_connector.transfer import PagePlace
from kvtier_connector.workers.copy_list import ChunkBlocks, CopyLists
from kvtier_connector.workers.places import WorkerLayout

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
    pairs = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, BLOCKS - 1)), min_size=1, max_size=BLOCKS)
    chunk = st.builds(ChunkBlocks, st.integers(0, len(pages) - 1), st.integers(0, 2**47), pairs)
    chunks = data.draw(st.lists(chunk, max_size=5))
    copies = CopyLists(layout).of(chunks)
    expected: set[tuple[int, int]] = set()
    for each in chunks:
        for page, (block_id, place) in itertools.product(pages[each.position], each.blocks):
            vllm = page.base_address + block_id * page.block_stride
            arena = each.region_address + page.region_offset + place * page.page_bytes
            expected.update((vllm + byte, arena + byte) for byte in range(page.page_bytes))
    found = {
        (vllm + byte, arena + byte)
        for vllm, arena, size in zip(*(column.tolist() for column in copies), strict=True)
        for byte in range(size)
    }
    assert found == expected
    assert copies.num_bytes == sum(
        page.page_bytes * len(each.blocks) for each in chunks for page in pages[each.position]
    )
