"""The scrub: everything once, damage found and mended, and always last in the queue."""

import asyncio
from pathlib import Path
from unittest import mock

import pytest

import kvtier.upkeep.scrubber
from kvtier.upkeep.scrubber import CURSOR_FILE, Scrubber
from tests.fakes.rig import Rig, at_once, eventually, keys_of, rig


def scrubber_of(r: Rig, now_unix_s: float = 1e9) -> Scrubber:
    path = r.resources.config.disk.disk_dir / CURSOR_FILE
    return Scrubber(r.resources, lambda: [r.namespace.tiers], path, unix_s=lambda: now_unix_s)


def test_every_chunk_is_verified_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            for first in (0, 10, 20):
                await r.on_disk(range(first, first + 3))
            await scrubber_of(r).scrub_pass()
            wanted = keys_of([0, 1, 2, 10, 11, 12, 20, 21, 22])
            assert sorted(r.tier.asked) == sorted(wanted)
            assert (r.counters.disk_read_bytes_scrub, r.counters.scrub_passes) == (9 * 6000, 1)

    asyncio.run(scenario())


def test_a_pass_does_not_look_at_all_packs_for_each_of_them(tmp_path: Path) -> None:
    """40,000 packs, which is 2.4 TiB, took 30 ms of the loop for each of them."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            for number in range(30):
                await r.on_disk([number])
            with mock.patch.object(r.tier, "can_open", side_effect=r.tier.can_open) as looked:
                await scrubber_of(r).scrub_pass()
            assert sorted(r.tier.asked) == sorted(keys_of(range(30)))
            assert looked.call_count <= 2 * 30

    asyncio.run(scenario())


def test_damage_is_announced_dropped_and_the_pack_set_aside_after_the_good_chunks_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            pack = await r.on_disk(range(3))
            _, peer = await r.session()
            r.tier.packs[pack][6000] ^= 1  # in chunk 1
            await scrubber_of(r).scrub_pass()
            assert peer.held == {keys_of([1])[0]: False}
            assert (r.location(0) is None, r.location(2) is None) == (False, False)
            assert list(r.tier.set_aside) == []
            job = await r.cache.compactor.next_job()
            assert job is not None
            assert job.damaged
            assert await r.cache.compactor.compact(job)
            assert list(r.tier.set_aside) == [pack]
            assert r.location(0).pack_id != pack  # type: ignore[union-attr]
            assert await r.cache.compactor.next_job() is None
            r.check()

    asyncio.run(scenario())


def test_a_damaged_chunk_with_a_good_copy_in_host_memory_is_written_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.table.pin(keys_of([0]))
            r.in_host([0])
            r.namespace.write_back.add(keys_of([0]))
            await r.namespace.write_back.flush()
            (pack,) = r.tier.packs
            r.tier.packs[pack][0] ^= 1
            _, peer = await r.session()
            await scrubber_of(r).scrub_pass()
            await r.namespace.write_back.flush()
            assert r.location(0).pack_id != pack  # type: ignore[union-attr]
            assert peer.held == {}, "it was held all the time"
            assert list(r.tier.set_aside) == [pack]
            r.check()

    asyncio.run(scenario())


def test_a_pack_that_the_system_refuses_to_read_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was a line for each chunk: 64 MiB of small ones have thousands."""

    async def scenario() -> str:
        async with rig(tmp_path) as r:
            pack = await r.on_disk(range(50))
            await r.on_disk([90])
            r.tier.unreadable.update(keys_of(range(40)))
            await scrubber_of(r).scrub_pass()
            assert (r.location(0) is None, r.location(49) is None) == (False, False)
            return pack

    pack = asyncio.run(scenario())
    (refused,) = (record for record in caplog.records if record.message == "scrub_refused")
    fields = refused.kvtier_fields  # type: ignore[attr-defined]
    assert (fields["pack"], fields["chunks"]) == (pack, 40)
    assert "EIO" in fields["problem"]


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            for number in range(4):
                await r.on_disk([number])
            first, task = scrubber_of(r), None
            with r.tier.stepping():
                task = asyncio.create_task(first.scrub_pass())
                r.tier.allow(2)
                await eventually(lambda: len(r.tier.asked) == 3)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            done = r.tier.asked[:2]
            r.tier.asked.clear()
            second = scrubber_of(r)
            second._load()
            await second.scrub_pass()
            assert sorted(done + r.tier.asked) == sorted(keys_of(range(4)))

    asyncio.run(scenario())


def test_it_yields_to_promotions_between_two_chunks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4))
            await r.on_disk([9])
            session, peer = await r.session()
            with r.tier.stepping():
                task = asyncio.create_task(scrubber_of(r).scrub_pass())
                await eventually(lambda: len(r.tier.asked) == 1)
                at_once(session.loads.acquire(1, keys_of([9] if keys_of([9])[0] != r.tier.asked[0] else [0])))
                await eventually(lambda: len(r.tier.asked) == 2)
                r.tier.allow(2)
                await eventually(lambda: peer.num_ready() == 1)
            await task
            assert len(r.tier.asked) == 6

    asyncio.run(scenario())


def test_a_pass_begins_once_in_a_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.upkeep.scrubber, "_PERIOD_S", 100.0)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk([0])
            now_s, num_polls = 1e9, 0

            async def sleep(_: float) -> None:
                nonlocal now_s, num_polls
                now_s, num_polls = now_s + 30, num_polls + 1
                await (asyncio.Event().wait() if num_polls == 8 else asyncio.sleep(0))

            path = r.resources.config.disk.disk_dir / CURSOR_FILE
            scrubber = Scrubber(r.resources, lambda: [r.namespace.tiers], path, unix_s=lambda: now_s, sleep=sleep)
            task = asyncio.create_task(scrubber.run())
            await eventually(lambda: num_polls == 8)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert r.counters.scrub_passes == 2  # at 0 s and at 120 s

    asyncio.run(scenario())
