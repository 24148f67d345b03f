"""kill -9 of a real daemon while an engine stores and loads: its memory is served again, never a wrong byte, no leak.

Between kill and restart the test looks into the arena file, and sometimes damages it.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.core.arena_format import key_tag_of, mark_of
from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.folders import LOCK_NAME
from tests.fakes.daemon_process import daemon, kill
from tests.fakes.left_arena import LeftArena, page_bytes
from tests.fakes.operator import Stub, pin, status_of, until
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key, config_in

# More with KVTIER_WARM_KILLS=50.
NUM_KILLS = int(os.environ.get("KVTIER_WARM_KILLS", "20"))
CHUNKS_PER_PIN = 3
LAYOUT = KVLayout(
    num_ranks=1,
    rank_bytes=24576,
    num_writers=1,
    groups=(GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=20_000),),
)

HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


@dataclass
class Model:
    """What was bound, and what the last look into the arena file promised."""

    rng: random.Random
    bound: list[bytes] = field(default_factory=list)
    num_pins: int = 0
    num_recovered: int = 0
    num_rejected: int = 0

    def has_seen_enough(self) -> bool:
        return self.num_recovered > 5 * NUM_KILLS and self.num_rejected > NUM_KILLS // 2


@dataclass(frozen=True)
class Left:
    """What a crash left in the arena.

    Attributes:
        good: Chunks whose rows are whole.
        num_bad: Rows that state a chunk and were damaged by the test.
    """

    good: tuple[bytes, ...]
    num_bad: int


def look(config: DaemonConfig, model: Model, payload: ScriptedEngine) -> Left:
    """Read the arena that was left; every row with a valid mark has the bytes of its chunk, whatever the moment."""
    tags = {key_tag_of(key): key for key in model.bound}
    with LeftArena(config) as left:
        row_of = {}
        for entry in left.committed():
            key = tags[entry.key_tag]
            start = left.geometry.row_offset(entry.slot)
            data = payload.payload(key)
            assert bytes(left._bytes[start : start + len(data)]) == data, "a valid mark over other bytes"
            row_of[key] = entry.slot
        bad = damage(left, model.rng, row_of)
    return Left(tuple(key for key in row_of if key not in bad), len(bad))


def damage(left: LeftArena, rng: random.Random, row_of: dict[bytes, int]) -> set[bytes]:
    """Damage up to three rows, in ways that a crash, a defect or bad memory would; return their chunks."""
    bad = set(rng.sample(sorted(row_of), min(len(row_of), rng.randrange(4))))
    for key in bad:
        slot, geometry = row_of[key], left.geometry
        match rng.randrange(4):
            case 0:
                left.flip(slot, rng.randrange(6000))
            case 1:  # given out again, and the mark of before is still there
                left.words[geometry.generation_word(slot)] += 1
                left.write(slot, rng.randbytes(6000))
            case 2:  # the checksum of another time
                left.words[geometry.checksum_word(slot)] ^= 1 << rng.randrange(64)
            case 3:  # a mark that fits its words, over bytes that do not fit the mark
                left.write(slot, rng.randbytes(6000))
                generation = left.words[geometry.generation_word(slot)]
                checksum = left.words[geometry.checksum_word(slot)]
                left.words[geometry.mark_word(slot)] = mark_of(slot, key_tag_of(key), generation, checksum)
    return bad


async def recovered(stub: Stub, left: Left) -> None:
    """Wait until the daemon has dealt with what was left, as it should."""

    async def done() -> bool:
        counters = (await status_of(stub)).counters
        return (
            counters.get("orphan_slots_recovered", 0) + counters.get("orphan_slots_rejected", 0)
            >= len(left.good) + left.num_bad
        )

    await until(done)
    counters = (await status_of(stub)).counters
    assert counters.get("orphan_slots_recovered", 0) == len(left.good)
    assert counters.get("orphan_slots_rejected", 0) == left.num_bad


def settings_of(config: DaemonConfig) -> dict[str, str]:
    return {"TUNED_HOST_PREALLOCATED_BYTES": str(config.host.preallocated_bytes)}


async def no_leak(config: DaemonConfig, stub: Stub) -> None:
    """Without an engine: pages of what is served and of preallocated rows; files: the arena and the daemon's lock."""
    preallocated_rows = config.host.preallocated_bytes // LAYOUT.row_bytes

    async def returned() -> bool:
        with LeftArena(config) as left:
            num_preallocated = left.num_backed() - (await status_of(stub)).host.num_chunks
            expected = left.geometry.rows_offset + left.num_backed() * LAYOUT.row_bytes
            files = {path.name for path in config.host.arena_dir.iterdir()}
            # All at once: rows are backed and filled in the background meanwhile, and marked before they have pages.
            found = (num_preallocated, page_bytes(left.path) - expected, files ^ {LOCK_NAME, left.path.name})
        seen.append(found)
        return 0 <= num_preallocated <= preallocated_rows and found[1:] == (0, set())

    seen: list[tuple[int, int, set[str]]] = []
    try:
        await until(returned)
    except TimeoutError:
        pytest.fail(f"rows with pages and no chunk, bytes too many, files too many or missing: {seen[-1:]}")


