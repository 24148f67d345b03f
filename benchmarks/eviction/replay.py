"""Every policy over a trace at every size: hits, as a share of all blocks and of Belady's hits."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from benchmarks.eviction.kvtier_tiers import BothTiers, DiskTier, HostTier
from benchmarks.eviction.peers.arc import Arc
from benchmarks.eviction.peers.base import Cache
from benchmarks.eviction.peers.belady import Belady
from benchmarks.eviction.peers.gdsf import Gdsf
from benchmarks.eviction.peers.lru import Lru
from benchmarks.eviction.peers.s3_fifo import S3Fifo
from benchmarks.eviction.peers.tiny_lfu import WTinyLfu
from benchmarks.eviction.workloads import Requests
from kvtier.core.layout import ChunkKey

BELADY = "Belady"
KVTIER = ("kvtier host", "kvtier disk", "kvtier both")
PEERS: Mapping[str, Callable[[int], Cache]] = {
    "LRU": Lru,
    "ARC": Arc,
    "S3-FIFO": S3Fifo,
    "W-TinyLFU": WTinyLfu,
    "GDSF": Gdsf,
}
POLICIES = (BELADY, *KVTIER, *PEERS)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One trace in caches of one size.

    Attributes:
        trace: Its name.
        percent: Of the trace's distinct blocks; `capacity` in blocks.
        num_blocks: That the requests have in all.
        hits: Blocks hit by policy.
        cpu_s: CPU time by policy.
    """

    trace: str
    percent: float
    capacity: int
    num_blocks: int
    hits: Mapping[str, int]
    cpu_s: Mapping[str, float]

    def rate(self, policy: str) -> float:
        """Return the share of all blocks that were hit."""
        return self.hits[policy] / self.num_blocks

    def share(self, policy: str) -> float:
        """Return the hits as a share of Belady's; 1 when there are none to have."""
        return self.hits[policy] / self.hits[BELADY] if self.hits[BELADY] else 1.0


def num_hits(cache: Cache, requests: Requests) -> int:
    """Return how many blocks of a trace are hit."""
    return sum(cache.request(blocks) for blocks in requests)


def replay(trace: str, requests: Requests, percents: Iterable[float]) -> Iterator[Replay]:
    """Replay a trace, size by size; each policy begins empty."""
    distinct = {block for blocks in requests for block in blocks}
    keys = _keys(max(distinct, default=0) + 1)
    for percent in percents:
        capacity = max(1, int(len(distinct) * percent / 100))
        hits, cpu_s = {}, {}
        for policy in POLICIES:
            began_s = time.process_time()
            hits[policy] = num_hits(make_cache(policy, capacity, requests, keys), requests)
            cpu_s[policy] = time.process_time() - began_s
        num_blocks = sum(map(len, requests))
        yield Replay(trace=trace, percent=percent, capacity=capacity, num_blocks=num_blocks, hits=hits, cpu_s=cpu_s)


def _keys(number: int) -> list[ChunkKey]:
    return [xxhash.xxh3_128_digest(block.to_bytes(8, "little")) * 2 + bytes(4) for block in range(number)]


def make_cache(policy: str, capacity: int, requests: Requests, keys: Sequence[ChunkKey]) -> Cache:
    """Return an empty cache; `keys` are the blocks' chunk keys."""
    if policy == BELADY:
        return Belady(capacity, requests)
    if policy == KVTIER[0]:
        return HostTier(capacity, keys, max(map(len, requests), default=0))
    if policy == KVTIER[1]:
        return DiskTier(capacity, keys)
    if policy == KVTIER[2]:
        return BothTiers(max(1, capacity // 10), capacity, keys, max(map(len, requests), default=0))
    return PEERS[policy](capacity)
