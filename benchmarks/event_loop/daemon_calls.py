"""The calls that operators and engines make of one daemon, and the durable pins that it holds meanwhile."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from benchmarks.event_loop.timed_daemon import TIMEOUT_S
from benchmarks.measuring.daemon_fixtures import FINGERPRINT, LAYOUT, STATE
from benchmarks.measuring.many_pins import fill_with_pins, make_durable
from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.client.admin import AdminClient
from kvtier.config import DaemonConfig, DiskConfig, HostConfig, HttpConfig, ServerConfig
from kvtier.config.model import OFF
from kvtier.core.fingerprint import namespace_id
from kvtier.core.layout import ChunkKey
from kvtier.ledger import BindingRow, Ledger, NamespaceRow
from tests.fakes.scripted_engine import ScriptedEngine

CHUNK_TOKENS = LAYOUT.groups[0].chunk_tokens
LONG_TOKENS = 65_536
LONG_KEYS = 65_536
"""Of a prompt of a million tokens."""
TOO_MANY_KEYS = 1_500_000


def config_of(home: Path) -> DaemonConfig:
    """Return a daemon's settings over a folder in memory: the speed of a disk does not matter here."""
    (home / "arena").mkdir(mode=0o700, exist_ok=True)
    return DaemonConfig(
        server=ServerConfig(socket=home / "d.sock", drain_timeout_s=1),
        host=HostConfig(arena_dir=home / "arena", host_bytes=512 << 20, prefetch=False),
        disk=DiskConfig(disk_dir=home / STATE, disk_bytes=4 << 30, reserve_bytes=0),
        http=HttpConfig(listen=OFF),
    )


def keys_of(name: str, num_tokens: int) -> list[ChunkKey]:
    """Return the keys of a made-up prompt's chunks."""
    data = hashlib.shake_128(name.encode()).digest(32 * (num_tokens // CHUNK_TOKENS))
    return [data[start : start + 32] + bytes(4) for start in range(0, len(data), 32)]


def fill(disk_dir: Path, num_pins: int, num_tokens: int) -> list[ChunkKey]:
    """Write durable pins; return the keys of all of them, those of a prompt together."""
    fill_with_pins(disk_dir, num_pins, num_tokens)
    own_id, keys = namespace_id(FINGERPRINT), list[ChunkKey]()
    ledger = Ledger.open(disk_dir / "ledger.sqlite")
    with ledger.together():
        row = NamespaceRow(
            namespace_id=own_id, model="m", fingerprint=FINGERPRINT, layout=LAYOUT, created_unix_s=1, seen_unix_s=1
        )
        ledger.put_namespace(row)
        for prompt in ledger.load().prompts:
            bound = tuple(keys_of(prompt.name, num_tokens))
            keys += bound
            ledger.promises.put_binding(
                BindingRow(pin_id=prompt.pin_id, namespace_id=own_id, keys=bound, covered_tokens=num_tokens)
            )
    ledger.close()
    make_durable(disk_dir)
    return keys


class DaemonCalls:
    """The calls that are measured; each method makes one."""

    def __init__(self, config: DaemonConfig, client: AdminClient, num_pins: int, keys: Sequence[ChunkKey]) -> None:
        self._config, self._client, self._num_pins, self._keys = config, client, num_pins, keys
        self._num_made = self._num_acquires = 0
        self._pin_id, self._bundle = "", b""

    def _new_name(self) -> str:
        self._num_made += 1
        return f"new-{self._num_made}"

    async def list_prompts(self) -> None:
        assert len(await asyncio.to_thread(self._client.list)) >= self._num_pins

    async def status(self) -> None:
        await asyncio.to_thread(self._client.status)

    async def show(self) -> None:
        await asyncio.to_thread(self._client.get, "many-0-0")

    async def pin(self, num_tokens: int) -> None:
        tokens = np.random.default_rng(self._num_made).integers(0, 100_000, num_tokens).tolist()
        request = cache_pb2.PinRequest(name=self._new_name(), tokens=tokens)
        self._pin_id = (await asyncio.to_thread(self._client.pin, request)).pin_id
        self._num_pins += 1

    async def unpin(self) -> None:
        await asyncio.to_thread(self._client.unpin, f"new-{self._num_made}")

    @asynccontextmanager
    async def attached(self, **hello: object) -> AsyncIterator[ScriptedEngine]:
        async with ScriptedEngine(self._config, LAYOUT, **({"fingerprint": FINGERPRINT} | hello)) as engine:
            known = {pin.pin_id for pin in engine.welcome.pins}
            while len(known) < self._num_pins:
                known |= {pin.pin_id for pin in await engine.receive_pins()}
            yield engine

    async def attach(self, **hello: object) -> None:
        async with self.attached(**hello):
            pass

    async def bind(self, engine: ScriptedEngine) -> None:
        await engine.bind(self._pin_id, keys_of(self._pin_id, LONG_TOKENS))

    async def export(self) -> None:
        request = cache_pb2.ExportRequest(name="many-0-0")
        self._bundle = await asyncio.to_thread(lambda: b"".join(self._client.export(request)))

    async def import_bundle(self) -> None:
        start = cache_pb2.ImportStart(name=self._new_name())
        pieces = [self._bundle[at : at + 2**20] for at in range(0, len(self._bundle), 2**20)]
        await asyncio.to_thread(self._client.import_bundle, start, pieces)
        self._num_pins += 1

    async def acquire(self, engine: ScriptedEngine, num_keys: int) -> None:
        self._num_acquires += 1
        await engine.acquire(self._num_acquires, self._keys[:num_keys])
        await engine.release(self._num_acquires)
        await engine.barrier()

    async def touch(self, engine: ScriptedEngine, num_keys: int) -> None:
        await engine.send(touch=pb.Touch(keys=self._keys[:num_keys]))
        await engine.barrier()

    async def too_many(self, kind: str) -> None:
        """Send more keys than any prompt has; the daemon may end the session."""
        keys = [number.to_bytes(36, "big") for number in range(1, 1 + TOO_MANY_KEYS)]
        message = pb.Touch(keys=keys) if kind == "touch" else pb.Acquire(acquire_id=1, keys=keys)
        async with ScriptedEngine(self._config, LAYOUT, fingerprint=FINGERPRINT) as engine:
            await engine.send(**{kind: message})
            await asyncio.wait_for(_answered(engine), TIMEOUT_S)


async def _answered(engine: ScriptedEngine) -> None:
    try:
        await engine.barrier()
    except Exception as error:
        print(f"refused: {str(error)[:100]}")
