"""The same chunks are acquired again and again: every answer is what the first one would be now."""

import asyncio
from pathlib import Path

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from tests.fakes.operator import evict, make_durable, pin, status_of
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, residencies, running

KEYS = [chunk_key(number) for number in range(5)]
COUNTED = ("acquires", "hit_chunks_host", "hit_bytes_host")


async def first_answer(engine: ScriptedEngine, acquire_id: int, keys: list[bytes]) -> pb.AcquireUpdate:
    """Return the first update as it came, without the acquire's id."""
    await engine.send(acquire=pb.Acquire(acquire_id=acquire_id, keys=keys))
    update = (await engine.receive("acquire_update")).acquire_update
    assert update.acquire_id == acquire_id
    update.acquire_id = 0
    return update


def test_every_answer_names_the_same_slots_and_counts_as_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            before = (await status_of(stub)).counters
            answers = [await first_answer(engine, number, KEYS) for number in range(4)]
            assert list(answers[0].resident.indexes) == [0, 1, 2, 3, 4]
            assert answers == answers[:1] * 4
            assert [engine.read(KEYS[each.index], each) for each in residencies(answers[3])] == [
                engine.payload(key) for key in KEYS
            ]
            assert list((await first_answer(engine, 4, KEYS[:3])).resident.indexes) == [0, 1, 2]
            after = (await status_of(stub)).counters
            assert [after[name] - before[name] for name in COUNTED] == [5, 23, 23 * 6000]

    asyncio.run(scenario())


def test_what_one_acquire_releases_another_keeps(tmp_path: Path) -> None:
    """All acquires of a list have one lease of its chunks together."""

    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            for number in range(4):
                leased = residencies(await first_answer(engine, number, KEYS))
            await engine.release(0)
            await engine.release(3)
            await engine.send(release=pb.Release(acquire_id=2, indexes=[0, 1, 2, 3, 4]))
            await engine.send(release=pb.Release(acquire_id=1, indexes=[4]))
            await engine.barrier()
            (session,) = (await status_of(stub)).sessions
            assert (session.num_acquires, session.num_leases) == (1, 4)
            await evict(stub, tier=cache_pb2.TIER_HOST, force=True)
            assert (await status_of(stub)).host.num_chunks == 4, "the chunk without a lease is gone"
            assert [engine.read(KEYS[each.index], each) for each in leased[:4]] == [
                engine.payload(key) for key in KEYS[:4]
            ]
            await engine.release(1)
            await engine.barrier()
            assert (await status_of(stub)).host.num_chunks == 0, "what was to be evicted goes with its lease"

    asyncio.run(scenario())


def test_chunks_that_were_evicted_meanwhile_are_read_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            for number in range(3):
                await first_answer(engine, number, KEYS)
                await engine.release(number)
            await engine.barrier()
            await evict(stub, tier=cache_pb2.TIER_HOST, force=True)
            leased = await engine.acquire(4, KEYS)
            assert all(chunk.from_disk for chunk in leased.values())
            assert [engine.read(KEYS[index], chunk) for index, chunk in leased.items()] == [
                engine.payload(key) for key in KEYS
            ]

    asyncio.run(scenario())
