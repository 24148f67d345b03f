"""An engine that comes and goes, again and again: a real daemon keeps nothing of it but what it stored."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.core.layout import ChunkKey
from tests.fakes.daemon_process import daemon
from tests.fakes.fsck import assert_clean_online
from tests.fakes.operator import Stub, make_durable, status_of, until
from tests.fakes.process_facts import Held, held
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in

NUM_RESTARTS = 50
NUM_COMPARED = 10
NUM_POOL_THREADS = 10


def check_for_leaks(found: Sequence[Held]) -> None:
    """Check that the last engines left no more than the first: connections being closed come and go.

    Thread pools grow to their size when they are first busy, whenever that is.
    """
    first, last = found[:NUM_COMPARED], found[-NUM_COMPARED:]
    before, after = zip(*first, strict=True), zip(*last, strict=True)
    growth = Held(*(min(late) - max(early) for early, late in zip(before, after, strict=True)))
    assert growth.num_fds <= 0, found
    assert growth.num_maps <= 0, found
    assert growth.num_files <= 0, found
    assert growth.num_threads <= NUM_POOL_THREADS, found


async def none_attached(stub: Stub) -> None:
    """Wait until the daemon has forgotten every session."""

    async def forgotten() -> bool:
        return not (await status_of(stub)).sessions

    await until(forgotten)


async def one_life(config: DaemonConfig, number: int, keys: Sequence[ChunkKey], pin_id: str) -> None:
    """Attach, load everything, begin to store, and end: politely, with the stream cut, or holding leases and grants."""
    async with ScriptedEngine(config, engine_id=f"engine-{number}") as engine:
        await engine.bind(pin_id, keys)
        chunks = await engine.acquire(1, keys)
        assert [engine.read(keys[i], chunks[i]) for i in sorted(chunks)] == [engine.payload(key) for key in keys]
        ref = await engine.take_credit()
        await engine.send(store_begin=pb.StoreBegin(stores=[pb.StoreSlot(key=chunk_key("half"), slot=ref)]))
        match number % 3:
            case 0:
                await engine.send(store_abort=pb.StoreAbort(stores=[pb.StoreSlot(key=chunk_key("half"), slot=ref)]))
                await engine.release(1)
            case 1:  # in mid-store
                await engine.release(1)
        await engine.barrier()


def test_restarts_leave_nothing_in_the_daemon(tmp_path: Path) -> None:
    """No session, lease, grant, lock file, descriptor, mapping or thread; what was stored is served each time."""
    config = config_in(tmp_path)
    keys = [chunk_key(number) for number in range(4)]

    async def scenario() -> None:
        async with daemon(config) as (process, stub):
            async with ScriptedEngine(config) as engine:
                pin_id = await make_durable(stub, engine, keys)
            found: list[Held] = []
            for number in range(NUM_RESTARTS):
                await one_life(config, number, keys, pin_id)
                await none_attached(stub)
                found.append(held(process.pid, config.host.arena_dir))
            check_for_leaks(found)
            status = await status_of(stub)
            assert status.counters["sessions_opened"] == NUM_RESTARTS + 1
            assert status.host.num_chunks == status.disk.num_chunks == len(keys)
            await assert_clean_online(stub)

    asyncio.run(scenario())
