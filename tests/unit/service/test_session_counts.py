"""What a session has of slots and promotions, to the last one: what it frees is there for the next."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import kvtier.tiering.promotion.batch
from kvtier.core.slots import SlotRef, SlotState
from tests.fakes.clocks import at_rest
from tests.fakes.in_process_engine import InProcessEngine
from tests.fakes.rig import ListPeer, at_once, eventually, hello_of, keys_of, rig
from tests.fakes.scripted_engine import chunk_key, host_bytes_for

CHUNK_BYTES = 6000


@dataclass
class CreditPeer(ListPeer):
    """Keeps its credits."""

    credits: list[SlotRef] = field(default_factory=list)

    def credits_granted(self, slots: Sequence[SlotRef]) -> None:
        """See EnginePeer."""
        self.credits += slots


def test_one_session_aborts_more_stores_than_there_are_slots(tmp_path: Path) -> None:
    """Slots of aborted stores could leak: each session had enough of them for its first hour."""

    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(8)) as r:
            peer = CreditPeer()
            session = await r.cache.attach(replace(hello_of("aborts"), store_credits=2), peer)
            session.stores.top_up()
            slots = r.namespace.host
            for number in range(3 * slots.usage.num_slots):
                await eventually(lambda: len(peer.credits) == 2)
                stores = [(chunk_key(number + place), peer.credits.pop()) for place in range(2)]
                session.stores.begin(stores)
                assert session.is_busy
                session.stores.abort(stores)
                session.stores.abort(stores)  # what is unknown is ignored
                assert not session.is_busy
                await at_rest(r.resources)
                granted = sum(each.stores.num_grants for each in r.cache.sessions)
                assert slots.counts()[SlotState.GRANTED] == granted
            assert r.counters.stores_discarded_aborted == 2 * 3 * slots.usage.num_slots
            assert r.counters.evicted_chunks_host == r.counters.store_credits_short == 0
            r.check()

    asyncio.run(scenario())


def test_credits_that_are_short_at_two_calls_are_granted_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(8)) as r:
            peer = CreditPeer()
            session = await r.cache.attach(replace(hello_of("twice"), store_credits=1), peer)
            session.stores.top_up()
            await eventually(lambda: len(peer.credits) == 1)
            session.stores.begin([(chunk_key(0), peer.credits.pop())])
            session.stores.top_up()  # the call in `begin` is not answered yet
            await at_rest(r.resources)
            assert len(peer.credits) == 1
            assert session.stores.num_grants == 2, "one is written, one is idle"
            r.check()

    asyncio.run(scenario())


def test_an_acquire_of_what_no_one_has_is_over_when_it_is_answered(tmp_path: Path) -> None:
    """The engine has nothing to release: such acquires would make a session busy, and use up how many it may have."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, peer = await r.session()
            for _ in range(2):
                at_once(session.loads.acquire(1, keys_of([0, 1])))
                assert (session.loads.num_acquires, session.is_busy) == (0, False)
            assert not peer.answers[1][0]

    asyncio.run(scenario())


def test_slots_of_a_lost_session_are_quarantined_until_its_processes_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(8)) as r:
            slots = r.namespace.host
            engine = InProcessEngine(replace(hello_of("lost"), store_credits=2), 0)
            await engine.attach(r.cache)
            await eventually(lambda: len(engine.credits) == 2)
            await at_rest(r.resources)
            num_granted, refs = slots.counts()[SlotState.GRANTED], list(engine.credits)
            engine.begin_store([chunk_key(0)])
            r.cache.end(engine.session)
            assert all(slots.matches(ref, SlotState.QUARANTINED) for ref in refs)
            assert slots.counts()[SlotState.GRANTED] == num_granted - 2
            assert r.counters.slots_quarantined == 2
            taken = await slots.allocate(slots.usage.num_slots)
            assert taken
            assert not {ref.slot for ref in taken} & {ref.slot for ref in refs}
            engine.end_processes()
            await eventually(lambda: not slots.counts()[SlotState.QUARANTINED])
            for ref in taken:
                slots.release(ref)
            r.check()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("how", "left"), [("read", [4, 3, 2, 1, 0]), ("returned", [4, 2, 1, 0]), ("unreadable", [4, 3, 2, 1, 0])]
)
def test_what_an_acquire_waits_for_becomes_less_with_every_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, left: list[int]
) -> None:
    """The connector waits only while the rest is read before it could be computed: the rest could stay the whole."""
    monkeypatch.setattr(kvtier.tiering.promotion.batch, "BATCH_BYTES", 1)  # each chunk is reported alone

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(5))
            session, peer = await r.session()
            r.tier.unreadable = set(keys_of([2])) if how == "unreadable" else set()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(5))))
                assert peer.answers[1][1].pending_bytes == 5 * CHUNK_BYTES
                for num_reported in range(1, 1 + len(left)):
                    r.tier.allow(2 if how == "returned" and num_reported == len(left) else 1)
                    await eventually(lambda: len(peer.forecasts) == num_reported)  # noqa: B023
                    if how == "returned" and num_reported == 1:
                        at_once(session.loads.release(1, [3]))
            assert [forecast.pending_bytes for forecast in peer.forecasts] == [num * CHUNK_BYTES for num in left]
            assert session.loads.num_leases == (5 if how == "read" else 4)
            assert (r.counters.hit_bytes_disk, r.counters.hit_bytes_host) == (5 * CHUNK_BYTES, 0)

    asyncio.run(scenario())


def test_what_was_read_from_disk_before_the_end_of_a_long_acquire_counts_as_a_hit_on_disk(tmp_path: Path) -> None:
    """A quick disk is faster than the turns of the loop: of 1200 chunks 256 counted as found in memory, and how long it
    took was observed at each pause.
    """

    async def scenario() -> None:
        num_chunks = 600
        async with rig(tmp_path, host_bytes=host_bytes_for(num_chunks + 100), disk_bytes=10**8) as r:
            pack = await r.on_disk(range(num_chunks))
            r.in_host([num_chunks])
            r.tier.packs[pack][6000] ^= 1  # in chunk 1, so that this one is no hit
            session, _ = await r.session()
            keys = keys_of([num_chunks, *range(num_chunks)])
            for _ in session.loads.acquire(1, keys):
                await at_rest(r.resources)
            counters = r.counters
            assert dict(r.resources.timings.promotion.cumulative())[math.inf] == 1
            assert counters.promoted_chunks == num_chunks - 1
            assert (counters.hit_chunks_host, counters.hit_chunks_disk) == (1, num_chunks - 1)
            assert counters.hit_bytes_host == CHUNK_BYTES
            assert counters.hit_bytes_disk == (num_chunks - 1) * CHUNK_BYTES
            assert counters.missed_chunks_absent == 1

    asyncio.run(scenario())