async def read_recovered(stub: Stub, engine: ScriptedEngine, keys: Sequence[bytes]) -> None:
    """Adopted chunks are byte-equal and come without a disk read."""
    for number, key in enumerate(keys):
        chunks = await engine.acquire(1000 + number, [key])
        assert engine.read(key, chunks[0]) == engine.payload(key)
        assert not chunks[0].from_disk
        await engine.release(1000 + number)
    counters = (await status_of(stub)).counters
    assert counters.get("promoted_chunks", 0) == counters.get("hit_chunks_disk", 0) == 0


async def work(stub: Stub, engine: ScriptedEngine, model: Model) -> None:
    """Pin, store, load and evict, with more chunks than rows, until the daemon is gone."""
    acquire_id = 0
    while True:
        name, acquire_id = f"p{model.num_pins}", acquire_id + 1
        keys = [chunk_key((name, number)) for number in range(CHUNKS_PER_PIN)]
        pin_id = await pin(stub, name, tokens=CHUNKS_PER_PIN * 16, first=1000 * model.num_pins)
        model.num_pins += 1
        model.bound += keys
        await engine.bind(pin_id, keys)
        await engine.store(keys)
        asked = model.rng.sample(model.bound, min(8, len(model.bound)))
        chunks = await engine.acquire(acquire_id, asked)
        for index, chunk in chunks.items():
            assert engine.read(asked[index], chunk) == engine.payload(asked[index])
        await engine.release(acquire_id)
        if model.rng.random() < 0.2:
            victim = f"p{model.rng.randrange(model.num_pins)}"
            await stub.Evict(cache_pb2.EvictRequest(name=victim, force=True), timeout=DEADLINE_S)


async def one_life(config: DaemonConfig, model: Model, left: Left | None) -> Left:
    """Start, compare with what was left, work, be killed, and look at what is left now."""
    async with daemon(config, settings_of(config)) as (process, stub):
        if left is not None:
            await recovered(stub, left)
            await no_leak(config, stub)
            model.num_recovered += len(left.good)
            model.num_rejected += left.num_bad
        engine = await ScriptedEngine(config, LAYOUT, store_credits=6).__aenter__()
        try:
            await read_recovered(stub, engine, left.good if left is not None else ())
            asyncio.get_running_loop().call_later(model.rng.uniform(0.05, 0.5), kill, process)
            with pytest.raises((grpc.aio.AioRpcError, EOFError, asyncio.InvalidStateError)):
                await work(stub, engine, model)
            assert await process.wait() == -signal.SIGKILL
            return look(config, model, engine)
        finally:
            await engine.__aexit__()


