"""A daemon's hard life: engines and operators at work, kill -9 at any moment, and what must be true at the next start.

The model knows what the daemon has promised. What was asked for and not answered when the daemon died may have happened
or not; everything else must be exactly so.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import grpc

from kvtier._pb import cache_pb2
from kvtier.config import DaemonConfig
from kvtier.core.fingerprint import namespace_id
from kvtier.core.layout import ChunkKey
from kvtier.disk.packs.pack_tier import PackTier
from tests.fakes.daemon_process import daemon, is_gone, kill, started
from tests.fakes.fsck import assert_clean, assert_clean_online
from tests.fakes.operator import Stub, until
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key
from tests.fault.chaos_model import SPACES, Model, Prompt

MAX_PINNED = 60
State = cache_pb2.PromptStatus


class MixedEngine(ScriptedEngine):
    """Half of its chunks compress, half do not; the bytes follow from key and space."""

    def __init__(self, config: DaemonConfig, space: int) -> None:
        """An engine of one of `SPACES`."""
        super().__init__(config, model_names=[SPACES[space]], fingerprint=fingerprint_of(space))
        self.space = space

    def payload(self, key: ChunkKey, seed: int = 0) -> bytes:
        """See ScriptedEngine."""
        data = super().payload(key, self.space)
        return data if key[0] % 2 else data[: len(data) // 8] * 8


def fingerprint_of(space: int) -> dict[str, str]:
    """Return what makes the namespaces differ."""
    return {"weights": str(space)}


class Life:
    """What engines and operators do between two ends of the daemon.

    One thing is done after the other, so that the model follows; but loads of a third engine run beside all of it.
    """

    def __init__(self, stub: Stub, engines: Sequence[MixedEngine], model: Model, *, store_all: bool) -> None:
        self.stub, self.engines, self.model, self._store_all = stub, engines, model, store_all
        self._acquire_ids = iter(range(1, 1_000_000))

    async def work(self) -> None:
        """Do one thing after the other until the daemon is gone."""
        actions: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (5, self.pin_and_store),
            (4, self.load),
            (1, self.evict),
            (1, self.unpin),
            (0.5, self.evict_host),
            (0.5, self.export),
            (0.5, self.forget),
            (0.5, self.import_bundle),
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
        engine = self.engines[prompt.space]
        request = cache_pb2.PinRequest(name=prompt.name, tokens=prompt.tokens, model=SPACES[prompt.space])
        status = await self.stub.Pin(request, timeout=DEADLINE_S)
        prompt.pin_id, prompt.pinned = status.pin_id, True
        self.model.counts.pins += 1
        await engine.bind(prompt.pin_id, prompt.keys)
        missing = [key for key in prompt.keys if not engine.held.get(key)]
        await engine.store(missing)
        self.model.counts.stored_chunks += len(missing)

    async def store_ordinary(self) -> None:
        """Store chunks that are not pinned."""
        self.model.num_ordinary += 1
        engine = self.model.rng.choice(self.engines[: len(SPACES)])
        keys = [chunk_key(("ordinary", self.model.num_ordinary, i)) for i in range(self.model.chunks_per_prompt)]
        await engine.store(keys, wait=False)
        await engine.barrier()
        self.model.counts.stored_chunks += len(keys)

    async def load(self) -> None:
        """Acquire something, and look at every byte that is given."""
        if (prompt := self.model.some(lambda prompt: prompt.pin_id is not None)) is not None:
            await self.verify(prompt)

    async def verify(self, prompt: Prompt) -> int:
        """Load a prompt; return how many of its chunks were readable."""
        num_read = len(await self.engines[prompt.space].verify(next(self._acquire_ids), prompt.keys))
        self.model.counts.verified_chunks += num_read
        return num_read

    async def keep_loading(self, reader: MixedEngine, rng: random.Random) -> None:
        """Load random prompts of the reader's space until the daemon is gone."""
        for acquire_id in range(1, 1_000_000):
            prompts = [prompt for prompt in self.model.prompts.values() if prompt.space == reader.space]
            keys = rng.choice(prompts).keys if prompts else [chunk_key("nothing")]
            self.model.counts.verified_chunks += len(await reader.verify(acquire_id, keys))
            await asyncio.sleep(0.005)

    async def unpin(self) -> None:
        """End a promise."""
        prompt = self.model.some(lambda prompt: prompt.pinned is True)
        if prompt is not None:
            prompt.pinned = None
            self.model.evicted(prompt.places)
            await self.stub.Unpin(cache_pb2.UnpinRequest(name=prompt.name), timeout=DEADLINE_S)
            prompt.pinned = False
            self.model.counts.unpins += 1

    async def forget(self) -> None:
        """Evict a prompt that is not pinned: its name goes too."""
        prompt = self.model.some(lambda prompt: prompt.pinned is False)
        if prompt is not None:
            prompt.removal_pending = True
            self.model.evicted(prompt.places)
            await self.stub.Evict(cache_pb2.EvictRequest(name=prompt.name), timeout=DEADLINE_S)
            del self.model.prompts[prompt.name]
            self.model.counts.evictions += 1

    async def evict(self) -> None:
        """Drop a pinned prompt's chunks; the pin stays."""
        prompt = self.model.some(lambda prompt: prompt.durable)
        if prompt is not None:
            self.model.evicted(prompt.places)
            await self.stub.Evict(cache_pb2.EvictRequest(name=prompt.name, force=True), timeout=DEADLINE_S)
            self.model.counts.evictions += 1

    async def evict_host(self) -> None:
        """Empty host memory of what is on disk: nothing durable is lost by it."""
        await self.stub.Evict(
            cache_pb2.EvictRequest(all=True, tier=cache_pb2.TIER_HOST, force=True), timeout=DEADLINE_S
        )

    async def export(self) -> None:
        """Take a durable prompt along."""
        prompt = self.model.some(lambda prompt: prompt.durable and prompt.pinned is True)
        if prompt is not None:
            request = cache_pb2.ExportRequest(name=prompt.name)
            data = b"".join([piece.data async for piece in self.stub.Export(request, timeout=DEADLINE_S)])
            self.model.keep_bundle(prompt, data)
            self.model.counts.exports += 1

    async def import_bundle(self) -> None:
        """Bring a prompt back that was exported, and forgotten since: it is durable when this returns."""
        gone = [name for name in self.model.bundles if name not in self.model.prompts]
        if not gone:
            return
        prompt, data = self.model.bundles[self.model.rng.choice(gone)]
        prompt = self.model.prompts[prompt.name] = Prompt(prompt.name, prompt.space, prompt.keys, prompt.first_token)

        async def messages() -> AsyncIterator[cache_pb2.ImportMessage]:
            yield cache_pb2.ImportMessage(start=cache_pb2.ImportStart())
            for at in range(0, len(data), 10_000):
                yield cache_pb2.ImportMessage(piece=cache_pb2.BundlePiece(data=data[at : at + 10_000]))

        try:
            status = await self.stub.Import(messages(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            del self.model.prompts[prompt.name]
            return
        prompt.pin_id, prompt.pinned, prompt.durable = status.pin_id, True, True
        self.model.counts.imports += 1

    async def note_durable(self) -> None:
        """Take in what the daemon says is durable."""
        listed = await self.stub.ListPrompts(cache_pb2.ListPromptsRequest(), timeout=DEADLINE_S)
        for status in listed.prompts:
            prompt = self.model.prompts[status.name]
            if status.state == State.DURABLE and prompt.pinned:
                prompt.durable = True


async def check(config: DaemonConfig, life: Life) -> None:
    """Compare what a start finds with what was promised."""
    was_damaged, life.model.is_damaged = life.model.is_damaged, False
    await _check_promises(life)
    if was_damaged:
        await _repair(life)
    await _check_usage(config, life.stub)
    await assert_clean_online(life.stub)
    status = await life.stub.GetStatus(cache_pb2.GetStatusRequest())
    assert was_damaged or status.counters["damaged_chunks_disk"] == 0, status.counters


async def _repair(life: Life) -> None:
    """Meet the damage as an engine does, and then have it put right."""
    for prompt in life.model.rng.sample(list(life.model.prompts.values()), min(len(life.model.prompts), 12)):
        await life.verify(prompt)
    await life.stub.Fsck(cache_pb2.FsckRequest(repair=True, deep=True))


async def _check_promises(life: Life) -> None:
    model = life.model
    listed = {status.name: status for status in (await life.stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts}
    assert listed.keys() <= model.prompts.keys()
    model.prompts = {
        name: prompt for name, prompt in model.prompts.items() if not prompt.removal_pending or name in listed
    }
    for prompt in model.prompts.values():
        prompt.removal_pending = False
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
    """An acquire never waits for slots; it gets none while previous daemons' rows and prefetching take all of them."""
    return await life.verify(prompt) == len(prompt.keys)


async def _check_usage(config: DaemonConfig, stub: Stub) -> None:
    """The bytes that the daemon counts are the bytes of the files; packs may come and go meanwhile."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            status = await stub.GetStatus(cache_pb2.GetStatusRequest())
            try:
                on_disk = sum(path.stat().st_size for path in packs_of(config))
            except FileNotFoundError:
                continue
            again = await stub.GetStatus(cache_pb2.GetStatusRequest())
            if status.disk.used_bytes == again.disk.used_bytes == on_disk:
                return
            await asyncio.sleep(0.02)


def packs_of(config: DaemonConfig) -> list[Path]:
    """Return the pack files."""
    return list((config.disk.disk_dir / "packs").glob("*.kvpack"))


@contextlib.asynccontextmanager
async def attached(config: DaemonConfig) -> AsyncIterator[list[MixedEngine]]:
    """Run an engine in each space, and one more in the first: the reader."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(MixedEngine(config, space)) for space in (*range(len(SPACES)), 0)]


async def one_life(
    config: DaemonConfig, model: Model, settings: Mapping[str, str], how: signal.Signals, *, store_all: bool
) -> None:
    """Start, check, work, and end it by a signal some time after the checks."""
    async with daemon(config, settings) as (process, stub), attached(config) as engines:
        life = Life(stub, engines, model, store_all=store_all)
        await check(config, life)
        asyncio.get_running_loop().call_later(model.rng.uniform(0.0, 0.8), process.send_signal, how)
        reader = asyncio.create_task(until_gone(life.keep_loading(engines[-1], random.Random(model.rng.random()))))
        await until_gone(life.work())
        await reader
        assert await process.wait() == (-how if how is signal.SIGKILL else 0)
        model.counts.kills += how is signal.SIGKILL
        model.counts.stops += how is signal.SIGTERM


async def until_gone(work: Awaitable[None]) -> None:
    """Await work that ends with the daemon."""
    try:
        await work
    except (grpc.aio.AioRpcError, EOFError, asyncio.InvalidStateError) as error:
        if not is_gone(error):
            raise


async def killed_at_start(config: DaemonConfig, model: Model, settings: Mapping[str, str], after_s: float) -> None:
    """Start, and kill while it imports, recovers or has just begun to serve."""
    process = await started(config, settings)
    await asyncio.sleep(after_s)
    kill(process)
    await process.wait()
    model.counts.kills += 1


def reboot(config: DaemonConfig, model: Model) -> None:
    """Memory is gone, the disk is not."""
    for path in config.host.arena_dir.iterdir():
        path.unlink()
    model.counts.reboots += 1


def damage_a_pack(config: DaemonConfig, model: Model) -> None:
    """Damage one pack of a daemon that is down: what was promised of its chunks is void."""
    packs = sorted(packs_of(config))
    if not packs:
        return
    victim = model.rng.choice(packs)
    other = model.rng.choice(packs)
    kind = model.rng.choice(["flip", "flip", "truncate", "empty", "missing", "swap"])
    for path in {victim, other} if kind == "swap" else {victim}:
        record = PackTier(victim.parent).read_record(path.stem)
        space = [namespace_id(fingerprint_of(space)) for space in range(len(SPACES))].index(record.namespace_id)
        model.evicted({(space, chunk.key) for chunk in record.chunks})
    _damage(model.rng, kind, victim, other)
    model.is_damaged = True
    model.counts.damages += 1


def _damage(rng: random.Random, kind: str, victim: Path, other: Path) -> None:
    match kind:
        case "flip":
            data = bytearray(victim.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            victim.write_bytes(data)
        case "truncate":
            os.truncate(victim, rng.randrange(victim.stat().st_size))
        case "empty":
            os.truncate(victim, 0)
        case "missing":
            victim.unlink()
        case "swap":
            one, two = victim.read_bytes(), other.read_bytes()
            victim.write_bytes(two)
            other.write_bytes(one)


async def many_lives(
    config: DaemonConfig,
    model: Model,
    num_lives: int,
    settings: Mapping[str, str],
    *,
    store_all: bool,
    damage_ratio: float = 0.0,
) -> None:
    """Live and die until this many lives are over, then start once more and check.

    On a busy machine little happens in a life: up to twice as many more follow, until enough was checked.
    """
    rng, counts = model.rng, model.counts
    while counts.lives < num_lives or (counts.checked_durable <= num_lives and counts.lives < 3 * num_lives):
        how = signal.SIGTERM if rng.random() < 0.2 else signal.SIGKILL
        keep_arena = {"KVTIER_HOST_KEEP_ARENA": rng.choice(["true", "false"])}
        await one_life(config, model, {**settings, **keep_arena}, how, store_all=store_all)
        if how is signal.SIGTERM:
            assert_clean(config.disk.disk_dir)
        if rng.random() < 0.15:
            reboot(config, model)
        if rng.random() < damage_ratio:
            damage_a_pack(config, model)
        if rng.random() < 0.25:
            await killed_at_start(config, model, settings, rng.uniform(0.1, 0.8))
    async with daemon(config, settings) as (_, stub), attached(config) as engines:
        await check(config, Life(stub, engines, model, store_all=store_all))
