"""What no pin names is deleted after its time, and nothing else, whatever the clocks say and however many collect."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvtier.errors import RemoteUnavailableError
from kvtier.fleet.garbage import Collected, GarbageCollector
from kvtier.fleet.manifest import KV, PROMPTS
from kvtier.fleet.store_clock import HOSTS, StoreClock
from tests.fakes.fleet_hosts import FleetHost, fleet_host
from tests.fakes.memory_store import Bucket
from tests.fakes.rig import eventually

GRACE_S = 3600.0
NUMBERS = range(4)
Test = Callable[[AsyncExitStack, Path, Bucket, list[float]], Awaitable[None]]


def play(folder: Path, test: Test) -> None:
    async def run() -> None:
        now_s = [1_000_000.0]
        async with AsyncExitStack() as stack:
            await test(stack, folder, Bucket(clock=lambda: now_s[0]), now_s)

    asyncio.run(run())


def collector(host: FleetHost, *, behind_s: float = 0.0) -> GarbageCollector:
    """Return the collector of a host whose clock is this far behind the store's."""
    clock = StoreClock(host.store, host_clock=lambda: host.store.bucket.clock() - behind_s)
    return GarbageCollector(host.store, host.sync, clock, grace_s=GRACE_S)


async def with_kv(stack: AsyncExitStack, folder: Path, bucket: Bucket) -> FleetHost:
    host = await stack.enter_async_context(fleet_host(folder / "a", bucket, "a"))
    engine = await host.engine()
    await host.pin("support", 1)
    await host.bind(engine, "support", NUMBERS)
    await host.compute(engine, NUMBERS)
    await eventually(lambda: host.is_durable("support"))
    await host.sync.look()
    assert await host.kv.upload_next()
    return host


def objects(bucket: Bucket) -> list[str]:
    return sorted(key for key in bucket.objects if key.startswith((KV, PROMPTS)))


def test_what_a_pin_names_stays_and_an_orphan_goes_after_its_time(tmp_path: Path) -> None:
    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host = await with_kv(stack, folder, bucket)
        kept = objects(bucket)
        bucket.put(f"{KV}ab/orphan.safetensors", b"left by a crash")
        assert await collector(host).collect() == Collected()
        now_s[0] += GRACE_S + 1
        assert (await collector(host).collect()).num_objects == 1
        assert objects(bucket) == kept

    play(tmp_path, test)


@pytest.mark.parametrize("behind_s", [-600.0, 0.0, 600.0])
def test_a_wrong_clock_deletes_nothing_that_is_young(tmp_path: Path, behind_s: float) -> None:
    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host = await with_kv(stack, folder, bucket)
        now_s[0] += GRACE_S - 5
        bucket.put(f"{KV}ab/uploading.safetensors", b"named in a moment")
        now_s[0] += 5
        garbage = collector(host, behind_s=behind_s)
        await garbage._clock.measure("a", "1", [])
        assert garbage._clock.offset_s == pytest.approx(behind_s, abs=1)
        assert (await garbage.collect()).num_objects == 0

    play(tmp_path, test)


def test_a_clock_that_is_set_right_deletes_nothing_that_is_young(tmp_path: Path) -> None:
    """What was measured before was added to the right time: an object of a moment ago was two days old."""

    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host, behind_s = await with_kv(stack, folder, bucket), [2 * 86400.0]
        clock = StoreClock(host.store, host_clock=lambda: bucket.clock() - behind_s[0])
        await clock.measure("a", "1", [])
        bucket.put(f"{KV}ab/uploading.safetensors", b"named in a moment")
        behind_s[0] = 0.0
        assert (await GarbageCollector(host.store, host.sync, clock, grace_s=GRACE_S).collect()).num_objects == 0

    play(tmp_path, test)


def test_a_pin_that_ended_long_ago_names_nothing_and_may_be_pinned_again(tmp_path: Path) -> None:
    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host = await with_kv(stack, folder, bucket)
        await host.cache.pins.unpin("support")
        await host.sync.look()
        ended = host.sync.manifest("support")
        assert ended is not None
        now_s[0] = ended.changed_unix_s + GRACE_S + 1
        await collector(host).collect()
        assert objects(bucket) == []
        await host.pin("support", 1)
        await host.sync.look()
        assert len(objects(bucket)) == 1, "its content; the KV goes up again"
        host.kv._retries.clear()
        assert await host.kv.upload_next()
        now_s[0] += GRACE_S + 1
        await collector(host).collect()
        assert len(objects(bucket)) == 2

    play(tmp_path, test)


