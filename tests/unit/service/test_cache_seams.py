"""Where the cache of unpinned chunks meets pins, promotion, compaction and a full disk."""

import asyncio
from pathlib import Path

from kvtier.prompts.book import RequestedPin
from kvtier.tiering.command_eviction import EvictTier
from tests.fakes.clocks import at_rest
from tests.fakes.rig import Rig, at_once, eventually, keys_of, rig
from tests.fakes.scripted_engine import ONE_GROUP, host_bytes_for

ROW_BYTES = 8192


async def _pin(made: Rig, numbers: list[int]) -> None:
    """Pin a prompt and bind it as an engine would."""
    tokens = tuple(range(len(numbers) * ONE_GROUP.groups[0].chunk_tokens))
    view = await made.cache.pins.pin(RequestedPin(name="p", tokens=tokens))
    session = made.cache.sessions[0]
    await made.cache.bindings.bind(session, view.prompt.pin_id, keys_of(numbers), len(tokens), "")


def test_a_chunk_pinned_while_its_eviction_waits_stays_on_disk(tmp_path: Path) -> None:
    """Chosen as ordinary, it was dropped as what it was by then: pinned, and promised to be durable.

    Between the choice and the drop lies the wait for a compaction that is being recorded.
    """

    async def scenario() -> None:
        async with rig(tmp_path, store="all") as made:
            await made.on_disk(range(4))
            async with made.namespace.index.hold():
                dropping = asyncio.create_task(made.namespace.index.drop_cheapest(1_000_000))
                await asyncio.sleep(0)
                await _pin(made, [0, 1])
            await dropping
            assert [made.location(number) is not None for number in (0, 1)] == [True, True]
            assert [made.table.get(key) for key in keys_of([2, 3])] == [None, None]
            assert made.counters.evicted_chunks_disk == 2
            made.check()

    asyncio.run(scenario())


def test_an_eviction_from_disk_keeps_the_promise_on_what_is_being_promoted(tmp_path: Path) -> None:
    """`evict NAME --tier disk --force` while a chunk was read from disk: no one wrote it again, it stayed CAPTURING,
    and engines, notified that it was lost, were not notified that it is held."""

    async def scenario() -> None:
        async with rig(tmp_path, store="all") as made:
            session, peer = await made.session()
            made.cache._verified.set()  # there was nothing to adopt
            await made.on_disk([0])
            await _pin(made, [0])
            with made.tier.stepping():
                at_once(session.loads.acquire(1, keys_of([0])))
                await eventually(lambda: bool(made.tier.asked))
                with made.tier.holding("delete_pack"):  # it is open for reading, and is read to its end
                    evicting = asyncio.create_task(made.cache.evictions.evict("p", force=True, tier=EvictTier.DISK))
                    await eventually(lambda: made.location(0) is None)
                    made.tier.allow(1)
                    await eventually(lambda: made.chunk(0).readable)
                await evicting
            await eventually(lambda: made.location(0) is not None)
            assert peer.held[keys_of([0])[0]]
            made.check()

    asyncio.run(scenario())


def test_what_leaves_host_memory_and_disk_is_counted_once_and_where_it_was(tmp_path: Path) -> None:
    """`evict --all` counted chunks that were never on disk as dropped from it, and acquires no eviction at all."""

    async def scenario() -> None:
        async with rig(tmp_path, store="all", host_bytes=host_bytes_for(4)) as made:
            made.cache._verified.set()  # there was nothing to adopt
            made.in_host(range(3))
            await made.on_disk(range(10, 12))
            session, _ = await made.session()
            await at_rest(made.resources)
            num_before = made.table.host.num_chunks
            at_once(session.loads.acquire(1, keys_of([10, 11])))
            assert made.counters.evicted_chunks_host == num_before - made.table.host.num_chunks > 0
            await eventually(lambda: made.table.host.num_chunks == 2 + num_before - made.counters.evicted_chunks_host)
            at_once(session.loads.release(1, None))
            await made.cache.evictions.evict_all(force=False, tier=EvictTier.ANY)
            assert made.counters.evicted_chunks_disk == 2

    asyncio.run(scenario())


def test_a_full_disk_costs_the_cheapest_packs_and_not_everything(tmp_path: Path) -> None:
    """With a chunk in use in every pack no pack came free before the last chunk of one was gone: almost everything was
    dropped, in the order of value, to make room for a single pack."""

    async def scenario() -> None:
        async with rig(tmp_path, store="all", disk_bytes=300_000) as made:
            packs = [list(range(start, start + 5)) for start in range(0, 40, 5)]
            for numbers in packs:
                await made.on_disk(numbers)
            hot = keys_of(numbers[0] for numbers in packs)
            for _ in range(10):
                made.table.use(made.table.known(hot))
            num_bytes = 300_000 - made.resources.disk_usage.used_bytes + 20_000
            assert made.resources.disk_usage.shortage(num_bytes) == 20_000
            await made.cache.capacity.find_disk_capacity(num_bytes)
            assert made.resources.disk_usage.fits(num_bytes)
            assert sum(made.table.holds(key) for key in hot) >= 7
            assert made.table.disk.num_chunks >= 30
            made.check()

    asyncio.run(scenario())


def test_a_chunk_that_lost_its_place_on_disk_while_it_was_promoted_is_announced_as_held(tmp_path: Path) -> None:
    """Engines were notified that it is lost, not that it was readable after all: no one asked for it."""

    async def scenario() -> None:
        async with rig(tmp_path, store="all") as made:
            session, peer = await made.session()
            await made.on_disk(range(3))
            with made.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(3))))
                await eventually(lambda: bool(made.tier.asked))
                await made.namespace.index.drop_cheapest(12_000)  # two of three: the pack stays, and is read
                lost = [key for key, held in peer.held.items() if not held]
                assert len(lost) == 2
            await eventually(lambda: made.table.host.num_chunks == 3)
            assert [made.table.holds(key) and peer.held[key] for key in lost] == [True, True]

    asyncio.run(scenario())
