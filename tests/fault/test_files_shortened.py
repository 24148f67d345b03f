"""Somebody shortens an arena file while the daemon lives (`truncate`, `> file`): what is gone cannot be touched.

The kernel ends a process that touches it (SIGBUS): the daemon died at its next look at the slot table.
"""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest

from tests.fakes.daemon_process import daemon
from tests.fakes.fsck import assert_clean_online
from tests.fakes.operator import Stub, make_durable, pin, status_of, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in

KEYS = [chunk_key(number) for number in range(3)]
LATE = [chunk_key(("late", number)) for number in range(3)]
CALM = {"TUNED_HOST_PREALLOCATED_BYTES": "0", "TUNED_DISK_PACK_LINGER_S": "0.01"}


async def started_again(stub: Stub, started_unix_s: float) -> None:
    """Wait until another daemon serves, in the same process or not."""

    async def is_there() -> bool:
        try:
            return (await status_of(stub)).started_unix_s != started_unix_s
        except grpc.aio.AioRpcError as error:
            # The daemon that stops cancels calls that are under way.
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
            return False

    await until(is_there)


@pytest.mark.parametrize("left", ["nothing", "header", "slot table", "rows but the last"])
def test_a_shortened_arena_is_replaced_and_nothing_durable_is_lost(tmp_path: Path, left: str) -> None:
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with daemon(config, CALM) as (process, stub):
            async with ScriptedEngine(config) as engine:
                pin_id = await make_durable(stub, engine, KEYS)
                before = await status_of(stub)
                geometry = engine.arena.geometry
                sizes = {
                    "nothing": 0,
                    "header": 4096,
                    "slot table": geometry.rows_offset,
                    "rows but the last": geometry.file_bytes - geometry.row_bytes,
                }
                with engine.arena.path.open("r+b") as file:
                    file.truncate(sizes[left])
                await engine.cut()
            await started_again(stub, before.started_unix_s)
            assert (await status_of(stub)).pid == process.pid, "it has not died"
            async with ScriptedEngine(config) as again:
                await again.bind(pin_id, KEYS)
                chunks = await again.acquire(1, KEYS)
                assert [again.read(key, chunks[i]) for i, key in enumerate(KEYS)] == [again.payload(k) for k in KEYS]
            await assert_clean_online(stub)

    asyncio.run(scenario())


def test_what_was_in_memory_only_is_lost_and_nothing_else(tmp_path: Path) -> None:
    """The drain reads from the arena what it still has to write."""
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with daemon(config, CALM | {"TUNED_DISK_PACK_LINGER_S": "60"}) as (process, stub):
            async with ScriptedEngine(config) as engine:
                pin_id = await pin(stub, "late")
                await engine.bind(pin_id, LATE)
                await engine.store(LATE)
                before = await status_of(stub)
                with engine.arena.path.open("r+b") as file:
                    file.truncate(engine.arena.geometry.rows_offset)
                await engine.cut()
            await started_again(stub, before.started_unix_s)
            status = await status_of(stub)
            assert (status.pid, status.disk.num_chunks, status.num_pinned) == (process.pid, 0, 1), (
                "no wrong byte is kept"
            )
            async with ScriptedEngine(config) as again:
                await again.bind(pin_id, LATE)
                assert await again.acquire(1, LATE) == {}
                await again.release(1)
                await again.store(LATE)
            await assert_clean_online(stub)

    asyncio.run(scenario())


def test_a_bus_error_says_where_and_the_next_start_serves_from_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between the shortening and the watch's next look the kernel may be quicker; it can only be said."""
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with daemon(config, CALM) as (process, stub), ScriptedEngine(config) as engine:
            pin_id = await make_durable(stub, engine, KEYS)
            process.send_signal(signal.SIGBUS)
            assert await process.wait() == -signal.SIGBUS
        assert "Fatal Python error: Bus error" in capfd.readouterr().err
        async with daemon(config, CALM) as (_, stub):

            async def recovered() -> bool:
                return (await status_of(stub)).counters.get("orphan_slots_recovered", 0) == len(KEYS)

            await until(recovered)
            async with ScriptedEngine(config) as again:
                await again.bind(pin_id, KEYS)
                assert sorted(await again.acquire(1, KEYS)) == [0, 1, 2]

    asyncio.run(scenario())