def test_a_pin_that_a_host_with_a_wrong_clock_has_ended_keeps_its_content_for_the_grace_period(tmp_path: Path) -> None:
    """Hosts signed with their own clock: what one that was a day behind had unpinned was forgotten at once."""

    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        now_s[0] = 1e10  # the clocks of hosts are behind that
        host = await with_kv(stack, folder, bucket)
        await host.cache.pins.unpin("support")
        await host.sync.look()
        await collector(host).collect()
        assert len(objects(bucket)) == 2
        assert (manifest := host.sync.manifest("support")) is not None
        assert len(manifest.stored) == 1

    play(tmp_path, test)


def test_kv_of_an_adapters_old_weights_goes_a_day_after_that_of_the_new_ones_came(tmp_path: Path) -> None:
    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host = await with_kv(stack, folder, bucket)
        before, retrained = set(objects(bucket)), range(100, 104)
        now_s[0] += 10 * GRACE_S
        assert (await collector(host).collect()).num_objects == 0, "nothing newer is there"
        (engine,) = host.cache.sessions
        await host.bind(engine, "support", retrained)
        await host.compute(engine, retrained)
        await eventually(lambda: host.is_durable("support"))
        host.kv._retries.clear()
        assert await host.kv.upload_next()
        (new_key,) = set(objects(bucket)) - before
        now_s[0] += GRACE_S - 5
        assert (await collector(host).collect()).num_objects == 0, "hosts with the old weights may want it"
        now_s[0] += 10
        assert (await collector(host).collect()).num_objects == 1
        (stored,) = host.stored()["support"].stored
        assert stored.key == new_key
        assert new_key in objects(bucket)
        assert not await host.kv.upload_next()

    play(tmp_path, test)


def test_two_collectors_at_once_harm_nothing(tmp_path: Path) -> None:
    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host = await with_kv(stack, folder, bucket)
        other = await stack.enter_async_context(fleet_host(folder / "b", bucket, "b", seed=5))
        kept = objects(bucket)
        for number in range(20):
            bucket.put(f"{KV}ab/orphan-{number}", b"x")
        now_s[0] += GRACE_S + 1
        await asyncio.gather(collector(host).collect(), collector(other).collect())
        assert objects(bucket) == kept

    play(tmp_path, test)


def test_one_host_of_a_fleet_collects_and_others_leave_it(tmp_path: Path) -> None:
    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host = await with_kv(stack, folder, bucket)
        bucket.put(f"{KV}ab/orphan", b"x")
        now_s[0] += GRACE_S + 1
        assert (await collector(host).collect_if_due()).num_objects == 1
        bucket.put(f"{KV}ab/orphan", b"x")
        calls = host.store.calls.copy()
        assert (await collector(host).collect_if_due()).num_objects == 0
        assert host.store.calls - calls == {"head": 1}

    play(tmp_path, test)


def test_nothing_is_deleted_while_a_manifest_is_unreadable(tmp_path: Path) -> None:
    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host = await with_kv(stack, folder, bucket)
        bucket.put(f"{KV}ab/orphan", b"x")
        bucket.put("pins/ffffffffffffffffffffffffffffffff.json", b'{"kvtier.manifest": 2}')
        now_s[0] += GRACE_S + 1
        before = objects(bucket)
        await collector(host).collect()
        assert objects(bucket) == before

    play(tmp_path, test)


def test_a_store_that_fails_in_the_middle_leaves_the_rest_for_later(tmp_path: Path) -> None:
    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host = await with_kv(stack, folder, bucket)
        kept = objects(bucket)
        for number in range(5):
            bucket.put(f"{KV}ab/orphan-{number}", b"x")
        now_s[0] += GRACE_S + 1
        host.store.fail = lambda operation, key: operation == "delete" and host.store.calls["delete"] == 3
        with pytest.raises(RemoteUnavailableError):
            await collector(host).collect()
        await collector(host).collect()
        assert objects(bucket) == kept

    play(tmp_path, test)


def test_hosts_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    async def test(stack: AsyncExitStack, folder: Path, bucket: Bucket, now_s: list[float]) -> None:
        host = await with_kv(stack, folder, bucket)
        clock = StoreClock(host.store, host_clock=bucket.clock)
        await clock.measure("gone", "1", ["ab"])
        now_s[0] += 31 * 86400
        await clock.measure("here", "2", [])
        await collector(host).collect()
        assert [each.host for each in await clock.hosts()] == ["here"]
        bucket.put(f"{HOSTS}odd.json", b"[]")
        assert [each.host for each in await clock.hosts()] == ["here"]

    play(tmp_path, test)
