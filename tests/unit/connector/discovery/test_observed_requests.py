"""The queue between the scheduler's thread and the observer's is bounded, and holds vLLM's own lists."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kvtier_connector.discovery.observed_requests import (
    MAX_QUEUED_REQUESTS,
    MAX_QUEUED_TOKENS,
    ChunkShape,
    RequestQueue,
)
from kvtier_connector.engine.chunk_keys import GroupShape
from tests.unit.connector.discovery.vllm_requests import SHAPE, observed, request_of


def fake_request(tokens: list[int]) -> Any:
    return SimpleNamespace(prompt_token_ids=tokens, block_hashes=[], mm_features=[], cache_salt=None)


def test_it_keeps_references_and_how_much_of_them_is_the_prompt() -> None:
    request = request_of(list(range(40)), salt="tenant")
    queue = RequestQueue()
    queue.put(request, None)
    request.append_output_token_ids(list(range(100, 130)))
    taken = queue.take()
    assert taken is not None
    assert taken.block_hashes is request.block_hashes
    assert (taken.num_tokens, taken.num_hashes, taken.image_at) == (40, 2, 40)
    assert len(request.block_hashes) == 4, "the outputs are hashed too"
    assert taken.cache_salt == "tenant"
    assert queue.take() is None


def test_what_does_not_fit_is_counted() -> None:
    queue = RequestQueue()
    for _ in range(MAX_QUEUED_REQUESTS + 3):
        queue.put(fake_request([1, 2, 3]), None)
    assert queue.num_skipped == 3
    assert queue.take() is not None
    queue.put(fake_request([1]), None)
    assert queue.num_skipped == 3, "there is space again"


def test_long_prompts_are_bounded_by_their_tokens() -> None:
    """10,000 requests of 100,000 tokens: the queue may be the last that holds them."""
    queue, tokens = RequestQueue(), [0] * 100_000
    for _ in range(10_000):
        queue.put(fake_request(tokens), None)
    num_kept = 10_000 - queue.num_skipped
    assert num_kept == MAX_QUEUED_TOKENS // 100_000
    while queue.take() is not None:
        pass
    giant = fake_request([0] * (MAX_QUEUED_TOKENS + 1))
    queue.put(giant, None)
    assert queue.take() is not None, "one that is larger than the bound finds an empty queue"


def test_the_tokens_that_are_queued_are_counted_exactly() -> None:
    queue = RequestQueue()
    for round_ in range(3):
        queue.put(fake_request([0] * (MAX_QUEUED_TOKENS - 5)), None)
        queue.put(fake_request([0] * 6), None)
        assert queue.num_skipped == round_ + 1
        queue.put(fake_request([0] * 5), None)
        assert queue.num_skipped == round_ + 1, "just what may be queued"
        assert [taken.num_tokens for taken in iter(queue.take, None)] == [MAX_QUEUED_TOKENS - 5, 5]


def test_tokens_without_a_hash_are_not_covered() -> None:
    """Where a hash covers tokens behind its block, the last blocks of a prompt have none."""
    request = observed(list(range(96)))
    assert SHAPE.covered(request) == 96
    assert SHAPE.covered(request._replace(num_hashes=5)) == 64
    assert SHAPE.covered(request._replace(num_hashes=1)) == 0
    assert SHAPE.chain_hash(request._replace(num_hashes=5), 96) == request.block_hashes[4]
    assert SHAPE.chain_hash(request, 95) == request.block_hashes[4]
    assert SHAPE.chain_hash(request, 15) == b""
    assert SHAPE.identity(request._replace(num_hashes=5), 90) == (request.block_hashes[4], tuple(range(80, 90)))


def test_a_chunk_ends_where_one_of_every_group_does() -> None:
    groups = [
        GroupShape(group_idx=index, chunk_tokens=tokens, hashes_per_chunk=tokens // 8, window_chunks=0)
        for index, tokens in enumerate((16, 24))
    ]
    assert ChunkShape.of(groups) == ChunkShape(chunk_tokens=48, hash_tokens=8)
    windowed = [groups[0], replace(groups[1], window_chunks=2)]
    assert ChunkShape.of(windowed) == ChunkShape(chunk_tokens=48, hash_tokens=8, is_windowed=True)


def test_an_image_ends_what_is_covered() -> None:
    assert SHAPE.covered(observed(list(range(100)))) == 96
    assert SHAPE.covered(observed(list(range(100)), image_at=70)) == 64
    assert SHAPE.covered(observed(list(range(100)), image_at=3)) == 0
