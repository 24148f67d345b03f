"""The order of admission over vLLM's pool: when it is on, what it counts as needed, what a failure does."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvtier_connector.admission import Admission
from kvtier_connector.engine.vllm_block_pool import VllmBlockPool
from kvtier_connector.metrics.declared import PASSED_REQUESTS
from kvtier_connector.metrics.engine_stats import ConnectorStats
from tests.unit.connector.gpu_pins.test_gpu_pins import pool_of

BLOCK_TOKENS = 4
BUSY, EMPTY = 100, 0
HASHES = [BlockHash(bytes([number]) * 32) for number in range(6)]
KEYS = [make_block_hash_with_group_id(block_hash, 0) for block_hash in HASHES]


def request_of(req_id: str = "r", num_tokens: int = 6 * BLOCK_TOKENS) -> Any:
    """A request whose first blocks have these hashes."""
    return SimpleNamespace(request_id=req_id, num_tokens=num_tokens, block_hashes=HASHES)


def bound(manager: Any) -> Admission:
    admission = Admission(BLOCK_TOKENS, ConnectorStats())
    admission.bind(manager)
    assert admission.is_on
    return admission


def manager_of(*, cached: int, free: int) -> Any:
    """A pool with the first `cached` blocks of the prompt among its free ones, before `free` others."""
    return pool_of([*KEYS[:cached], *[None] * free])


def test_blocks_that_others_hold_are_not_needed() -> None:
    manager = manager_of(cached=4, free=3)
    pool = VllmBlockPool(manager, BLOCK_TOKENS)
    assert pool.num_in_use(HASHES, 4) == 0
    manager.block_pool.touch(manager.block_pool.blocks[:3])
    assert [pool.num_in_use(HASHES, num_blocks) for num_blocks in (0, 2, 3, 4)] == [0, 2, 3, 3]
    # 7 blocks for 24 tokens and the next one, 3 of them held; 4 are free.
    admission = bound(manager)
    admission.arrived(request := request_of())
    assert not admission.lets_pass(request, 4 * BLOCK_TOKENS, BLOCK_TOKENS)
    manager.block_pool.touch(manager.block_pool.blocks[-1:])
    admission.step_scheduled(num_tokens=BUSY)
    assert admission.lets_pass(request, 4 * BLOCK_TOKENS, BLOCK_TOKENS)


def test_a_request_without_a_load_is_left_to_vllm() -> None:
    admission = bound(manager_of(cached=0, free=0))
    admission.arrived(request := request_of())
    assert not admission.lets_pass(request, 0, 0)


def test_what_was_found_is_remembered_while_the_prefix_cache_has_as_much() -> None:
    """So that vLLM need not look for all its chunks at every step."""
    admission = bound(manager_of(cached=0, free=2))
    admission.arrived(request := request_of())
    assert not admission.still_passes(request, 0), "nothing was found yet"
    assert admission.lets_pass(request, 0, 5 * BLOCK_TOKENS)
    for expected in (False, True):  # in an engine without other work vLLM tries it
        admission.step_scheduled(num_tokens=EMPTY)
        assert admission.still_passes(request, 0) is expected
    admission.step_scheduled(num_tokens=BUSY)
    assert not admission.still_passes(request, BLOCK_TOKENS)
    admission.finished("r")
    assert not admission.still_passes(request, 0)


def test_passed_requests_are_counted() -> None:
    stats = ConnectorStats()
    admission = Admission(BLOCK_TOKENS, stats)
    admission.bind(manager_of(cached=0, free=2))
    for req_id in ("a", "b", "c"):
        admission.arrived(request_of(req_id))
    assert admission.lets_pass(request_of("a"), 0, 5 * BLOCK_TOKENS)
    for req_id in ("b", "c"):
        assert not admission.lets_pass(request_of(req_id, num_tokens=2), 0, 0)
        admission.allocated(req_id)
    admission.step_scheduled(num_tokens=BUSY)
    admission.step_scheduled(num_tokens=BUSY)
    taken = stats.take()
    assert taken is not None
    assert taken.reduce()[PASSED_REQUESTS.name.removesuffix("_total")] == 1


def test_it_is_off_without_a_block_size_and_for_an_unknown_pool(caplog: pytest.LogCaptureFixture) -> None:
    admission = Admission(None, ConnectorStats())
    admission.bind(manager_of(cached=0, free=0))
    assert not admission.is_on
    manager = manager_of(cached=0, free=0)
    del manager.block_pool.touch
    admission = Admission(BLOCK_TOKENS, ConnectorStats())
    with caplog.at_level(logging.WARNING):
        admission.bind(manager)
    assert not admission.is_on
    assert "admission is fcfs: vLLM's block pool is not the one kvtier knows (BlockPool has no touch" in caplog.text
    admission.arrived(request := request_of())
    assert not admission.lets_pass(request, 0, 5 * BLOCK_TOKENS)


def test_a_failure_turns_it_off_and_does_not_reach_vllm(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(cached=0, free=0)
    admission = bound(manager)
    admission.arrived(request := request_of())
    manager.block_pool.get_num_free_blocks = lambda: 1 // 0
    assert not admission.lets_pass(request, 0, 5 * BLOCK_TOKENS)
    assert "prefix_first failed" in caplog.text
    assert not admission.is_on
