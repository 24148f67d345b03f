"""An engine without vLLM: a real gRPC session that maps the real arena, driven step by step."""

import asyncio
import ctypes
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import grpc

from kvtier._pb import cache_pb2, cache_pb2_grpc, engine_pb2_grpc
from kvtier._pb import engine_pb2 as pb
from kvtier.client.address import channel_target
from kvtier.client.arena_map import ArenaMap, SessionLockHolder
from kvtier.config import CacheConfig, DaemonConfig, DiskConfig, HostConfig, HttpConfig, ServerConfig
from kvtier.config.model import OFF, StoreMode
from kvtier.core.arena_format import HEADER_BYTES, key_tag_of, num_slots_within
from kvtier.core.layout import ChunkKey, GroupLayout, KVLayout, group_idx_of
from kvtier.rpc.server import serve

DEADLINE_S = 30.0
ONE_GROUP = KVLayout(
    num_ranks=1,
    rank_bytes=8192,
    num_writers=1,
    groups=(GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=6000),),
)


def host_bytes_for(num_rows: int, *, num_arenas: int = 1, layout: KVLayout = ONE_GROUP) -> int:
    """Return the host.bytes of this many rows, over all arenas, and of the slot tables of this many arenas."""
    host_bytes = num_rows * layout.row_bytes
    while num_slots_within(host_bytes, layout.row_bytes, layout.num_ranks) < num_rows:
        host_bytes += HEADER_BYTES
    return host_bytes + (num_arenas - 1) * (host_bytes - num_rows * layout.row_bytes)


