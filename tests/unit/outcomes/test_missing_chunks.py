"""Of chunks that no tier holds, `explain` says how they left the last tier that held them, through every way out."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvtier.core.chunks import lost_chunks
from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.tokens import TokenIds
from kvtier.maintenance.online import _ServiceRows
from kvtier.maintenance.prompt_verification import PromptVerification
from kvtier.outcomes.explain import AskedPrompt, Explanation, NearBinding
from kvtier.prompts.book import RequestedPin
from kvtier.tiering.command_eviction import EvictTier
from tests.fakes.rig import ListPeer, Rig, at_once, eventually, hello_of, keys_of, rig
from tests.fakes.scripted_engine import chunk_key, host_bytes_for

TOKENS = [*range(1000, 1064)]
COMMAND, HOST, DISK, DAMAGED, UNKNOWN = (
    MissingCause.EVICTED_BY_COMMAND,
    MissingCause.EVICTED_FOR_HOST_MEMORY,
    MissingCause.EVICTED_FOR_DISK_SPACE,
    MissingCause.DROPPED_AS_DAMAGED,
    MissingCause.NOT_RECORDED,
)
Lose = Callable[[Rig], Awaitable[object]]


async def pinned(r: Rig) -> None:
    """Pin a prompt of four chunks that the engine recognizes."""
    r.cache._verified.set()  # there was nothing to adopt
    view = await r.cache.pins.pin(RequestedPin(name="p", tokens=TOKENS))
    (session, *_) = r.cache.live_sessions
    await r.cache.bindings.bind(session, view.prompt.pin_id, keys_of(range(4)), 64, "")


async def explained(r: Rig) -> tuple[Explanation, NearBinding]:
    """Explain a request that begins with all of it, and return its binding to the first namespace."""
    found = await r.cache.explainer.explain(AskedPrompt(tokens=TokenIds([*TOKENS, 1, 2])))
    (near,) = found.prompts
    (binding,) = [each for each in near.bindings if each.namespace_id == r.namespace.namespace_id]
    assert sum(each.num_chunks for each in binding.missing) == binding.num_missing_chunks
    assert binding.num_host_chunks + binding.num_disk_chunks + binding.num_missing_chunks == 4
    return found, binding


def causes(binding: NearBinding) -> list[tuple[MissingCause, int]]:
    return [(each.cause, each.num_chunks) for each in binding.missing]


# Ways out of the last tier, each of all four chunks


async def a_command(r: Rig) -> None:
    r.in_host(range(2))
    await r.on_disk(range(1, 4))
    await r.cache.evictions.evict("p", force=True)


async def a_command_for_one_tier_after_the_other(r: Rig) -> None:
    r.in_host(range(4))
    await r.on_disk(range(4))
    for tier in (EvictTier.HOST, EvictTier.DISK):
        assert (await explained(r))[1].missing == []
        await r.cache.evictions.evict("p", force=True, tier=tier)


async def a_command_for_all_while_an_engine_reads(r: Rig) -> None:
    """It is held by no tier, whatever its rows are still read for."""
    r.in_host(range(4))
    (session, *_) = r.cache.live_sessions
    at_once(session.loads.acquire(1, keys_of(range(4))))
    await r.cache.evictions.evict_all(force=True)


async def the_high_watermark(r: Rig) -> None:
    await r.cache.pins.unpin("p")
    r.in_host(range(4))
    r.namespace.tiers.evict_rows(4, unpinned_only=True)


async def an_acquire_of_other_chunks(r: Rig) -> None:
    await r.cache.pins.unpin("p")
    r.in_host(range(4))
    await r.on_disk(range(10, 18))
    session, _ = await r.session()
    at_once(session.loads.acquire(1, keys_of(range(10, 18))))


async def reclaimed_disk_space(r: Rig) -> None:
    await r.cache.pins.unpin("p")
    await r.on_disk(range(4))
    shortages = iter([1 << 20, 0, 0])
    await r.cache.capacity.drop_until_enough(lambda: next(shortages))


async def a_reclaimed_pack(r: Rig) -> None:
    await r.cache.pins.unpin("p")
    await r.namespace.index.drop_packs([await r.on_disk(range(4))])


async def damage_that_a_read_found(r: Rig) -> None:
    await r.on_disk(range(4))
    places = [place for number in range(4) if (place := r.location(number)) is not None]
    finish = r.namespace.tiers.drop_damaged(places)
    assert finish is not None
    await finish


async def damage_in_memory_that_a_check_found(r: Rig) -> None:
    r.in_host(range(4))
    _damage_rows(r)
    await PromptVerification(r.cache).run("p")


async def damage_in_memory_that_the_writer_found(r: Rig) -> None:
    r.in_host(range(4))
    _damage_rows(r)
    r.namespace.write_back.add(keys_of(range(4)))
    await eventually(lambda: r.counters.damaged_chunks_host == 4)


def _damage_rows(r: Rig) -> None:
    for number in range(4):
        chunk = r.chunk(number)
        assert chunk.slot is not None
        r.namespace.host.payload(chunk.slot, chunk.key)[0][7] ^= 1


async def a_repair_of_the_pack(r: Rig) -> None:
    pack_id = await r.on_disk(range(4))
    record = r.resources.ledger.load().packs[pack_id]
    await _ServiceRows(r.cache, asyncio.get_running_loop())._drop(record, record.chunks)


async def lost_rows(r: Rig) -> None:
    await r.on_disk(range(4))
    await r.resources.in_ledger(r.resources.ledger.packs.drop_chunks, r.namespace.namespace_id, keys_of(range(4)))
    assert await r.namespace.index.reconcile(keys_of(range(4)), repair=True) == 4


@pytest.mark.parametrize(
    ("lose", "cause"),
    [
        (a_command, COMMAND),
        (a_command_for_one_tier_after_the_other, COMMAND),
        (a_command_for_all_while_an_engine_reads, COMMAND),
        (the_high_watermark, HOST),
        (an_acquire_of_other_chunks, HOST),
        (reclaimed_disk_space, DISK),
        (a_reclaimed_pack, DISK),
        (damage_that_a_read_found, DAMAGED),
        (damage_in_memory_that_a_check_found, DAMAGED),
        (damage_in_memory_that_the_writer_found, DAMAGED),
        (a_repair_of_the_pack, DAMAGED),
        (lost_rows, DAMAGED),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_each_way_out_of_the_last_tier_is_named(tmp_path: Path, lose: Lose, cause: MissingCause) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(8)) as r:
            await pinned(r)
            began_s = time.time()
            await lose(r)
            found, binding = await explained(r)
            assert causes(binding) == [(cause, 4)]
            assert began_s <= binding.missing[0].last_unix_s <= time.time()
            assert found.outcome is RequestOutcome.NOT_STORED
            assert f"nothing of it is stored: it was {cause.replace('_', ' ')};" in found.reason

    asyncio.run(scenario())


def test_what_was_never_stored_has_no_record(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.cache.pins.pin(RequestedPin(name="p", tokens=TOKENS))
            _, binding = await explained(r)
            assert (binding.bound, causes(binding)) == (False, [(UNKNOWN, 4)])
            await r.cache.pins.unpin("p")
            await pinned(r)
            found, binding = await explained(r)
            assert (binding.bound, causes(binding)) == (True, [(UNKNOWN, 4)])
            assert binding.missing[0].last_unix_s == 0
            assert "nothing of it is stored;" in found.reason

    asyncio.run(scenario())


def test_what_a_part_is_missing_for_is_said_if_it_is_one_cause(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r)
            r.in_host(range(3))
            await r.on_disk([3])
            (place,) = [place for place in [r.location(3)] if place is not None]
            finish = r.namespace.tiers.drop_damaged([place])
            assert finish is not None
            await finish
            found, binding = await explained(r)
            assert (found.outcome, causes(binding)) == (RequestOutcome.PART, [(DAMAGED, 1)])
            assert "1 chunks are not stored: they were dropped as damaged;" in found.reason
            r.namespace.inventory.announce_lost(keys_of([9]), HOST)  # of another prompt
            for number in (1, 2):
                r.table.host.evict(chunk_key(number))
            r.namespace.inventory.announce_lost(keys_of([1]), COMMAND)
            found, binding = await explained(r)
            assert sorted(causes(binding)) == sorted([(COMMAND, 1), (DAMAGED, 1), (UNKNOWN, 1)])
            assert "3 chunks are not stored;" in found.reason

    asyncio.run(scenario())


def test_the_last_loss_of_a_chunk_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r)
            await a_command(r)
            await damage_that_a_read_found(r)
            _, binding = await explained(r)
            assert causes(binding) == [(DAMAGED, 4)]
            r.in_host(range(4))
            _, binding = await explained(r)
            assert binding.missing == []

    asyncio.run(scenario())


def test_losses_of_another_namespace_are_not_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r)
            session = await r.cache.attach(hello_of("second", weights="2"), ListPeer())
            session.namespace.inventory.announce_lost(keys_of(range(4)), COMMAND)
            _, binding = await explained(r)
            assert causes(binding) == [(UNKNOWN, 4)]

    asyncio.run(scenario())


def test_what_was_lost_longer_ago_than_is_remembered_has_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pinned(r)
            monkeypatch.setattr(lost_chunks, "_MERGED_S", 0)
            monkeypatch.setattr(lost_chunks, "MAX_LOST_CHUNKS", 6)
            r.namespace.inventory.announce_lost(keys_of(range(2)), DISK)
            r.namespace.inventory.announce_lost(keys_of(range(2, 4)), COMMAND)
            r.namespace.inventory.announce_lost(keys_of(range(10, 13)), COMMAND)
            _, binding = await explained(r)
            assert sorted(causes(binding)) == sorted([(COMMAND, 2), (UNKNOWN, 2)])

    asyncio.run(scenario())
