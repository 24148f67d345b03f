"""A quarantined namespace serves and stores nothing, keeps what it has, and stays so until an operator ends it."""

import asyncio
from pathlib import Path

import pytest

from kvtier._pb import cache_pb2, engine_pb2
from kvtier.core import limits
from kvtier.core.layout import ChunkKey
from kvtier.tiering.quarantine import FOLDER_NAME, load_quarantines
from tests.contract.cache_service import Code, refused
from tests.fakes.fsck import assert_clean
from tests.fakes.operator import Stub, evict, make_durable, pin, prompt_of, status_of
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key, config_in, running

KEYS = [chunk_key(number) for number in range(5)]
RESERVED = [chunk_key(number) for number in range(5, 7)]


async def quarantine(stub: Stub, reason: str = "wrong answers") -> str:
    """Quarantine the only namespace; return its id."""
    (namespace,) = (await status_of(stub)).namespaces
    request = cache_pb2.QuarantineNamespaceRequest(namespace_id=namespace.namespace_id, reason=reason)
    await stub.QuarantineNamespace(request)
    return str(namespace.namespace_id)


async def release(stub: Stub, namespace_id: str) -> None:
    await stub.ReleaseNamespace(cache_pb2.ReleaseNamespaceRequest(namespace_id=namespace_id))


async def reason_of(stub: Stub) -> str:
    (namespace,) = (await status_of(stub)).namespaces
    return str(namespace.quarantine_reason)


async def explained(stub: Stub) -> tuple[int, bool]:
    """Return the outcome of a request that begins with the pinned tokens, and whether the quarantine is the reason."""
    found = await stub.Explain(cache_pb2.ExplainRequest(tokens=range(82)))
    return found.outcome, "is quarantined" in found.reason


async def acquired(engine: ScriptedEngine, acquire_id: int, keys: list[ChunkKey] = KEYS) -> int:
    """Return how many chunks the daemon gives."""
    num_found = len(await engine.acquire(acquire_id, keys))
    await engine.release(acquire_id)
    return num_found


def test_it_serves_and_stores_nothing_until_it_is_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            assert await acquired(engine, 1) == len(KEYS)
            assert await acquired(engine, 2) == len(KEYS), "the same keys again, by their name"
            assert await explained(stub) == (engine_pb2.HIT, False)
            namespace_id = await quarantine(stub)
            assert await acquired(engine, 3) == 0
            assert await explained(stub) == (engine_pb2.QUARANTINED, True)
            pin_id = await pin(stub, "new", first=1000)
            await engine.bind(pin_id, RESERVED)
            await engine.store(RESERVED, wait=False)
            await engine.barrier()
            async with asyncio.timeout(DEADLINE_S):  # what they hold is checked in a thread first
                while (await status_of(stub)).counters["stores_discarded_quarantined"] < len(RESERVED):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await engine.wait_held(RESERVED, held=False)
            status = await status_of(stub)
            assert status.counters["missed_chunks_quarantined"] == len(KEYS)
            assert status.counters["stores_discarded_quarantined"] == len(RESERVED)
            assert status.disk.num_chunks == len(KEYS), "what it had stays"
            assert (await prompt_of(stub)).pinned
            await release(stub, namespace_id)
            assert await acquired(engine, 4) == len(KEYS)
            await engine.store(RESERVED)

    asyncio.run(scenario())


def test_it_survives_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            namespace_id = await quarantine(stub, "a\nreason")
        assert_clean(config.disk.disk_dir)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            assert await reason_of(stub) == "a\nreason"
            assert await acquired(engine, 1) == 0
            await release(stub, namespace_id)
        assert load_quarantines(config.disk.disk_dir) == {}
        async with running(config) as stub, ScriptedEngine(config) as engine:
            assert await reason_of(stub) == ""
            assert await acquired(engine, 1) == len(KEYS)

    asyncio.run(scenario())


def test_a_note_that_cannot_be_read_still_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            namespace_id = await quarantine(stub)
        (config.disk.disk_dir / FOLDER_NAME / f"{namespace_id}.json").write_text("{")
        async with running(config) as stub:
            assert "cannot be read" in await reason_of(stub)

    asyncio.run(scenario())


def test_evicting_its_chunks_ends_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            namespace_id = await quarantine(stub)
            await evict(stub, tier=cache_pb2.TIER_HOST)
            assert await reason_of(stub), "the disk has its chunks"
            request = cache_pb2.EvictRequest(all=True, force=True, namespace_id=namespace_id)
            assert (await stub.Evict(request)).num_chunks == len(KEYS)
            assert not await reason_of(stub)
            await engine.wait_held(KEYS, held=False)
            await engine.store(KEYS)
            assert await acquired(engine, 1) == len(KEYS)
            for refusal in ({"all": True, "namespace_id": "none"}, {"name": "p", "namespace_id": namespace_id}):
                with pytest.raises(Exception, match="namespace"):
                    await stub.Evict(cache_pb2.EvictRequest(**refusal))

    asyncio.run(scenario())


def test_nothing_leaves_or_enters_it_as_a_bundle(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            exported = b"".join([piece.data async for piece in stub.Export(cache_pb2.ExportRequest(name="p"))])
            await quarantine(stub)
            async with refused(Code.FAILED_PRECONDITION, "NamespaceQuarantinedError"):
                _ = [piece async for piece in stub.Export(cache_pb2.ExportRequest(name="p"))]
            start = cache_pb2.ImportMessage(start=cache_pb2.ImportStart(name="q"))
            piece = cache_pb2.ImportMessage(piece=cache_pb2.BundlePiece(data=exported))
            async with refused(Code.FAILED_PRECONDITION, "NamespaceQuarantinedError"):
                await stub.Import(iter([start, piece]))

    asyncio.run(scenario())


def test_a_reason_has_a_bound(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config):
            for reason in ("", "x" * (limits.REASON.max_bytes + 1)):
                async with refused(Code.INVALID_ARGUMENT, "InvalidArgumentError"):
                    await quarantine(stub, reason)
            assert not await reason_of(stub)

    asyncio.run(scenario())
