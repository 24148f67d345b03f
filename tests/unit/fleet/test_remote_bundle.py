"""A bundle in the store is read by ranges, and only the one that the manifest means."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.bundles.bundle import BundleChunk
from kvtier.bundles.safetensors_header import build_header
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import StoredChunk
from kvtier.errors import BundleTooNewError, RemoteDamagedError, RemoteMissingError, RemoteStoreError
from kvtier.fleet import remote_bundle
from kvtier.fleet.manifest import StoredKV
from kvtier.fleet.remote_bundle import ChunkRange, RangePlan, RemoteBundle
from tests.fakes.kv_hosts import TWO_RANKS, KVHost, keys_in, two_hosts
from tests.fakes.scripted_engine import ONE_GROUP


@pytest.fixture
def no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first read has next to nothing of the front."""
    monkeypatch.setattr(remote_bundle, "_FIRST_BYTES", 0)
    monkeypatch.setattr(remote_bundle, "_CHUNK_FRONT_BYTES", 0)


def with_host(tmp_path: Path, check: Callable[[KVHost, StoredKV], Awaitable[None]]) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, _, stored):
            await check(b, stored)

    asyncio.run(run())


async def opened(host: KVHost, stored: StoredKV) -> RemoteBundle:
    return await RemoteBundle.open(host.cache.resources, host.store, stored, host.namespace)


def content(host: KVHost, stored: StoredKV) -> bytes:
    return host.store.bucket.objects[stored.key][0]


def test_a_small_bundle_takes_one_request(tmp_path: Path) -> None:
    async def check(host: KVHost, stored: StoredKV) -> None:
        remote = await opened(host, stored)
        chunks = list(remote.chunks.values())
        data = await remote.read(ChunkRange(chunks))
        assert data == content(host, stored)[chunks[0].stored.offset :]
        assert await remote.read(ChunkRange(chunks[2:3])) == await remote.read_again(chunks[2])
        assert host.store.calls["get_range"] == 2, "the front, and what was read again"

    with_host(tmp_path, check)


@pytest.mark.usefixtures("no_guess")
def test_a_long_front_is_read_in_pieces_and_no_byte_twice(tmp_path: Path) -> None:
    async def check(host: KVHost, stored: StoredKV) -> None:
        remote = await opened(host, stored)
        assert list(remote.chunks) == list(remote.bundle.keys)
        assert host.store.calls["get_range"] > 1
        span = ChunkRange(list(remote.chunks.values()))
        assert await remote.read(span) == content(host, stored)[span.start : span.end]

    with_host(tmp_path, check)


@pytest.mark.parametrize("length", [0, 5, 9, 2000, -1])
@pytest.mark.usefixtures("no_guess")
def test_an_object_that_ends_early_is_damaged(tmp_path: Path, length: int) -> None:
    async def check(host: KVHost, stored: StoredKV) -> None:
        front_bytes = (await opened(host, stored)).bundle.chunks[0].stored.offset
        host.store.bucket.put(stored.key, content(host, stored)[: length if length >= 0 else front_bytes - 1])
        with pytest.raises(RemoteDamagedError, match="cut short"):
            await opened(host, stored)

    with_host(tmp_path, check)


def test_what_the_manifest_does_not_mean_is_refused(tmp_path: Path) -> None:
    async def check(host: KVHost, stored: StoredKV) -> None:
        for changed in (replace(stored, tokens_digest="0" * 12), replace(stored, num_bytes=stored.num_bytes - 1)):
            with pytest.raises(RemoteDamagedError, match="tokens or length"):
                await opened(host, changed)
        with pytest.raises(RemoteDamagedError, match="its keys are not those"):
            await opened(host, replace(stored, keys_digest="0" * 32))
        other = replace(host.namespace.layout, rank_bytes=host.namespace.layout.rank_bytes + 4096)
        host.namespace.layout = other
        with pytest.raises(RemoteDamagedError, match="another namespace or layout"):
            await opened(host, stored)
        host.namespace.layout = ONE_GROUP

    with_host(tmp_path, check)


