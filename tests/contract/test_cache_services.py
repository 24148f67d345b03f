"""The daemon, and the fake of it that the CLI's tests run against, answer an operator alike."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kvtier._pb import engine_pb2
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig
from tests.contract.cache_service import CacheServiceContract, Engine, Open, Subject
from tests.fakes.fake_cache_service import FakeCacheService, serving
from tests.fakes.operator import Stub, on_disk
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running


class RealEngine:
    """A scripted one."""

    def __init__(self, stub: Stub, engine: ScriptedEngine) -> None:
        self._stub, self._engine = stub, engine

    async def bind(self, name: str) -> None:
        """See `Engine`."""
        pin = (await self._engine.receive("pin_added")).pin_added.pin
        assert pin.name == name
        await self._engine.bind(pin.pin_id, [chunk_key(number) for number in range(len(pin.tokens) // 16)])

    async def refuse(self, name: str, error: str) -> None:
        """See `Engine`."""
        pin = (await self._engine.receive("pin_added")).pin_added.pin
        assert pin.name == name
        await self._engine.send(bind_pin=engine_pb2.BindPin(pin_id=pin.pin_id, error=error))
        await self._engine.all_done()

    async def store(self, name: str, num_chunks: int) -> None:
        """See `Engine`."""
        keys = [chunk_key(number) for number in range(num_chunks)]
        await self._engine.store([key for key in keys if not self._engine.held[key]])
        await on_disk(self._stub, num_chunks)

    async def report(self, *requests: engine_pb2.RequestEnded) -> None:
        """See `Engine`."""
        await self._engine.send(requests_ended=engine_pb2.RequestsEnded(requests=requests))
        await self._engine.barrier()


class RealSubject:
    """A daemon in this loop."""

    def __init__(self, config: DaemonConfig, stub: Stub) -> None:
        self._config, self.stub = config, stub

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        """See `Subject`."""
        async with ScriptedEngine(self._config) as engine:
            yield RealEngine(self.stub, engine)


class FakeSubject:
    """The fake; what it says of its engine, a test sets."""

    def __init__(self, fake: FakeCacheService, stub: Stub) -> None:
        self._fake, self.stub = fake, stub

    async def bind(self, name: str) -> None:
        """See `Engine`; it does so at once."""

    async def refuse(self, name: str, error: str) -> None:
        """See `Engine`."""
        self._fake.refuse(name, error)

    async def store(self, name: str, num_chunks: int) -> None:
        """See `Engine`."""
        self._fake.capture(num_chunks)

    async def report(self, *requests: engine_pb2.RequestEnded) -> None:
        """See `Engine`."""
        for each in requests:
            self._fake.report(each)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        """See `Subject`."""
        self._fake.num_engines += 1
        yield self


class TestCacheService(CacheServiceContract):
    @pytest.fixture
    def opened(self) -> Open:
        @asynccontextmanager
        async def opened(folder: Path) -> AsyncIterator[Subject]:
            config = config_in(folder)
            async with running(config) as stub:
                yield RealSubject(config, stub)

        return opened


class TestFakeCacheService(CacheServiceContract):
    @pytest.fixture
    def opened(self) -> Open:
        @asynccontextmanager
        async def opened(folder: Path) -> AsyncIterator[Subject]:
            socket = folder / "s"
            with serving(FakeCacheService(), socket) as fake:
                async with grpc.aio.insecure_channel(channel_target(socket)) as channel:
                    yield FakeSubject(fake, Stub(channel))
                await asyncio.sleep(0)

        return opened
