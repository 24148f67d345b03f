"""A daemon's hard life: engines and operators at work, kill -9 at any moment, and what must be true at the next start.

The model knows what the daemon has promised. What was asked for and not answered when the daemon died may have happened
or not; everything else must be exactly so.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig
from kvtier.core.layout import ChunkKey
from tests.fakes.fsck import assert_clean_online
from tests.fakes.operator import until
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key

CHUNK_TOKENS = 16
COMMAND = "from kvtier.daemon.main import main; main()"
MAX_PINNED = 60
Stub = cache_pb2_grpc.CacheServiceStub
State = cache_pb2.PromptStatus


async def started(config: DaemonConfig, settings: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start `kvtier-daemon` with further settings as environment variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    flags = {
        "socket": config.server.socket,
        "state-dir": config.disk.disk_dir,
        "arena-dir": config.host.arena_dir,
        "host-bytes": config.host.host_bytes,
        "disk-bytes": config.disk.disk_bytes,
        "log-level": "warning",
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    defaults = {"KVTIER_DISK_PACK_LINGER_S": "0.01", "KVTIER_HOST_PREWARM": str(config.host.prewarm)}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, *arguments), env=environment | defaults | dict(settings)
    )


@contextlib.asynccontextmanager
async def daemon(
    config: DaemonConfig, settings: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Stub]]:
    """Run a daemon until the block ends; then it is killed, if it was not before."""
    process = await started(config, settings or {})
    try:
        # A pool of its own: a shared connection is that of the daemon killed before, until somebody notices.
        own_pool = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(channel_target(config.server.socket), options=own_pool) as channel:
            stub = Stub(channel)
            await stub.GetStatus(cache_pb2.GetStatusRequest(), wait_for_ready=True, timeout=DEADLINE_S)
            yield process, stub
    finally:
        kill(process)
        await process.wait()


def kill(process: asyncio.subprocess.Process) -> None:
    """kill -9."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)


def is_gone(error: Exception) -> bool:
    """Say whether this is what a client sees of a killed daemon, and not a refusal."""
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else grpc.StatusCode.UNAVAILABLE
    return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


