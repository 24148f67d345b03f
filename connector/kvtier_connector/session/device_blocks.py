"""Counts, when the daemon asks, how many blocks of its pins vLLM's prefix cache has."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtier._pb import engine_pb2 as pb
from kvtier_connector.engine.vllm_block_pool import GpuKey, UnknownPoolError, VllmBlockPool
from kvtier_connector.session.pin_binder import BoundPin

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

_SLICE_BLOCKS = 4096
"""Looked up, in about a millisecond, before the scheduler's thread may take the interpreter's lock."""
_SEVERAL_BLOCKS = "a hit of this model needs several groups of blocks, a window or a state, which it does not count"
_UNKNOWN_POOL = "the connector cannot look into this vLLM's prefix cache"


class DeviceBlocks:
    """Keys of the blocks of pins. The thread that binds pins, but for `bind`.

    vLLM's scheduler goes on meanwhile, and its index is only looked up.

    Args:
        block_tokens: Of a block; None where a hit needs more than one block for each key.
    """

    def __init__(self, block_tokens: int | None) -> None:
        self._block_tokens = block_tokens
        self._keys: dict[str, Sequence[GpuKey]] = {}  # by pin id
        self._pool: VllmBlockPool | None = None

    def bind(self, manager: "KVCacheManager") -> None:
        """Begin with vLLM's block pool; where that is not the one that kvtier knows, answers say so."""
        if self._block_tokens is not None:
            with suppress(UnknownPoolError):
                self._pool = VllmBlockPool(manager, self._block_tokens)

    def bound(self, pin: BoundPin) -> None:
        """A pin's keys are known."""
        self._keys[pin.pin_id] = pin.gpu_keys

    def clear(self) -> None:
        """A session begins, which names its pins again."""
        self._keys.clear()

    def gone(self, pin_id: str) -> None:
        """A pin was removed."""
        self._keys.pop(pin_id, None)

    def answer(self, asked: pb.DeviceBlocksWanted) -> pb.DeviceBlocks:
        """Return the answer to a question of the daemon."""
        if (pool := self._pool) is None:
            problem = _SEVERAL_BLOCKS if self._block_tokens is None else _UNKNOWN_POOL
            return pb.DeviceBlocks(id=asked.id, problem=problem)
        answer, num_looked_up = pb.DeviceBlocks(id=asked.id), 0
        for pin_id in asked.pin_ids:
            keys = self._keys.get(pin_id, ())
            num_cached = next((idx for idx, key in enumerate(keys) if not _is_cached(pool, key)), len(keys))
            answer.num_blocks.append(len(keys))
            answer.num_cached_blocks.append(num_cached)
            num_looked_up += num_cached + 1
            if num_looked_up > _SLICE_BLOCKS:
                num_looked_up = 0
                time.sleep(0)
        return answer


def _is_cached(pool: VllmBlockPool, key: GpuKey) -> bool:
    """Look a key up; once more if vLLM has just evicted one of several blocks with it, while they were iterated."""
    with suppress(RuntimeError):
        return pool.is_cached(key)
    return pool.is_cached(key)
