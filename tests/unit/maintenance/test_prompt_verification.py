"""One prompt, read and compared in each tier: what is damaged is dropped and counted, and nothing stays leased."""

import asyncio
from pathlib import Path

import pytest

from kvtier.errors import PromptNotBoundError
from kvtier.ledger import BindingRow
from kvtier.maintenance.prompt_verification import PromptVerification, VerifiedNamespace
from kvtier.prompts.book import RequestedPin
from tests.fakes.rig import Rig, content, eventually, keys_of, rig
from tests.fakes.scripted_engine import DEADLINE_S


async def pinned(r: Rig, numbers: range) -> None:
    """Pin a prompt that the namespace has bound to these chunks."""
    await r.cache.pins.pin(RequestedPin(name="p", tokens=tuple(range(80))))
    prompt = r.cache.prompts.get("p")
    row = BindingRow(
        pin_id=prompt.pin_id,
        namespace_id=r.namespace.namespace_id,
        keys=tuple(keys_of(numbers)),
        covered_tokens=16 * len(numbers),
    )
    r.cache.prompts.bind(row)
    r.table.pin(row.keys)


async def verify(r: Rig) -> VerifiedNamespace:
    """Verify it, and check that no lease is left."""
    (found,) = (await PromptVerification(r.cache).run("p")).namespaces
    assert not any(chunk.num_leases for chunk in r.table)
    return found


def test_each_tier_is_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r, range(5))
            await r.on_disk(range(3))
            r.in_host([3])
            found = await verify(r)
            assert (found.num_chunks, found.num_lost_chunks, found.num_differing_chunks) == (5, 1, 0)
            assert (found.disk.num_verified_chunks, found.disk.num_missing_chunks) == (3, 2)
            assert (found.host.num_verified_chunks, found.host.num_missing_chunks) == (1, 4)
            assert (found.disk.verified_bytes, found.host.verified_bytes) == (3 * 6000, 6000)
            assert found.disk.num_damaged_chunks == found.host.num_damaged_chunks == 0

    asyncio.run(scenario())


def test_a_damaged_row_is_dropped_and_announced_as_wanted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r, range(2))
            r.in_host([0, 1])
            _, peer = await r.session()
            chunk = r.chunk(0)
            assert chunk.slot is not None
            r.namespace.host.payload(chunk.slot, chunk.key)[0][7] ^= 1
            found = await verify(r)
            assert (found.host.num_verified_chunks, found.host.num_damaged_chunks, found.num_lost_chunks) == (1, 1, 1)
            assert r.counters.damaged_chunks_host == 1
            assert peer.held == {keys_of([0])[0]: False}
            assert not r.chunk(0).readable
            r.check()

    asyncio.run(scenario())


def test_damage_on_disk_is_handled_as_the_scrub_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r, range(3))
            pack = await r.on_disk(range(3))
            _, peer = await r.session()
            r.tier.packs[pack][6000] ^= 1  # in chunk 1
            found = await verify(r)
            assert (found.disk.num_verified_chunks, found.disk.num_damaged_chunks, found.num_lost_chunks) == (2, 1, 1)
            assert r.counters.damaged_chunks_disk == 1
            assert peer.held == {keys_of([1])[0]: False}
            assert r.location(1) is None
            r.check()

    asyncio.run(scenario())


def test_what_the_system_does_not_read_is_refused_and_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r, range(2))
            await r.on_disk(range(2))
            r.tier.unreadable = set(keys_of([0]))
            found = await verify(r)
            assert (found.disk.num_verified_chunks, found.disk.num_refused_chunks) == (1, 1)
            assert found.disk.num_damaged_chunks == found.num_lost_chunks == 0
            assert found.disk.verified_bytes == 6000, "of what was read"
            assert (read := r.location(1)) is not None
            assert r.counters.disk_read_bytes_scrub == read.stored_bytes
            assert r.location(0) is not None

    asyncio.run(scenario())


def test_a_copy_in_memory_with_other_bytes_than_the_disk_is_dropped(tmp_path: Path) -> None:
    """Each has its own checksum: a model that computes other bits each time could bring that about."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r, range(1))
            await r.on_disk(range(1))
            r.in_host([0])
            chunk = r.chunk(0)
            assert chunk.slot is not None
            assert chunk.host is not None
            r.namespace.host.payload(chunk.slot, chunk.key)[0][:] = content(9)
            chunk.host.checksum = checksum_of_content(9)
            found = await verify(r)
            assert found.host.num_verified_chunks == found.disk.num_verified_chunks == found.num_differing_chunks == 1
            assert found.num_lost_chunks == 0
            assert (r.chunk(0).readable, r.chunk(0).on_disk) == (False, True)
            r.check()

    asyncio.run(scenario())


def checksum_of_content(number: int) -> int:
    from kvtier.disk.base import checksum_of

    return checksum_of([memoryview(content(number))])


def test_a_call_that_is_cancelled_stops_and_leases_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r, range(6))
            await r.on_disk(range(6))
            r.in_host(range(6))
            with r.tier.stepping():
                call = asyncio.create_task(PromptVerification(r.cache).run("p"))
                await eventually(lambda: bool(r.tier.asked))
                call.cancel()
                r.tier.allow(6)
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert not any(chunk.num_leases for chunk in r.table)
            assert (await verify(r)).disk.num_verified_chunks == 6

    asyncio.run(scenario())


def test_it_waits_while_requests_wait_for_the_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r, range(2))
            await r.on_disk(range(2))
            r.resources.request_reads.began()
            call = asyncio.create_task(PromptVerification(r.cache).run("p"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not r.tier.asked
            r.resources.request_reads.ended()
            assert (await call).namespaces[0].disk.num_verified_chunks == 2

    asyncio.run(scenario())


def test_constant_traffic_slows_it_only(tmp_path: Path) -> None:
    """On a daemon whose requests always wait for some chunk it never came to an end, and others waited for it."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r, range(4))
            await r.on_disk(range(4))
            r.resources.request_reads.began()
            try:
                async with asyncio.timeout(DEADLINE_S):
                    found = await verify(r)
            finally:
                r.resources.request_reads.ended()
            assert found.disk.num_verified_chunks == 4

    asyncio.run(scenario())


def test_a_prompt_that_no_engine_has_recognized_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.cache.pins.pin(RequestedPin(name="p", tokens=(1, 2)))
            with pytest.raises(PromptNotBoundError):
                await PromptVerification(r.cache).run("p")

    asyncio.run(scenario())
