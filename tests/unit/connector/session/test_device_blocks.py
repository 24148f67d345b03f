"""What the connector says of the blocks of pins in vLLM's prefix cache, when the daemon asks."""

from typing import Any

from kvtier._pb import engine_pb2 as pb
from kvtier_connector.session.device_blocks import DeviceBlocks
from kvtier_connector.session.pin_binder import BoundPin
from tests.unit.connector.engine.test_vllm_block_pool import A, B, C, D, pool_and_manager

BLOCK_TOKENS = 4


def bound(pin_id: str, *gpu_keys: bytes) -> BoundPin:
    return BoundPin(pin_id=pin_id, keys=gpu_keys, pinned=True, gpu_keys=gpu_keys)


def test_cached_blocks_are_counted_up_to_the_first_that_is_missing() -> None:
    _, manager = pool_and_manager(A, B, D)
    blocks = DeviceBlocks(BLOCK_TOKENS)
    blocks.bind(manager)
    for pin in (bound("whole", A, B), bound("part", A, C, D), bound("gone", A)):
        blocks.bound(pin)
    blocks.gone("gone")
    answer = blocks.answer(pb.DeviceBlocksWanted(id=7, pin_ids=["whole", "part", "gone", "never"]))
    assert (answer.id, answer.problem) == (7, "")
    assert list(answer.num_blocks) == [2, 3, 0, 0]
    assert list(answer.num_cached_blocks) == [2, 1, 0, 0]
    blocks.clear()
    assert list(blocks.answer(pb.DeviceBlocksWanted(pin_ids=["whole"])).num_blocks) == [0]


def test_what_cannot_be_counted_is_said_why() -> None:
    asked = pb.DeviceBlocksWanted(id=1, pin_ids=["p"])
    assert "several groups" in DeviceBlocks(None).answer(asked).problem
    _, manager = pool_and_manager(A)
    unlike = DeviceBlocks(BLOCK_TOKENS + 1)
    unlike.bind(manager)
    assert "cannot look into" in unlike.answer(asked).problem


def test_a_block_that_is_evicted_while_it_is_looked_up_loses_no_answer() -> None:
    """vLLM has some blocks twice, and iterates over them; the daemon waited for an answer that did not come."""
    _, manager = pool_and_manager(A, B)
    blocks = DeviceBlocks(BLOCK_TOKENS)
    blocks.bind(manager)
    blocks.bound(bound("p", A, B))
    index = manager.block_pool.cached_block_hash_to_block
    look_up, failed = index.get_one_block, list[object]()

    def changing(key: Any) -> Any:
        if not failed:
            failed.append(key)
            raise RuntimeError("dictionary changed size during iteration")
        return look_up(key)

    index.get_one_block = changing
    assert list(blocks.answer(pb.DeviceBlocksWanted(pin_ids=["p"])).num_cached_blocks) == [2]
    assert failed
