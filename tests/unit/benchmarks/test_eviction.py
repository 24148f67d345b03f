"""`benchmarks.eviction`: each policy evicts what its paper says, and none hits more than Belady's."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from benchmarks.eviction.__main__ import draw, options_of, table_of, traces_of
from benchmarks.eviction.kvtier_tiers import BothTiers, DiskTier, HostTier
from benchmarks.eviction.peers.arc import Arc
from benchmarks.eviction.peers.base import BlockCache, Cache
from benchmarks.eviction.peers.belady import Belady, next_uses
from benchmarks.eviction.peers.gdsf import Gdsf
from benchmarks.eviction.peers.lru import Lru
from benchmarks.eviction.peers.s3_fifo import S3Fifo
from benchmarks.eviction.peers.tiny_lfu import WTinyLfu
from benchmarks.eviction.replay import BELADY, KVTIER, POLICIES, make_cache, num_hits, replay
from benchmarks.eviction.workloads import GENERATED
from tests.fakes.chunks import key_of

MAX_BLOCKS = 400
KEYS = [key_of(number) for number in range(MAX_BLOCKS)]


def use_all(cache: BlockCache, *blocks: int) -> None:
    for block in blocks:
        cache.use(block)


def held(cache: BlockCache, blocks: Sequence[int]) -> list[int]:
    return [block for block in blocks if block in cache]


def hits_of(cache: Cache, *requests: Sequence[int]) -> list[int]:
    return [cache.request(blocks) for blocks in requests]


def test_a_block_behind_a_hole_is_no_hit() -> None:
    assert hits_of(Lru(3), [1, 2], [3], [4], [1, 2]) == [0, 0, 0, 1]
    assert hits_of(Lru(2), [2], [1, 2]) == [0, 0]


def test_lru_evicts_the_tail_of_the_prompt_that_was_not_used_for_the_longest() -> None:
    cache = Lru(4)
    assert hits_of(cache, [1, 2], [3, 4], [1, 2], [5]) == [0, 0, 2, 0]
    assert held(cache, range(6)) == [1, 2, 3, 5]


def test_arc_keeps_what_was_used_twice_from_a_scan() -> None:
    cache = Arc(4)
    use_all(cache, 1, 2, 1, 2, *range(10, 20))
    assert held(cache, range(20)) == [1, 2, 18, 19]


def test_arc_enlarges_the_list_whose_ghosts_come_back() -> None:
    cache = Arc(4)
    use_all(cache, 1, 2, 1, 2, 10, 11, 12)
    assert held(cache, range(20)) == [1, 2, 11, 12]
    use_all(cache, 10)  # in the ghosts of what was used once: one block of the others leaves by and by
    assert held(cache, range(20)) == [1, 2, 10, 12]
    use_all(cache, 11, 13)  # two blocks for those used once by now: 1, then 2, leave for 11 and 13
    assert held(cache, range(20)) == [10, 11, 12, 13]


def test_s3_fifo_moves_what_was_used_twice_to_its_main_queue() -> None:
    cache = S3Fifo(10)
    use_all(cache, 1, 1, 1, 2, *range(10, 18))
    assert held(cache, range(20)) == [1, 2, *range(10, 18)]
    use_all(cache, 18)
    assert held(cache, range(20)) == [1, *range(10, 19)]
    use_all(cache, 2, *range(20, 40))  # 2 was a ghost: it comes back into the main queue
    assert held(cache, range(20)) == [1, 2]


def test_w_tiny_lfu_admits_only_what_was_used_more_than_its_victim() -> None:
    cache = WTinyLfu(4)
    use_all(cache, 1, 1, 2, 2, 3, 3, 4, 5, 6)
    assert held(cache, range(9)) == [1, 2, 3, 6]
    use_all(cache, 6, 6, 7)
    assert held(cache, range(9)) == [2, 3, 6, 7]


def test_w_tiny_lfu_halves_its_counts() -> None:
    cache = WTinyLfu(2)
    use_all(cache, *[1] * 19)
    assert cache._counts[1] == 15
    use_all(cache, 1)
    assert cache._counts[1] == 7


def test_gdsf_keeps_what_is_used_often_until_the_clock_has_reached_it() -> None:
    assert hits_of(Gdsf(2), [1], [1], [1], [2], [3], [4], [1]) == [0, 1, 1, 0, 0, 0, 1]
    assert hits_of(Gdsf(2), [1], [1], *([number] for number in range(2, 8)), [1])[-1] == 0


def test_belady_knows_the_next_use() -> None:
    assert next_uses([[1, 2], [1], [1, 2]]) == [[1, 2], [2], [None, None]]


def test_belady_keeps_what_comes_next_and_stores_nothing_that_does_not_come_again() -> None:
    requests = [[1, 2], [3], [4], [3], [1, 2]]
    assert hits_of(Belady(2, requests), *requests) == [0, 0, 0, 1, 1]
    assert hits_of(Belady(3, requests), *requests) == [0, 0, 0, 1, 2]


def test_belady_keeps_a_part_of_a_scan_that_is_too_long() -> None:
    requests = [[1], [2], [3], [4]] * 3
    assert num_hits(Belady(3, requests), requests) == 6
    assert num_hits(Lru(3), requests) == 0


@st.composite
def some_requests(draw: st.DrawFn) -> list[list[int]]:
    """Requests over a tree of prefixes: each continues another one's beginning."""
    requests: list[list[int]] = []
    number = 0
    for _ in range(draw(st.integers(1, 30))):
        parent = draw(st.sampled_from(requests)) if requests else []
        new = draw(st.integers(0, 5))
        blocks = parent[: draw(st.integers(0, len(parent)))] + list(range(number, number + new))
        number += new
        if blocks:
            requests.append(blocks)
    return requests