def test_wrong_bytes_are_read_again_before_the_object_is_called_damaged(tmp_path: Path) -> None:
    async def check(host: KVHost, stored: StoredKV) -> None:
        spoiled = [1]

        def spoil(key: str, data: bytes) -> bytes:
            return data if not spoiled else data[: 100 + spoiled.pop()] + b"?" + data[102:]

        host.store.spoil = spoil
        assert (await opened(host, stored)).bundle.file_bytes == stored.num_bytes
        host.store.spoil = lambda key, data: data[:100] + b"?" + data[101:]
        with pytest.raises(RemoteDamagedError):
            await opened(host, stored)

    with_host(tmp_path, check)


def test_a_bundle_of_a_newer_kvtier_is_not_called_damaged(tmp_path: Path) -> None:
    """Else hosts that were not upgraded yet would delete what the others upload."""

    async def check(host: KVHost, stored: StoredKV) -> None:
        data = build_header({"kvtier.bundle": "4"}, [])
        host.store.bucket.put(stored.key, data + bytes(stored.num_bytes - len(data)))
        with pytest.raises(BundleTooNewError, match="upgrade kvtier"):
            await opened(host, stored)
        assert host.store.calls["get_range"] == 1

    with_host(tmp_path, check)


def test_an_object_that_is_gone_and_a_store_that_is_away_are_said_to_be_so(tmp_path: Path) -> None:
    async def check(host: KVHost, stored: StoredKV) -> None:
        with pytest.raises(RemoteMissingError):
            await opened(host, replace(stored, key=stored.key + "x"))
        host.store.down = True
        with pytest.raises(RemoteStoreError):
            await opened(host, stored)

    with_host(tmp_path, check)


# Ranges


def chunk_of(key: ChunkKey, offset: int, num_bytes: int) -> BundleChunk:
    return BundleChunk(StoredChunk(key, "", offset, num_bytes, num_bytes, "raw", 0), b"")


def test_ranges_are_neighbours_of_8_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_bundle, "RANGE_BYTES", 1000)
    monkeypatch.setattr(remote_bundle, "MAX_GAP_BYTES", 100)
    keys = keys_in(ONE_GROUP, "p", 16 * 8)
    places = [(0, 400), (400, 400), (800, 400), (1300, 300), (1701, 100), (1801, 5000), (6801, 10), (6000, 10)]
    chunks = {key: chunk_of(key, *place) for key, place in zip(keys, places, strict=True)}
    plan = RangePlan(ONE_GROUP)
    plan.add(keys, chunks)
    found = [[keys.index(chunk.stored.key) for chunk in span.chunks] for span in plan.ranges()]
    assert found == [[0, 1], [2, 3], [4], [5], [6], [7]], "a gap is read over, a long chunk is a range of its own"
    assert (plan.ranges()[1].start, plan.ranges()[1].end) == (800, 1600)


def test_heads_of_all_groups_come_first_and_windows_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_bundle, "RANGE_BYTES", 100)
    keys = keys_in(TWO_RANKS, "p", 128)
    chunks = {key: chunk_of(key, 50 * number, 50) for number, key in enumerate(keys)}
    plan = RangePlan(TWO_RANKS)
    for start in range(0, len(keys), 3):
        plan.add(keys[start : start + 3], chunks)
    found = [[keys.index(chunk.stored.key) for chunk in span.chunks] for span in plan.ranges()]
    # Group 0: chunks 0 to 7 of 16 tokens; group 1: 8 to 11 of 32; the window: 12 and 13.
    assert found == [[0, 1], [8, 9], [2, 3], [4, 5], [10, 11], [6, 7], [12, 13]]


def test_only_what_is_wanted_is_read() -> None:
    keys = keys_in(ONE_GROUP, "p", 16 * 6)
    plan = RangePlan(ONE_GROUP)
    plan.add(keys, {key: chunk_of(key, 10**7 * number, 10) for number, key in enumerate(keys) if number in (1, 4)})
    assert [[keys.index(chunk.stored.key) for chunk in span.chunks] for span in plan.ranges()] == [[1], [4]]
