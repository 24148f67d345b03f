import asyncio
import errno
from pathlib import Path

from kvtier.disk.disk_health import FAILURES_IN_A_ROW, FIRST_PROBE_S, LAST_PROBE_S, DiskHealth, Kind
from kvtier.errors import TierIOError
from kvtier.obs.counters import Counters


def refusal(number: int = errno.EIO) -> TierIOError:
    cause = OSError(number, "refused")
    error = TierIOError(Path("tier"), "write", cause)
    error.__cause__ = cause
    return error


class Disk:
    """A disk whose probes succeed after a number of refusals, and its health; time passes in waits only."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.refused_probes = 0
        self.waits: list[float] = []
        self.counters = Counters()
        self.health = DiskHealth(self.probe, self.counters, now_s=lambda: self.now_s, sleep=self.sleep)

    async def probe(self) -> None:
        if self.refused_probes:
            self.refused_probes -= 1
            raise refusal()

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds

    def fail(self, kind: Kind = "write", number: int = errno.EIO, times: int = FAILURES_IN_A_ROW) -> None:
        for _ in range(times):
            self.health.failed(kind, refusal(number))

    @property
    def uses(self) -> tuple[bool, bool]:
        return self.health.readable, self.health.writable

    async def until_closed(self) -> list[float]:
        """Return the waits until the breaker was closed by a probe."""
        self.waits.clear()
        task = asyncio.create_task(self.health.run())
        await self.health.until_closed()
        task.cancel()
        return self.waits


def test_failures_in_a_row_open_the_breaker_once() -> None:
    disk = Disk()
    disk.fail(times=FAILURES_IN_A_ROW - 1)
    assert disk.uses == (True, True)
    disk.fail(times=2)
    assert disk.uses == (False, False)
    assert disk.health.breaker_open_reason.startswith("off after repeated errors: ")
    assert disk.counters.disk_breaker_opened == 1


def test_a_success_between_keeps_it_closed() -> None:
    disk = Disk()
    for _ in range(10):
        disk.fail(times=FAILURES_IN_A_ROW - 1)
        disk.health.succeeded("write")
    assert disk.uses == (True, True)
    assert not disk.health.breaker_open_reason


def test_reads_that_work_do_not_hide_writes_that_fail() -> None:
    disk = Disk()
    for _ in range(FAILURES_IN_A_ROW):
        disk.fail(times=1)
        disk.health.succeeded("read")
    assert disk.uses == (False, False)


def test_a_full_disk_is_read() -> None:
    disk = Disk()
    disk.fail(number=errno.ENOSPC)
    assert disk.uses == (True, False)
    assert disk.health.breaker_open_reason.startswith("writing is off after repeated errors: ")
    disk.fail("read", number=errno.ENOSPC)
    assert disk.uses == (False, False), "until reading fails too"
    assert disk.counters.disk_breaker_opened == 2


def test_probes_come_less_and_less_often() -> None:
    async def scenario() -> None:
        disk = Disk()
        disk.fail()
        disk.refused_probes = 7
        waits = await disk.until_closed()
        assert waits[:3] == [FIRST_PROBE_S, 2 * FIRST_PROBE_S, 4 * FIRST_PROBE_S]
        assert waits[-1] == LAST_PROBE_S
        assert disk.uses == (True, True)

    asyncio.run(scenario())


def test_a_disk_that_takes_the_probe_and_no_pack_does_not_flap() -> None:
    """Failures opened the breaker, and a probe closed it, every few seconds for ever."""

    async def scenario() -> None:
        disk = Disk()
        disk.fail(number=errno.ENOSPC)
        waits = []
        for _ in range(6):
            waits += await disk.until_closed()
            disk.fail(number=errno.ENOSPC, times=1)
            assert disk.uses == (True, False), "on probation one failure is enough"
        assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
        assert await disk.until_closed() == [60.0]
        disk.health.succeeded("write")
        disk.fail(number=errno.ENOSPC, times=1)
        assert disk.uses == (True, True), "a pack was written: trusted again"

    asyncio.run(scenario())