def config_in(
    folder: Path,
    *,
    host_bytes: int = 1 << 20,
    disk_bytes: int = 1 << 30,
    preallocated_bytes: int = 0,
    store: StoreMode = "pinned",
    **disk: Any,
) -> DaemonConfig:
    """A small daemon whose files are all under `folder`, without preallocated rows unless asked for."""
    for name in ("arena", "disk"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    return DaemonConfig(
        server=ServerConfig(socket=folder / "d.sock", drain_timeout_s=5),
        host=HostConfig(
            arena_dir=folder / "arena", host_bytes=host_bytes, preallocated_bytes=preallocated_bytes, prefetch=False
        ),
        disk=DiskConfig(
            disk_dir=folder / "disk",
            disk_bytes=disk_bytes,
            **{"pack_linger_s": 0.01, "compression": "always", **disk},
        ),
        cache=CacheConfig(store=store),
        http=HttpConfig(listen=OFF),
    )


@asynccontextmanager
async def running(config: DaemonConfig) -> AsyncIterator[cache_pb2_grpc.CacheServiceStub]:
    """Run a daemon in this loop and yield an operator's stub."""
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(serve(config, stop=stop, ready=ready.set))
    try:
        waiter = asyncio.create_task(ready.wait())
        await asyncio.wait({task, waiter}, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if task.done():
            task.result()
        async with grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel:
            yield cache_pb2_grpc.CacheServiceStub(channel)
    finally:
        stop.set()
        await asyncio.wait_for(task, DEADLINE_S)


def chunk_key(name: object, group_idx: int = 0) -> ChunkKey:
    """A key of the real form."""
    return hashlib.sha256(repr(name).encode()).digest() + group_idx.to_bytes(4, "big")


def hello_message(layout: KVLayout | pb.KVLayout = ONE_GROUP, **fields: Any) -> pb.Hello:
    """A Hello that a daemon accepts, but for what the fields say."""
    usual: dict[str, Any] = {
        "protocol": 1,
        "engine_id": "engine",
        "pid": 1,
        "model_names": ["model"],
        "fingerprint": {"weights": "1"},
        "store_credits": 4,
        "layout": _layout_message(layout) if isinstance(layout, KVLayout) else layout,
    }
    return pb.Hello(**usual | fields)


def residencies(update: pb.AcquireUpdate) -> list[pb.ChunkResidency]:
    """All chunks that an update names, also those that are resident, in one form."""
    resident = update.resident
    places = zip(resident.indexes, resident.slots, resident.generations, strict=True)
    host = [
        pb.ChunkResidency(index=index, state=pb.ChunkResidency.HOST, slot=pb.SlotRef(slot=slot, generation=generation))
        for index, slot, generation in places
    ]
    return [*host, *update.chunks]


def _layout_message(layout: KVLayout) -> pb.KVLayout:
    groups = [pb.KVGroup(**asdict(group)) for group in layout.groups]
    return pb.KVLayout(
        num_ranks=layout.num_ranks, rank_bytes=layout.rank_bytes, num_writers=layout.num_writers, groups=groups
    )


class ScriptedEngine:
    """One session. Messages that are not awaited by kind are kept in order."""

    def __init__(self, config: DaemonConfig, layout: KVLayout = ONE_GROUP, **hello: Any) -> None:
        self.layout = layout
        self._config = config
        self.hello = hello_message(layout, **hello)
        self._unread: list[pb.DaemonMessage] = []
        self.credits: list[pb.SlotRef] = []
        self.held: dict[bytes, bool] = {}

    async def __aenter__(self) -> Self:
        # A pool of its own: a shared connection is that of a daemon killed before, until somebody notices.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
        self._channel = grpc.aio.insecure_channel(channel_target(self._config.server.socket), options=options)
        self._call = engine_pb2_grpc.EngineServiceStub(self._channel).Attach()
        try:
            await self._attach()
        except BaseException:
            await self.disconnect()  # no one else does: `async with` leaves only what it has entered
            raise
        return self

    async def _attach(self) -> None:
        await self.send(hello=self.hello)
        self.welcome = (await self.receive("welcome")).welcome
        self.arena = ArenaMap(self.welcome.arena.path, self.welcome.arena.arena_id)
        self.lock = SessionLockHolder(self.welcome.lock_path)
        self.lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.lock.release()
        await self.disconnect()
        if hasattr(self, "arena"):
            self.arena.close()

    async def disconnect(self) -> None:
        """Cut the stream; the lock stays as it is."""
        self._call.cancel()
        await self._channel.close(None)

    async def send(self, **kind: Any) -> None:
        """Send one message."""
        await self.send_together(pb.EngineMessage(**kind))

    async def send_together(self, *messages: pb.EngineMessage) -> None:
        """Send several messages at once."""
        await self._call.write(pb.EngineMessages(messages=messages))

    async def receive(self, *kinds: str) -> pb.DaemonMessage:
        """Return the next message of a kind; credits and held changes on the way are taken in."""
        for message in self._unread:
            if message.WhichOneof("kind") in kinds:
                self._unread.remove(message)
                return message
        while True:
            received = await asyncio.wait_for(self._call.read(), DEADLINE_S)
            if received is grpc.aio.EOF:  # type: ignore[attr-defined]
                code, details = await self._call.code(), await self._call.details()
                raise EOFError(f"{code}: {details}")
            found: list[pb.DaemonMessage] = []
            for message in received.messages:
                self._take_in(message)
                is_first = not found and message.WhichOneof("kind") in kinds
                (found if is_first else self._unread).append(message)
            if found:
                return found[0]

    async def receive_pins(self) -> list[pb.Pin]:
        """The pins of the next message that has some."""
        message = await self.receive("pin_added", "pins_added")
        return [message.pin_added.pin] if message.HasField("pin_added") else list(message.pins_added.pins)

    async def cut(self) -> None:
        """Wait until the daemon has ended the stream.

        What was on its way to the daemon then breaks the connection before the last word arrives, as any client sees.
        """
        try:
            await self.receive("pong")
        except EOFError:
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return
        raise AssertionError("the daemon goes on")

    def _take_in(self, message: pb.DaemonMessage) -> None:
        if message.WhichOneof("kind") == "store_credits":
            self.credits += message.store_credits.slots
        if message.WhichOneof("kind") == "chunks_held":
            held = message.chunks_held
            keys = [key for pin in self.welcome.pins if pin.pin_id in held.pin_ids for key in pin.keys]
            self.held |= dict.fromkeys([*held.keys, *keys], held.held)

    async def bind(self, pin_id: str, keys: Sequence[ChunkKey]) -> None:
        """Bind a pin and wait for both answers."""
        covered_tokens = 16 * sum(group_idx_of(key) == 0 for key in keys)
        await self.send(bind_pin=pb.BindPin(pin_id=pin_id, keys=keys, covered_tokens=covered_tokens))
        await self.receive("chunks_held")
        await self.receive("chunks_held")
        while not self.held.keys() >= set(keys):  # what another task announced meanwhile was counted as an answer
            await self.receive("chunks_held")

    async def wait_held(self, keys: Sequence[ChunkKey], *, held: bool = True) -> None:
        """Wait until the daemon said so of each key."""
        while any(self.held.get(key) is not held for key in keys):
            await self.receive("chunks_held")

    def payload(self, key: ChunkKey, seed: int = 0) -> bytes:
        """Bytes that a worker would hold for the chunk (of each writer)."""
        useful_bytes = self.layout.group(group_idx_of(key)).useful_bytes
        return hashlib.shake_128(key + bytes([seed])).digest(useful_bytes)

    async def take_credit(self) -> pb.SlotRef:
        """Return a granted slot, waiting for one."""
        while not self.credits:
            await self.receive("store_credits")
        return self.credits.pop(0)

    def write(self, key: ChunkKey, ref: pb.SlotRef, *, stamp_generation: int | None = None) -> None:
        """What all ranks do: copy and stamp."""
        data = self.payload(key)
        for rank in range(self.layout.num_writers):
            address = self.arena.row_address(ref.slot) + rank * self.layout.rank_bytes
            ctypes.memmove(address, data, len(data))
            generation = ref.generation if stamp_generation is None else stamp_generation
            self.arena.stamp(ref.slot, rank, key_tag_of(key), generation, len(data))

    async def store(self, keys: Sequence[ChunkKey], *, wait: bool = True) -> None:
        """Store chunks as an engine does."""
        for key in keys:
            ref = await self.take_credit()
            stores = [pb.StoreSlot(key=key, slot=ref)]
            await self.send(store_begin=pb.StoreBegin(stores=stores))
            self.write(key, ref)
            await self.send(store_done=pb.StoreDone(stores=stores))
        if wait:
            await self.wait_held(keys)

    async def acquire(self, acquire_id: int, keys: Sequence[ChunkKey]) -> dict[int, pb.ChunkResidency]:
        """Acquire and wait for all promotions; returns what is readable, by index."""
        await self.send(acquire=pb.Acquire(acquire_id=acquire_id, keys=keys))
        chunks: dict[int, pb.ChunkResidency] = {}
        while True:
            update = (await self.receive("acquire_update")).acquire_update
            if update.acquire_id != acquire_id:
                continue
            chunks |= {chunk.index: chunk for chunk in residencies(update)}
            if not any(chunk.state == pb.ChunkResidency.PROMOTING for chunk in chunks.values()):
                return {i: chunk for i, chunk in chunks.items() if chunk.state == pb.ChunkResidency.HOST}

    def read(self, key: ChunkKey, chunk: pb.ChunkResidency) -> bytes:
        """What a worker reads of a leased chunk's first rank."""
        useful_bytes = self.layout.group(group_idx_of(key)).useful_bytes
        return ctypes.string_at(self.arena.row_address(chunk.slot.slot), useful_bytes)

    async def verify(self, acquire_id: int, keys: Sequence[ChunkKey]) -> list[int]:
        """Acquire, compare every byte that is readable, release; return the indexes that were."""
        leased = await self.acquire(acquire_id, keys)
        for index, chunk in leased.items():
            assert self.read(keys[index], chunk) == self.payload(keys[index]), "wrong bytes"
        await self.release(acquire_id)
        return sorted(leased)

    async def release(self, acquire_id: int) -> None:
        """End all leases of an acquire."""
        await self.send(release=pb.Release(acquire_id=acquire_id, all=True))

    async def wait_inventory(self) -> list[int]:
        """Wait until the daemon has named everything that it holds; return how many chunks each message named."""
        sizes: list[int] = []
        while True:
            held = (await self.receive("chunks_held")).chunks_held
            sizes.append(len(held.keys))
            if held.complete:
                return sizes

    async def barrier(self) -> None:
        """Wait until the daemon has dealt with what was sent before, but for what can wait: see `all_done`."""
        await self.send(ping=pb.Ping(id=7))
        await self.receive("pong")

    async def all_done(self) -> None:
        """Wait until the daemon has dealt with all that was sent before: a store overtakes nothing that can wait."""
        key = chunk_key(("all_done", object()))
        await self.store([key], wait=False)
        while key not in self.held:
            await self.receive("chunks_held")


async def wait_durable(stub: cache_pb2_grpc.CacheServiceStub, name: str) -> cache_pb2.PromptStatus:
    """Wait until a prompt is durable and return its status."""

    async def watch() -> cache_pb2.PromptStatus:
        status: cache_pb2.PromptStatus
        async for status in stub.WatchPrompt(cache_pb2.GetPromptRequest(name=name)):
            if status.state == cache_pb2.PromptStatus.DURABLE:
                return status
        raise EOFError

    return await asyncio.wait_for(watch(), DEADLINE_S)