class MixedEngine(ScriptedEngine):
    """Half of its chunks compress, half do not; the bytes follow from the key."""

    def payload(self, key: ChunkKey, seed: int = 0) -> bytes:
        """See ScriptedEngine."""
        data = super().payload(key, seed)
        return data if key[0] % 2 else data[: len(data) // 8] * 8


@dataclass
class Prompt:
    """One prompt as its operator knows it.

    Attributes:
        keys: Its chunks; the head may be another prompt's too.
        pin_id: As acknowledged; None while no answer has come.
        pinned: Whether the promise stands; None: asked for a change, and no answer has come.
        durable: The daemon said so, and nobody has evicted it since.
        doomed: Somebody asked to forget it, and no answer has come.
    """

    name: str
    keys: tuple[ChunkKey, ...]
    first_token: int
    pin_id: str | None = None
    pinned: bool | None = None
    durable: bool = False
    doomed: bool = False

    @property
    def tokens(self) -> list[int]:
        """Token ids, of no meaning."""
        return list(range(self.first_token, self.first_token + len(self.keys) * CHUNK_TOKENS))


@dataclass
class Counts:
    """What a run has done, for its report."""

    kills: int = 0
    pins: int = 0
    stored_chunks: int = 0
    verified_chunks: int = 0
    evictions: int = 0
    unpins: int = 0
    checked_durable: int = 0


@dataclass
class Model:
    """What the daemon has promised, over all its lives."""

    rng: random.Random
    chunks_per_prompt: int = 3
    prompts: dict[str, Prompt] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    num_prompts: int = 0
    num_ordinary: int = 0

    def new_prompt(self) -> Prompt:
        """Return another prompt; one in three shares its head with an earlier one."""
        number = self.num_prompts
        self.num_prompts += 1
        name = f"p{number}"
        keys = [chunk_key((name, i)) for i in range(self.chunks_per_prompt)]
        if self.prompts and self.rng.random() < 0.33:
            keys[0] = self.rng.choice(list(self.prompts.values())).keys[0]
        prompt = self.prompts[name] = Prompt(name, tuple(keys), number * 1000)
        return prompt

    def some(self, condition: Callable[[Prompt], bool]) -> Prompt | None:
        """Return a random prompt that fulfils a condition."""
        fitting = [prompt for prompt in self.prompts.values() if condition(prompt)]
        return self.rng.choice(fitting) if fitting else None

    def evicted(self, keys: Sequence[ChunkKey]) -> None:
        """These chunks may be gone: what has one of them is not known to be durable any more."""
        gone = set(keys)
        for prompt in self.prompts.values():
            if not gone.isdisjoint(prompt.keys):
                prompt.durable = False


class Life:
    """What engines and operators do between two deaths of the daemon."""

    def __init__(self, stub: Stub, engine: MixedEngine, model: Model, *, store_all: bool) -> None:
        self.stub, self.engine, self.model, self._store_all = stub, engine, model, store_all
        self._acquire_ids = iter(range(1, 1_000_000))

    async def work(self) -> None:
        """Do one thing after the other until the daemon is gone."""
        actions: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (5, self.pin_and_store),
            (4, self.load),
            (1, self.evict),
            (1, self.unpin),
            (0.5, self.evict_host),
            (3 if self._store_all else 0, self.store_ordinary),
        ]
        weights = [weight for weight, _ in actions]
        while True:
            (action,) = self.model.rng.choices([action for _, action in actions], weights)
            await action()
            await self.note_durable()

    async def pin_and_store(self) -> None:
        """Pin a new prompt and store its chunks; with many pinned, end a promise first."""
        if sum(prompt.pinned is True for prompt in self.model.prompts.values()) >= MAX_PINNED:
            await self.unpin()
            await self.forget()
        prompt = self.model.new_prompt()
        status = await self.stub.Pin(cache_pb2.PinRequest(name=prompt.name, tokens=prompt.tokens), timeout=DEADLINE_S)
        prompt.pin_id, prompt.pinned = status.pin_id, True
        self.model.counts.pins += 1
        await self.engine.bind(prompt.pin_id, prompt.keys)
        missing = [key for key in prompt.keys if not self.engine.held.get(key)]
        await self.engine.store(missing)
        self.model.counts.stored_chunks += len(missing)

    async def store_ordinary(self) -> None:
        """Store chunks that nobody has pinned."""
        self.model.num_ordinary += 1
        keys = [chunk_key(("ordinary", self.model.num_ordinary, i)) for i in range(self.model.chunks_per_prompt)]
        await self.engine.store(keys, wait=False)
        await self.engine.barrier()
        self.model.counts.stored_chunks += len(keys)

    async def load(self) -> None:
        """Acquire something, and look at every byte that is given."""
        if (prompt := self.model.some(lambda prompt: prompt.pin_id is not None)) is not None:
            await self.verify(prompt.keys)

    async def verify(self, keys: Sequence[ChunkKey]) -> int:
        """Acquire, compare, release; return how many chunks were readable."""
        acquire_id = next(self._acquire_ids)
        leased = await self.engine.acquire(acquire_id, keys)
        for index, chunk in leased.items():
            assert self.engine.read(keys[index], chunk) == self.engine.payload(keys[index]), "wrong bytes"
        await self.engine.release(acquire_id)
        self.model.counts.verified_chunks += len(leased)
        return len(leased)

    async def unpin(self) -> None:
        """End a promise."""
        prompt = self.model.some(lambda prompt: prompt.pinned is True)
        if prompt is not None:
            prompt.pinned = None
            self.model.evicted(prompt.keys)
            await self.stub.Unpin(cache_pb2.UnpinRequest(name=prompt.name), timeout=DEADLINE_S)
            prompt.pinned = False
            self.model.counts.unpins += 1

    async def forget(self) -> None:
        """Evict a prompt that is not pinned: its name goes too."""
        prompt = self.model.some(lambda prompt: prompt.pinned is False)
        if prompt is not None:
            prompt.doomed = True
            self.model.evicted(prompt.keys)
            await self.stub.Evict(cache_pb2.EvictRequest(name=prompt.name), timeout=DEADLINE_S)
            del self.model.prompts[prompt.name]
            self.model.counts.evictions += 1

    async def evict(self) -> None:
        """Drop a pinned prompt's chunks; the pin stays."""
        prompt = self.model.some(lambda prompt: prompt.durable)
        if prompt is not None:
            self.model.evicted(prompt.keys)
            await self.stub.Evict(cache_pb2.EvictRequest(name=prompt.name, force=True), timeout=DEADLINE_S)
            self.model.counts.evictions += 1

    async def evict_host(self) -> None:
        """Empty host memory of what is on disk: nothing durable is lost by it."""
        await self.stub.Evict(
            cache_pb2.EvictRequest(all=True, tier=cache_pb2.TIER_HOST, force=True), timeout=DEADLINE_S
        )

    async def note_durable(self) -> None:
        """Take in what the daemon says is durable."""
        listed = await self.stub.ListPrompts(cache_pb2.ListPromptsRequest(), timeout=DEADLINE_S)
        for status in listed.prompts:
            prompt = self.model.prompts[status.name]
            if status.state == State.DURABLE and prompt.pinned:
                prompt.durable = True


