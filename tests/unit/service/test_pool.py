"""Thread pools where the system allows no more threads."""

import asyncio
import errno
from pathlib import Path

import pytest

from kvtier.concurrency.pool import Pool
from kvtier.errors import LedgerError, TierIOError
from kvtier.tiering.resources import Resources
from tests.fakes.gates import Gate
from tests.fakes.operator import reached
from tests.fakes.rig import rig
from tests.fakes.threads import without_new_threads


def refused(error: OSError) -> TierIOError:
    return TierIOError(Path("packs"), "work on", error)


def test_without_a_thread_a_call_is_refused_and_does_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was queued all the same: the next call's thread ran it, for a caller that had gone on without it."""

    async def scenario() -> None:
        pool, ran = Pool("test", 2, refusal=refused), list[int]()
        with without_new_threads(monkeypatch), pytest.raises(TierIOError, match="allows no more threads") as caught:
            await pool.run(lambda: ran.append(1))
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EAGAIN
        await pool.run(lambda: ran.append(2))
        assert ran == [2]
        assert not pool.is_busy
        pool.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["in_ledger", "in_io", "in_read", "in_write", "in_background"])
def test_every_kind_of_call_is_refused_by_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            resources = Resources(r.cache.config, r.tier, r.resources.ledger)
            error = LedgerError if kind == "in_ledger" else TierIOError
            with without_new_threads(monkeypatch):
                with pytest.raises(error, match="allows no more threads"):
                    await getattr(resources, kind)(lambda: None)
                await resources.measure_disk()

    asyncio.run(scenario())


def test_without_another_thread_calls_wait_for_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        pool, gate = Pool("test", 2, refusal=refused), Gate()
        first = asyncio.create_task(pool.run(gate.wait))
        await reached(gate.reached)
        with without_new_threads(monkeypatch):
            second = asyncio.create_task(pool.run(lambda: 2))
            await asyncio.sleep(0)
            gate.open()
            assert await second == 2
        await first
        pool.shutdown()

    asyncio.run(scenario())
