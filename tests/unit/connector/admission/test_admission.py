"""The order of admission over vLLM's pool: when it is on, what it counts as needed, what a failure does."""

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvtier_connector.admission import Admission, PoolShape
from kvtier_connector.engine.vllm_block_pool import VllmBlockPool
from kvtier_connector.metrics.declared import PASSED_REQUESTS
from kvtier_connector.metrics.engine_stats import ConnectorStats
from tests.unit.connector.gpu_pins.test_gpu_pins import pool_of

BLOCK_TOKENS = 4
BUSY, EMPTY = 100, 0
SHAPE = PoolShape(block_tokens=BLOCK_TOKENS, watermark_ratio=0.0, reserves_whole_prompt=True)
HASHES = [BlockHash(bytes([number]) * 32) for number in range(6)]
KEYS = [make_block_hash_with_group_id(block_hash, 0) for block_hash in HASHES]


def request_of(req_id: str = "r", num_tokens: int = 6 * BLOCK_TOKENS) -> Any:
    """A request whose first blocks have these hashes."""
    return SimpleNamespace(request_id=req_id, num_tokens=num_tokens, block_hashes=HASHES)


def bound(manager: Any, **shape: Any) -> Admission:
    admission = Admission(replace(SHAPE, **shape), ConnectorStats())
    admission.bind(manager)
    assert admission.is_on
    return admission


def manager_of(*, cached: int, free: int) -> Any:
    """A pool with the first `cached` blocks of the prompt among its free ones, before `free` others."""
    return pool_of([*KEYS[:cached], *[None] * free])


def is_held_with(num_free: int, num_cached: int = 0, num_loaded: int = 5, **shape: Any) -> bool:
    """Whether a prompt of six blocks is held, of which some are cached and in use, and some can be loaded."""
    manager = manager_of(cached=num_cached, free=num_free)
    manager.block_pool.touch(manager.block_pool.blocks[:num_cached])
    admission = bound(manager, **shape)
    admission.arrived("r")
    return admission.is_held(request_of(), num_cached * BLOCK_TOKENS, num_loaded * BLOCK_TOKENS)


def test_blocks_that_others_hold_are_not_needed() -> None:
    manager = manager_of(cached=4, free=3)
    pool = VllmBlockPool(manager, BLOCK_TOKENS)
    assert pool.num_in_use(HASHES, 4) == 0
    manager.block_pool.touch(manager.block_pool.blocks[:3])
    assert [pool.num_in_use(HASHES, num_blocks) for num_blocks in (0, 2, 3, 4)] == [0, 2, 3, 3]
    assert is_held_with(5)
    assert not is_held_with(6)
    assert is_held_with(2, num_cached=3, num_loaded=3)
    assert not is_held_with(3, num_cached=3, num_loaded=3)


def test_the_whole_prompt_is_needed_where_vllm_reserves_it_and_else_what_is_loaded() -> None:
    assert is_held_with(3, num_loaded=3)
    assert not is_held_with(3, num_loaded=3, reserves_whole_prompt=False)
    assert is_held_with(2, num_loaded=3, reserves_whole_prompt=False)


def test_the_watermark_has_to_stay_free() -> None:
    assert not is_held_with(6)
    assert is_held_with(6, watermark_ratio=0.25)


def test_blocks_that_pins_hold_count_as_free() -> None:
    """They are released when vLLM is about to look for blocks, and no request waits because of a pin."""
    admission = Admission(SHAPE, ConnectorStats(), lambda: 4)
    admission.bind(manager_of(cached=0, free=2))
    admission.arrived("r")
    assert not admission.is_held(request_of(), 0, 5 * BLOCK_TOKENS)


def test_a_request_that_computes_most_of_what_it_needs_keeps_its_place() -> None:
    assert is_held_with(0, num_loaded=3)
    assert not is_held_with(0, num_loaded=2)
    assert not is_held_with(0, num_loaded=0)


def test_what_was_found_is_remembered_while_the_prefix_cache_has_as_much() -> None:
    """So that vLLM does not look for all its chunks in every step."""
    admission = bound(manager_of(cached=0, free=2))
    admission.arrived("r")
    request = request_of()
    assert not admission.is_still_held(request, 0), "nothing was found yet"
    assert admission.is_held(request, 0, 5 * BLOCK_TOKENS)
    for expected in (False, True):  # in an engine without other work vLLM tries it
        admission.step_scheduled(num_tokens=EMPTY)
        assert admission.is_still_held(request, 0) is expected
    admission.step_scheduled(num_tokens=BUSY)
    assert not admission.is_still_held(request, BLOCK_TOKENS)
    assert admission.is_still_held(request, 0)


@pytest.mark.parametrize(
    "forget",
    [
        lambda admission: admission.finished("r"),
        lambda admission: admission.allocated("r", KVCacheBlocks(((),))),
        lambda admission: admission.matches_changed(),
        lambda admission: admission.is_held(request_of(), 0, 0),
    ],
    ids=["ended", "admitted", "another session", "nothing found"],
)
def test_what_was_found_is_forgotten_with_its_reason(forget: Callable[[Admission], object]) -> None:
    admission = bound(manager_of(cached=0, free=2))
    admission.arrived("r")
    assert admission.is_held(request_of(), 0, 5 * BLOCK_TOKENS)
    admission.step_scheduled(num_tokens=BUSY)
    forget(admission)
    admission.step_scheduled(num_tokens=BUSY)
    assert not admission.is_still_held(request_of(), 0)


