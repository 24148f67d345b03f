"""The daemon, and the fake of it that the connector's tests run against, keep the engine protocol."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.core.arena_format import ArenaGeometry
from tests.contract.daemon import DaemonContract, Open, Subject
from tests.fakes.fake_daemon import FakeDaemon
from tests.fakes.operator import Stub, evict, pin, unpin
from tests.fakes.scripted_engine import ONE_GROUP, config_in, running, wait_durable


class RealSubject:
    """A daemon in this loop."""

    def __init__(self, config: DaemonConfig, stub: Stub) -> None:
        self.config, self._stub = config, stub

    async def pin(self, name: str, num_chunks: int) -> str:
        """See `Subject`."""
        return await pin(self._stub, name, tokens=16 * num_chunks)

    async def unpin(self, name: str, pin_id: str) -> None:
        """See `Subject`."""
        await unpin(self._stub, name)
        await evict(self._stub, name)

    async def move_to_disk(self, name: str) -> None:
        """See `Subject`."""
        await wait_durable(self._stub, name)
        await evict(self._stub, name, force=True, tier=cache_pb2.TIER_HOST)


class FakeSubject:
    """A fake daemon, whose threads serve it."""

    def __init__(self, config: DaemonConfig, daemon: FakeDaemon) -> None:
        self.config, self._daemon = config, daemon

    async def pin(self, name: str, num_chunks: int) -> str:
        """See `Subject`."""
        pin = pb.Pin(pin_id=f"id of {name}", name=name, tokens=range(16 * num_chunks), pinned=True)
        self._daemon.add_pin(pin)
        return pin.pin_id

    async def unpin(self, name: str, pin_id: str) -> None:
        """See `Subject`."""
        self._daemon.remove_pin(pin_id)

    async def move_to_disk(self, name: str) -> None:
        """See `Subject`."""
        for number in self._daemon.evictable():
            self._daemon.evict(number, write_back=True)


class TestDaemon(DaemonContract):
    @pytest.fixture
    def opened(self) -> Open:
        @asynccontextmanager
        async def opened(folder: Path, stores_all: bool) -> AsyncIterator[Subject]:
            config = config_in(folder, store="all" if stores_all else "pinned")
            async with running(config) as stub:
                yield RealSubject(config, stub)

        return opened


class TestFakeDaemon(DaemonContract):
    @pytest.fixture
    def opened(self) -> Open:
        @asynccontextmanager
        async def opened(folder: Path, stores_all: bool) -> AsyncIterator[Subject]:
            geometry = ArenaGeometry(
                arena_id=b"A" * 16,
                num_slots=64,
                row_bytes=ONE_GROUP.row_bytes,
                num_ranks=ONE_GROUP.num_ranks,
                rank_bytes=ONE_GROUP.rank_bytes,
            )
            daemon = FakeDaemon(folder, geometry, stores_all=stores_all)
            daemon.start()
            try:
                yield FakeSubject(config_in(folder), daemon)
            finally:
                await asyncio.to_thread(daemon.stop)

        return opened
