"""While the circuit breaker is open only the probe calls the disk; when it closes, all work goes on."""

import asyncio
import errno
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier.concurrency.tasks import Tasks
from kvtier.errors import LedgerError, TierIOError
from kvtier.ledger.pack_rows import PackRows
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.readiness import ReadyWhere
from kvtier.sessions.session import Session
from kvtier.upkeep.compactor import Compactor
from kvtier.upkeep.scrubber import CURSOR_FILE, Scrubber
from tests.fakes.clocks import JumpingLoop, at_rest, run_with_jumps
from tests.fakes.gates import failing
from tests.fakes.rig import ListPeer, Rig, at_once, eventually, keys_of, rig

MINUTE_S = 60.0
CALLS = ("write_pack", "rewrite_pack", "read_chunks", "delete_pack", "set_aside_pack", "list_packs", "sweep", "probe")


def recorded(r: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that takes up every call of the tier when it begins."""
    calls: list[str] = []

    def record(name: str) -> None:
        original = getattr(r.tier, name)

        def call(*args: object, **options: object) -> object:
            calls.append(name)
            return original(*args, **options)

        monkeypatch.setattr(r.tier, name, call)

    for name in CALLS:
        record(name)
    return calls


def refusal(number: int) -> TierIOError:
    return TierIOError(Path("tier"), "work on", OSError(number, "refused"))


def open_breaker(r: Rig) -> None:
    """Switch the tier off, as three refusals in a row do."""
    while r.resources.disk_health.readable:
        r.resources.disk_health.failed("read", refusal(errno.EIO))


async def write_back(r: Rig) -> None:
    r.table.pin(keys_of([20]))
    r.namespace.write_back.add(r.in_host([20, 21]))


async def compact(r: Rig) -> None:
    r.resources.holes.set()
    await Compactor(
        r.resources, lambda: [r.namespace.tiers], is_any_refused=lambda: False, retry_refused=lambda: None
    ).run()


async def scrub(r: Rig) -> None:
    await Scrubber(r.resources, lambda: [r.namespace.tiers], r.resources.config.disk.disk_dir / CURSOR_FILE).run()


async def prefetch(r: Rig) -> None:
    r.namespace.promoter.prefetch(keys_of(range(3)))


@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        (write_back, ["write_pack", "write_pack"]),
        (compact, ["rewrite_pack", "write_pack", "delete_pack"]),
        (scrub, ["read_chunks", "read_chunks"]),
        (prefetch, ["read_chunks"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_background_work_waits_for_the_probe(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Rig], Coroutine[Any, Any, None]],
    wanted: Sequence[str],
) -> None:
    """Each waited for the closed breaker in a place that no test covered."""

    async def scenario(loop: JumpingLoop) -> None:
        async with rig(tmp_path, store="all", compact_dead_ratio=0.1) as r:
            await r.on_disk(range(5))
            await r.on_disk(range(5, 10))
            await r.namespace.index.drop(keys_of(range(3, 5)))
            session, peer = await r.session()
            await at_rest(r.resources)
            open_breaker(r)
            calls = recorded(r, monkeypatch)
            tasks = Tasks()
            tasks.start("work", work(r))
            for _ in range(3):
                loop.jump(MINUTE_S)
                await at_rest(r.resources)
            at_once(session.loads.acquire(1, keys_of([5])))
            assert not peer.answers[1][0], "a miss at once"
            assert calls == []
            await r.resources.disk_health.probe_once()
            assert r.resources.disk_health.writable
            for _ in range(len(wanted)):
                loop.jump(MINUTE_S)  # packs of unpinned chunks linger
                await at_rest(r.resources)
            assert calls == ["probe", *wanted]
            await tasks.close()

    run_with_jumps(scenario)


def test_probes_become_rare_and_the_first_that_succeeds_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(loop: JumpingLoop) -> None:
        async with rig(tmp_path) as r:
            health = r.resources.disk_health
            health._now_s = loop.time
            tasks = Tasks()
            tasks.start("probe", health.run())
            calls = recorded(r, monkeypatch)
            loop.jump(MINUTE_S)
            await at_rest(r.resources)
            assert calls == [], "it works"
            r.tier.refuse_writes = errno.EIO
            open_breaker(r)
            due: list[float] = []
            for second in range(1, 40):
                loop.jump(1.0)
                await at_rest(r.resources)
                due += [second] * (len(calls) - len(due))
            assert due == [2, 6, 14, 30]
            r.tier.refuse_writes = 0
            loop.jump(MINUTE_S)
            await eventually(lambda: not health.breaker_open_reason)
            assert r.counters.disk_probes == len(calls) == 5
            await tasks.close()

    run_with_jumps(scenario)


def test_a_write_that_fails_is_tried_again_after_a_pause(tmp_path: Path) -> None:
    """Without a pause, a disk that refuses was called in a tight loop until the third refusal opened the breaker."""

    async def scenario(loop: JumpingLoop) -> None:
        async with rig(tmp_path) as r:
            r.namespace.write_back.queue.pack_bytes = 6000  # a pack for each chunk, without lingering
            r.table.pin(keys_of(range(2)))
            r.tier.refuse_writes = errno.EIO
            r.namespace.write_back.add(r.in_host(range(2)))
            for num_failed in (1, 2):
                await at_rest(r.resources)
                assert r.counters.pack_writes_failed_write_back == num_failed
                loop.jump(MINUTE_S)
                r.tier.refuse_writes = errno.EIO if num_failed == 1 else 0
            await at_rest(r.resources)
            assert r.tier.written == [keys_of([0]), keys_of([1])], "no pause after what went well"

    run_with_jumps(scenario)


def test_what_is_on_disk_is_read_while_the_ledger_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone's shell held it: every prompt that was on disk only was a miss, though no read needs the ledger."""

    async def scenario(loop: JumpingLoop) -> None:
        async with rig(tmp_path, store="all") as r:
            await r.on_disk(range(2))
            session, peer = await r.session()
            failing(monkeypatch, PackRows, "commit_pack", lambda: LedgerError("database is locked"), times=3)
            await write_back(r)
            for _ in range(3):
                loop.jump(MINUTE_S)
                await at_rest(r.resources)
            assert "database is locked" in r.resources.disk_health.breaker_open_reason
            at_once(session.loads.acquire(1, keys_of([0])))
            await at_rest(r.resources)
            assert peer.answers[1][0], "leased, and read"
            assert r.counters.promoted_chunks == 1

    run_with_jumps(scenario)


def test_a_full_disk_is_prefetched_from_when_requests_have_ended(tmp_path: Path) -> None:
    """It waited until the disk could be written again: a host with a full disk did not become ready."""

    async def scenario(loop: JumpingLoop) -> None:
        async with rig(tmp_path, store="all") as r:
            await r.on_disk(range(2))
            await r.session()
            for _ in range(3):
                r.resources.disk_health.failed("write", refusal(errno.ENOSPC))
            assert r.resources.disk_health.readable
            r.resources.request_reads.began()  # of another namespace
            r.namespace.promoter.prefetch(keys_of(range(2)))
            await at_rest(r.resources)
            assert r.counters.promoted_chunks == 0
            r.resources.request_reads.ended()
            await at_rest(r.resources)
            assert r.counters.promoted_chunks == 2
            assert r.namespace.is_prefetched

    run_with_jumps(scenario)


def test_what_was_to_be_prefetched_is_left_on_disk_when_the_tier_is_switched_off(tmp_path: Path) -> None:
    async def scenario(loop: JumpingLoop) -> None:
        async with rig(tmp_path, store="all", io_threads=1) as r:
            await r.on_disk(range(6))
            session, _ = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of([0])))
                await eventually(lambda: bool(r.tier.asked))
                r.namespace.promoter.prefetch(keys_of(range(1, 6)))  # after the request
                assert not r.namespace.promoter._prefetched.is_set()
                open_breaker(r)
                await r.namespace.promoter.until_prefetched()
            await at_rest(r.resources)
            await r.resources.disk_health.probe_once()
            loop.jump(MINUTE_S)
            await at_rest(r.resources)
            assert r.tier.asked == keys_of([0])

    run_with_jumps(scenario)