class Crowd:
    """Requests for one prompt of four blocks, and `other`, which is loaded and does not fit."""

    def __init__(self) -> None:
        self._manager = manager_of(cached=4, free=1)
        self._blocks = self._manager.block_pool.blocks[:4]
        self.admission = bound(self._manager)

    def begin(self, req_id: str) -> None:
        """Admit a request for the prompt."""
        self.admission.arrived(req_id)
        self._manager.block_pool.touch(self._blocks)
        self.admission.allocated(req_id, KVCacheBlocks((self._blocks,)))

    def end(self, req_id: str) -> None:
        """End it."""
        self._manager.block_pool.free_blocks(self._blocks[::-1])
        self.admission.finished(req_id)

    def steps(self, count: int) -> None:
        """Compute."""
        for _ in range(count):
            self.admission.step_scheduled(num_tokens=BUSY)

    def lets_pass(self, req_id: str, num_tokens: int = 5 * BLOCK_TOKENS) -> bool:
        """Whether one more for the prompt passes the other."""
        for each in ("other", req_id):
            self.admission.arrived(each)
        request = SimpleNamespace(request_id="other", num_tokens=24, block_hashes=[BlockHash(b"other" * 8)] * 6)
        assert self.admission.is_held(request, 0, 5 * BLOCK_TOKENS)
        passes = not self.admission.is_held(request_of(req_id, num_tokens), 4 * BLOCK_TOKENS, 0)
        self.steps(1)
        return passes


def test_while_one_waits_a_prompt_takes_requests_for_as_long_as_one_runs() -> None:
    crowd = Crowd()
    crowd.begin("first")
    crowd.steps(4)
    crowd.end("first")
    crowd.begin("a")
    assert [crowd.lets_pass(f"b{number}") for number in range(7)] == [True] * 5 + [False] * 2


def test_a_prompt_is_in_use_since_the_first_of_those_that_use_it() -> None:
    crowd = Crowd()
    crowd.begin("first")
    crowd.steps(4)
    crowd.end("first")
    crowd.begin("a")
    crowd.steps(3)
    crowd.begin("b")
    crowd.end("a")
    crowd.steps(2)
    assert not crowd.lets_pass("c")
    crowd.end("b")
    crowd.begin("d")
    assert crowd.lets_pass("e")


def test_before_a_request_has_ended_all_pass() -> None:
    crowd = Crowd()
    crowd.begin("a")
    crowd.steps(1000)
    assert crowd.lets_pass("b")


def test_a_request_that_shares_little_passes() -> None:
    """A chat template's first block is in use for ever."""
    crowd = Crowd()
    crowd.begin("first")
    crowd.steps(1)
    crowd.end("first")
    crowd.begin("a")
    crowd.steps(1000)
    assert not crowd.lets_pass("b")
    admission = crowd.admission
    admission.arrived("c")
    other = SimpleNamespace(request_id="other", num_tokens=24, block_hashes=[BlockHash(b"other" * 8)] * 6)
    assert admission.is_held(other, 0, 5 * BLOCK_TOKENS)
    assert not admission.is_held(request_of("c", 2 * BLOCK_TOKENS), BLOCK_TOKENS, 0)


def test_passed_requests_are_counted() -> None:
    stats = ConnectorStats()
    admission = Admission(SHAPE, stats)
    admission.bind(manager_of(cached=0, free=2))
    for req_id in ("a", "b", "c"):
        admission.arrived(req_id)
    assert admission.is_held(request_of("a"), 0, 5 * BLOCK_TOKENS)
    for req_id in ("b", "c"):
        assert not admission.is_held(request_of(req_id, num_tokens=2), 0, 0)
        admission.allocated(req_id, KVCacheBlocks(((),)))
    admission.step_scheduled(num_tokens=BUSY)
    admission.step_scheduled(num_tokens=BUSY)
    taken = stats.take()
    assert taken is not None
    assert taken.reduce()[PASSED_REQUESTS.name.removesuffix("_total")] == 1


def test_it_is_off_without_a_shape_and_for_an_unknown_pool(caplog: pytest.LogCaptureFixture) -> None:
    admission = Admission(None, ConnectorStats())
    admission.bind(manager_of(cached=0, free=0))
    assert not admission.is_on
    manager = manager_of(cached=0, free=0)
    del manager.block_pool.touch
    admission = Admission(SHAPE, ConnectorStats())
    with caplog.at_level(logging.WARNING):
        admission.bind(manager)
    assert not admission.is_on
    assert "admission is fcfs: vLLM's block pool is not the one kvtier knows (BlockPool has no touch" in caplog.text
    admission.arrived("r")
    assert not admission.is_held(request_of(), 0, 5 * BLOCK_TOKENS)


def test_a_failure_turns_it_off_and_does_not_reach_vllm(caplog: pytest.LogCaptureFixture) -> None:
    manager = manager_of(cached=0, free=0)
    admission = bound(manager)
    admission.arrived("r")
    manager.block_pool.get_num_free_blocks = lambda: 1 // 0
    assert not admission.is_held(request_of(), 0, 5 * BLOCK_TOKENS)
    assert "prefix_first failed" in caplog.text
    assert not admission.is_on
