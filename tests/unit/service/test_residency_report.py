"""What an engine is notified of its pins in host memory, if it wants to be."""

import asyncio
from pathlib import Path

import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.sessions import residency_report
from tests.fakes.operator import evict, pin, unpin
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(number) for number in range(4)]


async def notified(engine: ScriptedEngine, pin_id: str, num_chunks: int) -> None:
    """Wait until the engine was reported this number of the pin."""
    while True:
        residency = (await engine.receive("pin_residency")).pin_residency
        if dict(zip(residency.pin_ids, residency.num_host_chunks, strict=True)).get(pin_id) == num_chunks:
            return


def test_each_bound_pin_is_reported_once_and_then_its_changes(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config, report_residency=True) as engine:
            pin_id = await pin(stub, "p", tokens=64)
            await engine.bind(pin_id, KEYS)
            await notified(engine, pin_id, 0)
            await engine.store(KEYS[1:])
            await engine.store(KEYS[:1])  # from the first one on
            await notified(engine, pin_id, 4)
            await wait_durable(stub, "p")
            await evict(stub, "p", force=True, tier=cache_pb2.TIER_HOST)
            await notified(engine, pin_id, 0)
            assert len(await engine.acquire(1, KEYS)) == 4, "read from disk"
            await engine.release(1)
            await notified(engine, pin_id, 4)
            async with ScriptedEngine(config, engine_id="later", report_residency=True) as later:
                await later.send(confirm_pins=pb.ConfirmPins(pin_ids=[pin_id]))
                await notified(later, pin_id, 4)
                await later.send(confirm_pins=pb.ConfirmPins(pin_ids=[pin_id]))
                await notified(later, pin_id, 4)
            await unpin(stub, "p")
            await notified(engine, pin_id, 0)

    asyncio.run(scenario())


def test_what_a_quarantine_stops_is_not_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config, report_residency=True) as engine:
            pin_id = await pin(stub, "p", tokens=64)
            await engine.bind(pin_id, KEYS)
            await engine.store(KEYS)
            await notified(engine, pin_id, 4)
            (namespace,) = (await stub.GetStatus(cache_pb2.GetStatusRequest())).namespaces
            asked = cache_pb2.QuarantineNamespaceRequest(namespace_id=namespace.namespace_id, reason="wrong bytes")
            await stub.QuarantineNamespace(asked)
            await notified(engine, pin_id, 0)

    asyncio.run(scenario())


def test_an_engine_that_does_not_want_to_know_is_not_notified(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with (
            running(config) as stub,
            ScriptedEngine(config) as engine,
            ScriptedEngine(config, report_residency=True) as other,
        ):
            pin_id = await pin(stub, "p", tokens=64)
            await engine.bind(pin_id, KEYS)
            await other.bind(pin_id, KEYS)
            await engine.store(KEYS)
            await notified(other, pin_id, 4)
            await engine.barrier()
            assert not [each for each in engine._unread if each.HasField("pin_residency")]

    asyncio.run(scenario())


def test_many_pins_come_in_bounded_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config, report_residency=True) as engine:
            names = {await pin(stub, f"p{number}", first=1000 * number) for number in range(5)}
            for number, pin_id in enumerate(sorted(names)):
                await engine.bind(pin_id, [chunk_key((number, 0))])
            sizes, reported = list[int](), set[str]()
            while reported != names:
                residency = (await engine.receive("pin_residency")).pin_residency
                sizes.append(len(residency.pin_ids))
                reported.update(residency.pin_ids)
            assert max(sizes) <= 2

    monkeypatch.setattr(residency_report, "MAX_ASKED_PINS", 2)
    asyncio.run(scenario())
