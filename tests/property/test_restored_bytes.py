"""Whatever arrives in place of an object, a host never serves a byte that was not computed, and blames rightly.

Each step changes bytes: of the object, or of some reads of it only. Then a prompt is restored, next to what is left of
it from the steps before.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from kvtier.bundles.bundle import Bundle
from kvtier.bundles.bundle_format import read_front
from kvtier.errors import RemoteUnavailableError
from kvtier.fleet import remote_bundle, restoring
from kvtier.fleet.manifest import StoredKV
from kvtier.fleet.restoring import RestoreOutcome, RestoreResult
from tests.fakes.kv_hosts import TWO_RANKS, KVHost, Pinned, two_hosts

Change = Callable[[bytes], bytes]

places = st.floats(0, 1, exclude_max=True)
changes = st.one_of(
    st.tuples(st.just("flip"), places, st.integers(1, 255)),
    st.tuples(st.just("cut"), places, st.just(0)),
    st.tuples(st.just("zeros"), places, st.integers(1, 3000)),
    st.tuples(st.just("swap"), places, places),
)
reads = st.sampled_from(("object", "first reads", "every other read", "nothing", "down from the middle"))
evictions = st.sampled_from(("nothing", "everything"))
steps = st.tuples(reads, changes, evictions, st.integers(1, 4))


def change_of(kind: str, place: float, how: float) -> Change:
    """Return what is done to bytes; some changes leave them as they are."""

    def change(data: bytes) -> bytes:
        at = int(place * len(data))
        if kind == "flip":
            return data[:at] + bytes([data[at] ^ int(how)]) + data[at + 1 :] if data else data
        if kind == "cut":
            return data[:at]
        if kind == "zeros":
            return (data[:at] + bytes(int(how)) + data[at + int(how) :])[: len(data)]
        other = int(how * len(data))
        first, second = sorted((at, other))
        return data[:first] + data[second : second + 100] + data[first + 100 :] if data else data

    return change


class SpoiledReads:
    """Reads of a store, some of which give other bytes than it has. The front counts as one read, in several pieces."""

    def __init__(self, host: KVHost, which: str, change: Change, front_bytes: int) -> None:
        self._host, self._which, self._change, self._front_bytes = host, which, change, front_bytes
        self._seen = set[int]()
        self.num_reads = self._num_fronts = 0

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """See RemoteStore."""
        await asyncio.sleep(0)
        self.num_reads += 1
        data = self._host.store.bucket.objects[key][0][start:end]
        self._num_fronts += not start
        is_new = self._num_fronts == 1 if start < self._front_bytes else not self._seen.issuperset(range(start, end))
        self._seen.update(range(start, end))
        if self._which == "down from the middle" and self.num_reads > 6:
            raise RemoteUnavailableError("memory://", "read", "the test says so")
        spoils = (self._which == "first reads" and is_new) or (
            self._which == "every other read" and self.num_reads % 2 == 0
        )
        return self._change(data) if spoils else data


async def step(
    host: KVHost, pinned: Pinned, stored: StoredKV, which: str, change: Change, evicted: str, max_parallel: int
) -> None:
    whole = host.store.bucket.objects[stored.key][0]
    before = host.held(pinned.keys)
    if evicted == "everything":
        await host.namespace.write_back.flush()
        await host.cache.evictions.evict("p", force=True)
        before = []
    if which == "object":
        host.store.bucket.put(stored.key, change(whole))
    is_same = host.store.bucket.objects[stored.key][0] == whole
    front = read_front(whole, "")
    assert isinstance(front, Bundle)
    reads_of = SpoiledReads(host, which, change, front.chunks[0].stored.offset)
    result: RestoreResult | None = None
    try:
        result = await host.restore(pinned, stored, store=reads_of, max_parallel=max_parallel)  # type: ignore[arg-type]
    except RemoteUnavailableError:
        assert which == "down from the middle"
    await host.join_and_check()
    held = host.held(pinned.keys)
    assert set(held) >= set(before), "what was here stays"
    if result is not None:
        assert len(held) == len(before) + result.num_chunks
        assert (result.outcome is RestoreOutcome.RESTORED) == (len(held) == len(pinned.keys))
        if result.outcome is not RestoreOutcome.RESTORED:
            assert result.outcome is RestoreOutcome.DAMAGED
            assert which == "every other read" or not is_same, "the network's fault is not the object's"
    host.store.bucket.put(stored.key, whole)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=1, max_size=8))
def test_no_wrong_byte_is_served(
    drawn: list[tuple[str, tuple[str, float, float], str, int]],
) -> None:
    async def run(folder: Path) -> None:
        async with two_hosts(folder, layout=TWO_RANKS, num_tokens=128) as (_, b, pinned, stored):
            for which, change, evicted, max_parallel in drawn:
                await step(b, pinned, stored, which, change_of(*change), evicted, max_parallel)
            result = await b.restore(pinned, stored)
            assert result.outcome is RestoreOutcome.RESTORED
            assert b.held(pinned.keys) == list(pinned.keys)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(remote_bundle, "_FIRST_BYTES", 0),
        patch.object(remote_bundle, "_CHUNK_FRONT_BYTES", 0),
        patch.object(remote_bundle, "RANGE_BYTES", 8500),
        patch.object(restoring, "PART_BYTES", 6000),
    ):
        asyncio.run(run(Path(folder)))
