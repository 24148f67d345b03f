"""What an operator asks of a daemon, and waiting for what it says."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import grpc

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig
from kvtier.core.layout import ChunkKey
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, wait_durable

Stub = cache_pb2_grpc.CacheServiceStub


@contextmanager
def stub_of(socket: Path) -> Iterator[Stub]:
    """Yield the stub of an operator whose calls block, for tests of other processes."""
    with grpc.insecure_channel(channel_target(socket)) as channel:
        yield Stub(channel)


async def pin(stub: Stub, name: str = "p", tokens: int = 80, first: int = 0, **fields: object) -> str:
    """Pin made-up tokens and return the pin id."""
    request = cache_pb2.PinRequest(name=name, tokens=range(first, first + tokens), **fields)  # type: ignore[arg-type]
    return str((await stub.Pin(request)).pin_id)


async def prompt_of(stub: Stub, name: str = "p") -> cache_pb2.PromptStatus:
    """Return a prompt's status."""
    status: cache_pb2.PromptStatus = await stub.GetPrompt(cache_pb2.GetPromptRequest(name=name))
    return status


async def update(stub: Stub, name: str = "p", **how: object) -> cache_pb2.PromptStatus:
    """Change how a prompt is pinned."""
    request = cache_pb2.UpdatePromptRequest(name=name, **how)  # type: ignore[arg-type]
    status: cache_pb2.PromptStatus = await stub.UpdatePrompt(request)
    return status


async def apply(
    stub: Stub,
    *pins: cache_pb2.PinRequest,
    unpin: Sequence[str] = (),
    dry_run: bool = False,
    expected: cache_pb2.ExpectedPin | None = None,
) -> cache_pb2.ApplyResponse:
    """Pin prompts and end pins at once; `expected`: of each name."""
    messages = [cache_pb2.ApplyMessage(start=cache_pb2.ApplyStart(dry_run=dry_run))]
    messages += [cache_pb2.ApplyMessage(pin=pin, expected=expected) for pin in pins]
    messages += [cache_pb2.ApplyMessage(unpin=name, expected=expected) for name in unpin]
    response: cache_pb2.ApplyResponse = await stub.ApplyPrompts(iter(messages))
    return response


async def unpin(stub: Stub, name: str = "p") -> None:
    """End a promise."""
    await stub.Unpin(cache_pb2.UnpinRequest(name=name))


async def evict(
    stub: Stub, name: str = "p", *, force: bool = False, tier: cache_pb2.Tier = cache_pb2.TIER_ANY
) -> cache_pb2.EvictResponse:
    """Drop a prompt's chunks; those of all prompts when the name is empty."""
    request = cache_pb2.EvictRequest(name=name, all=not name, force=force, tier=tier)
    done: cache_pb2.EvictResponse = await stub.Evict(request)
    return done


async def status_of(stub: Stub) -> cache_pb2.DaemonStatus:
    """Return the daemon's status."""
    status: cache_pb2.DaemonStatus = await stub.GetStatus(cache_pb2.GetStatusRequest())
    return status


async def on_disk(stub: Stub, num_chunks: int) -> None:
    """Wait until exactly this many chunks are on disk."""

    async def written() -> bool:
        return (await status_of(stub)).disk.num_chunks == num_chunks

    await until(written)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.02)


async def reached(event: Event) -> None:
    """Wait for a worker thread."""
    assert await asyncio.to_thread(event.wait, DEADLINE_S)


async def make_durable(stub: Stub, engine: ScriptedEngine, keys: Sequence[ChunkKey], name: str = "p") -> str:
    """Pin a prompt, bind it to these chunks, store them and wait until they are durable; returns the pin id."""
    pin_id = await pin(stub, name)
    await engine.bind(pin_id, keys)
    await engine.store(keys)
    await wait_durable(stub, name)
    return pin_id


async def store_last_apart(stub: Stub, engine: ScriptedEngine, keys: Sequence[ChunkKey], name: str = "p") -> None:
    """Store a bound prompt's chunks so that the last one has a pack of its own, and wait until all are durable."""
    await engine.store(keys[:-1])

    async def on_disk() -> bool:
        return (await status_of(stub)).disk.num_chunks == len(keys) - 1

    await until(on_disk)
    await engine.store(keys[-1:])
    await wait_durable(stub, name)


def pack_of(config: DaemonConfig, key: ChunkKey) -> Path:
    """Return the pack that holds a chunk."""
    (pack,) = (path for path in config.disk.disk_dir.rglob("*.kvpack") if key.hex().encode() in path.read_bytes())
    return pack