async def check(config: DaemonConfig, life: Life) -> None:
    """Compare what a start finds with what was promised."""
    await _check_promises(life)
    await _check_usage(config, life.stub)
    await assert_clean_online(life.stub)
    status = await life.stub.GetStatus(cache_pb2.GetStatusRequest())
    assert status.counters["chunks_damaged"] == 0, status.counters


async def _check_promises(life: Life) -> None:
    model = life.model
    listed = {status.name: status for status in (await life.stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts}
    assert listed.keys() <= model.prompts.keys()
    model.prompts = {name: prompt for name, prompt in model.prompts.items() if not prompt.doomed or name in listed}
    for prompt in model.prompts.values():
        prompt.doomed = False
        if prompt.pin_id is None:
            continue  # never acknowledged
        status = listed[prompt.name]
        assert status.pin_id == prompt.pin_id
        if prompt.pinned is None:
            prompt.pinned = status.pinned
        assert status.pinned == prompt.pinned, prompt
        if prompt.durable:
            assert status.state == State.DURABLE, (prompt, status)
    durable = [prompt for prompt in model.prompts.values() if prompt.durable]
    for prompt in model.rng.sample(durable, min(len(durable), 12)):
        await until(partial(_is_readable, life, prompt))
        model.counts.checked_durable += 1


async def _is_readable(life: Life, prompt: Prompt) -> bool:
    """An acquire never waits for slots, and gets none while a dead daemon's rows and prewarming take all of them."""
    return await life.verify(prompt.keys) == len(prompt.keys)


async def _check_usage(config: DaemonConfig, stub: Stub) -> None:
    """The bytes that the daemon counts are the bytes of the files; packs may come and go meanwhile."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            status = await stub.GetStatus(cache_pb2.GetStatusRequest())
            on_disk = sum(path.stat().st_size for path in packs_of(config))
            again = await stub.GetStatus(cache_pb2.GetStatusRequest())
            if status.disk.used_bytes == again.disk.used_bytes == on_disk:
                return
            await asyncio.sleep(0.02)


def packs_of(config: DaemonConfig) -> list[Path]:
    """Return the pack files."""
    return list((config.disk.disk_dir / "packs").glob("*.kvpack"))


async def one_life(
    config: DaemonConfig, model: Model, settings: Mapping[str, str], after_s: float, *, store_all: bool
) -> None:
    """Start, check, work, and kill `after_s` after the checks."""
    async with daemon(config, settings) as (process, stub):
        engine = MixedEngine(config)
        await engine.__aenter__()
        try:
            life = Life(stub, engine, model, store_all=store_all)
            await check(config, life)
            asyncio.get_running_loop().call_later(after_s, kill, process)
            try:
                await life.work()
            except (grpc.aio.AioRpcError, EOFError, asyncio.InvalidStateError) as error:
                if not is_gone(error):
                    raise
            assert await process.wait() == -signal.SIGKILL
            model.counts.kills += 1
        finally:
            await engine.__aexit__()


async def killed_at_start(config: DaemonConfig, model: Model, settings: Mapping[str, str], after_s: float) -> None:
    """Start, and kill while it imports, recovers or has just begun to serve."""
    process = await started(config, settings)
    await asyncio.sleep(after_s)
    kill(process)
    await process.wait()
    model.counts.kills += 1


async def many_lives(
    config: DaemonConfig, model: Model, num_kills: int, settings: Mapping[str, str], *, store_all: bool
) -> None:
    """Live and die until so many kills are done, then start once more and check."""
    for folder in (config.disk.disk_dir, config.host.arena_dir):
        folder.chmod(0o700)
    while model.counts.kills < num_kills:
        await one_life(config, model, settings, model.rng.uniform(0.0, 0.8), store_all=store_all)
        if model.rng.random() < 0.25:
            await killed_at_start(config, model, settings, model.rng.uniform(0.1, 0.8))
    engine = MixedEngine(config)
    async with daemon(config, settings) as (_, stub), engine:
        await check(config, Life(stub, engine, model, store_all=store_all))