@pytest.fixture(params=[0, 1 << 20], ids=["no preallocated rows", "preallocated rows"])
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DaemonConfig]:
    """The arena on a real tmpfs, with fewer rows (42) than there will be chunks, so that slots are given out again."""
    config = config_in(tmp_path, host_bytes=1 << 20, preallocated_bytes=request.param)
    with tempfile.TemporaryDirectory(prefix="kvtier-test-", dir="/dev/shm") as arena_dir:
        yield replace(config, host=replace(config.host, arena_dir=Path(arena_dir)))


@pytest.mark.timeout(600)
def test_kills_leave_memory_that_is_served_and_nothing_else(config: DaemonConfig) -> None:
    model = Model(random.Random(20_261))

    async def scenario() -> None:
        left, num_lives = None, 0
        # On a busy machine little happens in a life: up to twice as many more follow.
        while num_lives < NUM_KILLS or (num_lives < 3 * NUM_KILLS and not model.has_seen_enough()):
            left, num_lives = await one_life(config, model, left), num_lives + 1
        async with daemon(config, settings_of(config)) as (_, stub):
            assert left is not None
            await recovered(stub, left)
            await no_leak(config, stub)

    started_s = time.monotonic()
    asyncio.run(scenario())
    print(f"{model.num_pins} pins, {model.num_recovered} rows recovered, {model.num_rejected} rejected")
    print(f"at least {NUM_KILLS} kills in {time.monotonic() - started_s:.1f} s")
    assert model.num_recovered > 5 * NUM_KILLS
    assert model.num_rejected > NUM_KILLS // 2


def stopped_holder(lock: str) -> subprocess.Popen[bytes]:
    """A worker in mid-copy that was stopped: it holds the session's lock, and time does not matter to it."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    process.send_signal(signal.SIGSTOP)
    return process


def test_slots_of_a_stopped_worker_stay_out_of_use_over_two_kills(config: DaemonConfig) -> None:
    """Every row that a killed daemon had backed stays taken while the worker may use it: there are rows for all."""
    config = replace(config, host=replace(config.host, host_bytes=4 << 20))

    async def scenario() -> None:
        keys = [chunk_key(number) for number in range(4)]
        async with (
            daemon(config, settings_of(config)) as (_, stub),
            ScriptedEngine(config, LAYOUT, store_credits=6) as engine,
        ):
            await engine.bind(await pin(stub), keys)
            await engine.store(keys)
            refs = [await engine.take_credit() for _ in range(3)]
            stores = [pb.StoreSlot(key=chunk_key("late"), slot=refs[0])]
            await engine.send(store_begin=pb.StoreBegin(stores=stores))
            await engine.barrier()
            holder = await asyncio.to_thread(stopped_holder, engine.welcome.lock_path)
            granted = {ref.slot for ref in refs}
        try:
            for _ in range(2):
                await use_all_rows(config, keys, granted)
        finally:
            holder.kill()
            with suppress(subprocess.TimeoutExpired):
                holder.communicate(timeout=5)
        async with daemon(config, settings_of(config)) as (_, stub):
            await no_leak(config, stub)

    asyncio.run(scenario())


async def use_all_rows(config: DaemonConfig, keys: Sequence[bytes], granted: set[int]) -> None:
    """A life in which engines want every slot, with the old worker stopped; then kill -9."""
    async with daemon(config, settings_of(config)) as (_, stub):
        await recovered(stub, Left(tuple(keys), 0))
        with LeftArena(config) as left:
            before = {slot: left.entries()[slot] for slot in granted}
        async with ScriptedEngine(config, LAYOUT, store_credits=64) as engine:
            await engine.take_credit()
            await engine.barrier()
            assert granted.isdisjoint(ref.slot for ref in engine.credits)
            await read_recovered(stub, engine, keys)
            with LeftArena(config) as left:
                assert {slot: left.entries()[slot] for slot in granted} == before
                assert all(entry.backed for entry in before.values())
