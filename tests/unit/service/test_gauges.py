"""What /metrics shows is what the service holds and did."""

import asyncio
import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from kvtier.core.slots import SlotState
from kvtier.errors import LedgerError, TierIOError
from kvtier.prompts.book import RequestedPin
from kvtier.service.metrics_reading import read_gauges
from kvtier.sessions.session import SessionEnd
from tests.fakes.rig import Rig, at_once, eventually, keys_of, rig
from tests.fakes.scripted_engine import host_bytes_for


def shown(r: Rig) -> dict[str, float]:
    """Return the gauges."""
    return asdict(read_gauges(r.cache))


def test_tiers_are_split_by_kind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            row_bytes = r.namespace.layout.row_bytes
            assert math.isnan(shown(r)["disk_unreserved_bytes"])
            await r.on_disk(range(4))
            r.in_host(range(10, 13))
            r.table.pin(keys_of([0, 10]))
            await r.resources.measure_disk()
            now = shown(r)
            assert (now["host_pinned_chunks"], now["host_unpinned_chunks"]) == (1, 2)
            assert (now["host_pinned_bytes"], now["host_unpinned_bytes"]) == (row_bytes, 2 * row_bytes)
            assert now["host_used_bytes"] >= 3 * row_bytes
            assert (now["disk_pinned_chunks"], now["disk_unpinned_chunks"], now["disk_packs"]) == (1, 3, 1)
            assert now["disk_pinned_bytes"] + now["disk_unpinned_bytes"] == r.table.disk.num_bytes
            assert now["disk_used_bytes"] == r.resources.disk_usage.used_bytes
            assert now["disk_unreserved_bytes"] > 0

    asyncio.run(scenario())


def test_pinned_chunks_that_the_disk_refused_are_shown(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, disk_bytes=4096) as r:
            r.in_host(range(3))
            r.table.pin(keys_of(range(3)))
            r.namespace.write_back.add(keys_of(range(3)))
            await eventually(lambda: shown(r)["over_quota_chunks"] == 3)

    asyncio.run(scenario())


def test_pins_are_counted_by_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, _ = await r.session()
            for number, name in enumerate(("refused", "waiting")):
                await r.cache.pins.pin(RequestedPin(name=name, tokens=(number, 1, 2)))
            await r.cache.bindings.bind(session, r.cache.prompts.get("refused").pin_id, (), 0, "it is too short")
            await r.cache.pins.watch.look()
            now = shown(r)
            assert (now["pins_refused"], now["pins_waiting"], now["pins_capturing"]) == (1, 1, 0)
            assert now["oldest_wait_refused_s"] >= 0

    asyncio.run(scenario())


def test_leases_sessions_and_what_waits_for_the_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(3))
            session, _ = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(3))))
                now = shown(r)
                assert (now["sessions_attached"], now["leased_chunks"], now["promotion_queue_chunks"]) == (2, 3, 3)
                r.tier.allow(3)
                await eventually(lambda: shown(r)["promotion_queue_chunks"] == 0)
            assert r.resources.timings.first_chunk.count == r.resources.timings.promotion.count == 1
            r.cache.end(session, SessionEnd.CUT)
            now = shown(r)
            assert (now["sessions_attached"], now["sessions_quarantined"]) == (1, 1)
            assert (r.counters.sessions_ended_cut, r.counters.sessions_ended_closed) == (1, 0)

    asyncio.run(scenario())


def test_hits_and_misses_by_tier_and_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(4)) as r:
            await r.on_disk(range(8))
            r.in_host([10])
            session, _ = await r.session()
            num_bytes = r.namespace.tiers.payload_bytes(keys_of([0])[0])
            at_once(session.loads.acquire(1, keys_of([10, 99])))
            assert (r.counters.hit_chunks_host, r.counters.hit_bytes_host) == (1, num_bytes)
            assert r.counters.missed_chunks_absent == 1
            with r.tier.stepping():
                at_once(session.loads.acquire(2, keys_of(range(8))))
                free = r.counters.hit_chunks_disk
                assert 0 < free < 8, "the arena is too small for all of them"
                assert r.counters.hit_bytes_disk == free * num_bytes
                assert r.counters.missed_chunks_no_slot == 8 - free
                assert r.counters.missed_chunks_absent == 1
                at_once(session.loads.release(2, None))
                r.tier.allow(8)
            for _ in range(3):
                r.resources.disk_health.failed("read", TierIOError(tmp_path, "read", OSError(5, "gone")))
            assert (shown(r)["disk_reading_off"], shown(r)["disk_writing_off"]) == (1, 1)
            await eventually(lambda: r.namespace.host.counts()[SlotState.LOADING] == 0)
            in_host = sum(r.chunk(number).readable for number in range(8))
            before = r.counters.hit_chunks_host
            at_once(session.loads.acquire(3, keys_of(range(8))))
            num_hit = r.counters.hit_chunks_host - before
            assert r.counters.missed_chunks_disk_off == 8 - in_host
            assert r.counters.missed_chunks_absent == 1 + in_host - num_hit

    asyncio.run(scenario())


def test_a_refusing_ledger_is_counted_and_timed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            before = r.resources.timings.ledger.count

            def refuse() -> None:
                raise LedgerError("full")

            for _ in range(2):
                with suppress(LedgerError):
                    await r.resources.in_ledger(refuse)
            assert r.counters.io_errors_ledger_transaction == 2
            assert r.resources.timings.ledger.count == before + 2

    asyncio.run(scenario())