@settings(max_examples=150, deadline=None)
@given(requests=some_requests(), capacity=st.integers(1, 30))
def test_no_policy_hits_more_than_belady(requests: list[list[int]], capacity: int) -> None:
    hits = {policy: num_hits(make_cache(policy, capacity, requests, KEYS), requests) for policy in POLICIES}
    assert max(hits.values()) == hits[BELADY]


@settings(max_examples=50, deadline=None)
@given(requests=some_requests())
def test_all_policies_are_equal_where_everything_fits(requests: list[list[int]]) -> None:
    # S3-FIFO and W-TinyLFU evict from a full queue only when the whole cache is full, or admit what fits.
    hits = {policy: num_hits(make_cache(policy, 200, requests, KEYS), requests) for policy in POLICIES}
    assert len(set(hits.values())) == 1


@pytest.mark.parametrize(
    "cache", [HostTier(20, KEYS, longest=13), DiskTier(20, KEYS), BothTiers(5, 20, KEYS, longest=13)]
)
def test_kvtier_stays_within_its_capacity_and_the_table_is_sound(cache: HostTier | DiskTier) -> None:
    requests = [[*range(5), *range(base, base + 8)] for base in range(10, 130, 10)]
    hits = hits_of(cache, *requests, requests[-1])
    assert hits == [0, *[5] * 11, 13]
    assert sum(chunk.held for chunk in cache.table) <= 20
    cache.table.check()


@pytest.mark.parametrize("tier", [HostTier, DiskTier])
def test_kvtier_keeps_a_part_of_a_loop_that_is_too_long(tier: Callable[..., Cache]) -> None:
    """20 documents of 10 blocks, round and round, in a cache that holds 10: LRU hits none of them, ever."""
    documents = [list(range(first, first + 10)) for first in range(0, 200, 10)]
    requests = documents * 24
    cache = HostTier(100, KEYS, longest=10) if tier is HostTier else DiskTier(100, KEYS)
    assert num_hits(Lru(100), requests) == 0
    # 0.64 to 0.82 in 40 runs with other hashes, the first rounds with none included.
    assert num_hits(cache, requests) > 0.5 * num_hits(Belady(100, requests), requests)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_requests_are_prefixes_and_the_same_for_the_same_seed(name: str) -> None:
    requests = GENERATED[name](3)
    assert requests == GENERATED[name](3)
    parents: dict[int, int] = {}
    for blocks in requests:
        assert len(set(blocks)) == len(blocks) > 0
        for parent, block in zip([-1, *blocks], blocks, strict=False):
            assert parents.setdefault(block, parent) == parent


def test_a_trace_is_read_replayed_and_drawn(tmp_path: Path) -> None:
    lines = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3]]
    trace = tmp_path / "some.jsonl"
    with trace.open("w") as file:
        for number, ids in enumerate(lines):
            file.write(json.dumps({"timestamp": number, "input_length": 512 * len(ids), "hash_ids": ids}) + "\n")
    options = options_of(["--trace", str(trace), "--generated", "", "--halves"])
    traces = traces_of(options)
    assert [name for name, _ in traces] == ["some", "some, first half", "some, second half"]
    replays = list(replay(*traces[0], percents=(40, 100)))
    assert [each.capacity for each in replays] == [2, 5]
    assert replays[1].hits == dict.fromkeys(POLICIES, 5)
    assert replays[0].share(BELADY) == 1.0
    assert replays[0].share(KVTIER[0]) <= 1.0
    assert "| 50.0% (1.000) |" in table_of(replays)
    draw([replays], tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (1920, 840)