async def pin_on_disk(r: Rig) -> tuple[Session, ListPeer]:
    await r.on_disk(range(2))
    session, peer = await r.session()
    prompt = (await r.cache.pins.pin(RequestedPin(name="p", tokens=tuple(range(32))))).prompt
    await r.cache.bindings.bind(session, prompt.pin_id, keys_of(range(2)), 32, "")
    return session, peer


def test_a_pin_that_is_on_a_disk_which_is_off_is_not_ready(tmp_path: Path) -> None:
    """It was `ready` everywhere, and no request could have it."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await pin_on_disk(r)
            readiness, watch = r.cache.readiness, r.cache.pins.watch
            await watch.look()

            async def whys() -> list[str]:
                return [each.why for each in (await readiness.check((), ReadyWhere.DISK)).waiting]

            assert (await whys(), readiness.problem()) == ([], "")
            open_breaker(r)
            await watch.look()
            off = "reading from disk is off"
            assert (await whys(), readiness.problem()) == ([off], off)
            await r.resources.disk_health.probe_once()
            assert (await whys(), readiness.problem()) == ([], "")

    asyncio.run(scenario())


def test_a_pin_that_is_in_memory_is_ready_though_the_disk_is_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, peer = await pin_on_disk(r)
            at_once(session.loads.acquire(1, keys_of(range(2))))
            await eventually(lambda: peer.num_ready() == 2)
            open_breaker(r)
            await r.cache.pins.watch.look()
            assert (await r.cache.readiness.check((), ReadyWhere.DISK)).ready
            assert not r.cache.readiness.problem()

    asyncio.run(scenario())
