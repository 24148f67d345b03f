"""All shared memory counts against `host.bytes`: rows, and each arena's header page and slot table.

Only rows were counted. The slot table of a model that stated 20 million ranks took 480 MB under a limit of 24 MiB.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.errors import ArenaFullError
from tests.fakes.rig import ListPeer, Rig, at_once, hello_of, rig
from tests.fakes.scripted_engine import ONE_GROUP

ROW_BYTES = ONE_GROUP.row_bytes


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on the file system of real arenas: others count metadata too."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def shared_bytes(r: Rig) -> int:
    """Memory that the files of the arena folder take."""
    return sum(path.stat().st_blocks * 512 for path in r.cache.config.host.arena_dir.iterdir())


def many_ranks(num_ranks: int) -> KVLayout:
    groups = (GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=1),)
    return KVLayout(num_ranks=num_ranks, rank_bytes=1, num_writers=1, groups=groups)


def test_header_and_slot_table_are_counted(folder: Path) -> None:
    async def scenario() -> None:
        async with rig(folder) as r:
            assert r.resources.budget.used_bytes == shared_bytes(r) > 0, "an arena without a row"
            r.in_host(range(5))
            assert r.resources.budget.used_bytes == shared_bytes(r)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "host_bytes", [2 * ROW_BYTES, 16 * ROW_BYTES, 16 * ROW_BYTES + 4096, 1 << 20, (1 << 20) + 12345]
)
def test_an_arena_whose_rows_are_all_taken_stays_within_the_limit(folder: Path, host_bytes: int) -> None:
    async def scenario() -> None:
        async with rig(folder, host_bytes=host_bytes) as r:
            r.in_host(range(r.namespace.host.num_takable))
            left_bytes = host_bytes - shared_bytes(r)
            assert 0 <= left_bytes < ROW_BYTES + 4096
            assert r.resources.budget.used_bytes == shared_bytes(r)

    asyncio.run(scenario())


def test_many_arenas_stay_within_the_limit(folder: Path) -> None:
    """Sixty models with four rows each want more than there is: the rows of those that are idle go, tables stay."""

    async def scenario() -> None:
        async with rig(folder, host_bytes=1 << 19) as r:
            for number in range(60):
                session = await r.cache.attach(hello_of(f"e{number}", weights=f"w{number}"), ListPeer())
                slots = await session.tiers.host.allocate(4)
                assert slots, number
                assert shared_bytes(r) == r.resources.budget.used_bytes <= 1 << 19
                for ref in slots:
                    session.tiers.host.release(ref)

    asyncio.run(scenario())


def test_a_slot_table_that_does_not_fit_is_refused_with_the_numbers(folder: Path) -> None:
    async def scenario() -> None:
        async with rig(folder, host_bytes=1 << 20) as r:
            used_bytes = r.resources.budget.used_bytes
            with pytest.raises(ArenaFullError) as refused:
                await r.cache.attach(hello_of("wide", many_ranks(200_000), weights="wide"), ListPeer())
            message = str(refused.value)
            for number in ("200704", "4800032", str(1 << 20)):  # a row, its entry in the slot table, the limit
                assert number in message
            assert "raise host.bytes" in message
            assert shared_bytes(r) == used_bytes == r.resources.budget.used_bytes

    asyncio.run(scenario())


def test_an_arena_that_others_leave_no_room_for_is_refused_and_had_when_they_have_gone(folder: Path) -> None:
    async def scenario() -> None:
        async with rig(folder, host_bytes=16 * ROW_BYTES) as r:
            keys = r.in_host(range(r.namespace.host.num_takable))
            session, _ = await r.session()
            at_once(session.loads.acquire(1, keys))  # leased: nothing of it can be evicted
            with pytest.raises(ArenaFullError) as refused:
                await r.cache.attach(hello_of("other", weights="2"), ListPeer())
            for number in (str(r.resources.budget.used_bytes), str(16 * ROW_BYTES)):
                assert number in str(refused.value)
            at_once(session.loads.release(1, None))
            await r.cache.attach(hello_of("other", weights="2"), ListPeer())
            assert r.resources.budget.used_bytes == shared_bytes(r) <= 16 * ROW_BYTES

    asyncio.run(scenario())
