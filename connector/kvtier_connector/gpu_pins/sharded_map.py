"""A dictionary by blocks' keys that never does work for all of its entries at once.

A dict of 500,000 entries is copied when it grows, and freed as a whole, in 10 ms and more, while vLLM waits. Here
entries are spread over many small dicts by their keys' hashes.
"""

from typing import Generic, TypeVar, overload

from kvtier_connector.engine.vllm_block_pool import GpuKey

V = TypeVar("V")

NUM_SHARDS = 2048
"""Enough that they do not all grow within a few steps: each grows when it has a certain number of entries, and the
smaller they are, the more their sizes differ."""


class ShardedMap(Generic[V]):
    """Values by key."""

    def __init__(self) -> None:
        # All the same empty one at first: to make them takes half a millisecond, with the garbage collections.
        self._none: dict[GpuKey, V] = {}
        self._shards = [self._none] * NUM_SHARDS
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, key: GpuKey) -> bool:
        return key in self._shards[hash(key) % NUM_SHARDS]

    def add(self, key: GpuKey, value: V) -> bool:
        """Add an entry; return False, and change nothing, if there is one of this key."""
        number = hash(key) % NUM_SHARDS
        shard = self._shards[number]
        if key in shard:
            return False
        if shard is self._none:
            shard = self._shards[number] = {}
        shard[key] = value
        self._num += 1
        return True

    @overload
    def get(self, key: GpuKey) -> V | None: ...
    @overload
    def get(self, key: GpuKey, default: V) -> V: ...
    def get(self, key: GpuKey, default: V | None = None) -> V | None:
        """Return the value, or the default."""
        return self._shards[hash(key) % NUM_SHARDS].get(key, default)

    def pop(self, key: GpuKey) -> V | None:
        """Remove an entry; return its value, or None without one."""
        value = self._shards[hash(key) % NUM_SHARDS].pop(key, None)
        self._num -= value is not None
        return value

    def drain(self, num_entries: int) -> list[tuple[GpuKey, V]]:
        """Take out at least `num_entries`, or the rest.

        After the first call the map can only be drained.
        """
        entries: list[tuple[GpuKey, V]] = []
        while self._shards and len(entries) < num_entries:
            entries += self._shards.pop().items()
        self._num -= len(entries)
        return entries
