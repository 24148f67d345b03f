"""The longest turn of the daemon's event loop while operators and engines ask, with many and with long pins.

usage: python -m benchmarks.loop_lag [--rounds 3] [--pins 10000x512,100x65536]

A real daemon over gRPC, in a process of its own, whose loop notes how long each turn takes, from one wait for events
to the next: as long do all engines wait for an answer. Every pin is bound and durable, with chunks of 64 bytes (what
counts here is their number). CPU is that of the loop's thread, so a machine on which others compute makes it no longer;
wall time is beside it.
"""

import argparse
import asyncio
import hashlib
import multiprocessing
import selectors
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.growth import FINGERPRINT, LAYOUT, STATE
from benchmarks.machine import machine_line, spread
from benchmarks.many_pins import fill_with_pins, make_durable
from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.client.admin import AdminClient
from kvtier.collector import freeze_index
from kvtier.config import DaemonConfig, DiskConfig, HostConfig, MetricsConfig, ServerConfig
from kvtier.config.model import OFF
from kvtier.core.fingerprint import namespace_id
from kvtier.core.layout import ChunkKey
from kvtier.ledger import BindingRow, Ledger, NamespaceRow
from kvtier.rpc.server import serve
from tests.fakes.scripted_engine import ScriptedEngine

CHUNK_TOKENS = LAYOUT.groups[0].chunk_tokens
LONG_TOKENS = 65_536
LONG_KEYS = 65_536
"""Of a prompt of a million tokens."""
TOO_MANY_KEYS = 1_500_000
TIMEOUT_S = 120.0
_SETTLE_S = 0.1  # the turn in which the answer was sent ends


@dataclass(frozen=True)
class Turn:
    """The longest one, in seconds."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


class TurnTimer(selectors.DefaultSelector):
    """A loop's selector that knows how long the loop was away from it."""

    def __init__(self) -> None:
        super().__init__()
        self._began_s, self._began_cpu_s = time.perf_counter(), time.thread_time()
        self.longest_wall_s = self.longest_cpu_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See selectors."""
        self.longest_wall_s = max(self.longest_wall_s, time.perf_counter() - self._began_s)
        self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - self._began_cpu_s)
        try:
            return super().select(timeout)
        finally:
            self._began_s, self._began_cpu_s = time.perf_counter(), time.thread_time()

    def take(self) -> Turn:
        """Return the longest turn since the last call. Any thread."""
        longest = Turn(self.longest_wall_s, self.longest_cpu_s)
        self.longest_wall_s = self.longest_cpu_s = 0.0
        return longest


def run_daemon(config: DaemonConfig, pipe: Connection) -> None:
    """Serve until the pipe says so; answer everything else in it with the longest turn since the last question."""
    timer = TurnTimer()

    async def served() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def answer() -> None:
            while pipe.recv():
                pipe.send(timer.take())
            loop.call_soon_threadsafe(stop.set)

        def ready() -> None:
            freeze_index()
            pipe.send(timer.take())
            threading.Thread(target=answer, daemon=True).start()

        await serve(config, stop=stop, ready=ready)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(timer)) as runner:
        runner.run(served())


@contextmanager
def daemon(config: DaemonConfig) -> Iterator[Callable[[], Turn]]:
    """Run a daemon; yield what returns its longest turn since the last call."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_daemon, args=(config, theirs))
    process.start()
    try:
        if not ours.poll(TIMEOUT_S):
            raise TimeoutError("the daemon does not start")
        ours.recv()

        def longest() -> Turn:
            ours.send(True)
            turn: Turn = ours.recv()
            return turn

        yield longest
        ours.send(False)
        process.join(TIMEOUT_S)
    finally:
        process.kill()
        process.join()


def config_of(home: Path) -> DaemonConfig:
    """Return a daemon's settings over a folder in memory: how fast a disk is, does not matter here."""
    (home / "arena").mkdir(mode=0o700, exist_ok=True)
    return DaemonConfig(
        server=ServerConfig(socket=home / "d.sock", drain_timeout_s=1),
        host=HostConfig(arena_dir=home / "arena", host_bytes=512 << 20, prewarm=False),
        disk=DiskConfig(disk_dir=home / STATE, disk_bytes=4 << 30, reserve_bytes=0),
        metrics=MetricsConfig(listen=OFF),
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


class Asking:
    """Everything that is asked of one daemon. Each method is one thing, done once."""

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
                known.add((await engine.receive("pin_added")).pin_added.pin.pin_id)
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
        """An engine that sends more than any prompt has; its session may end by that."""
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


async def measure(longest: Callable[[], Turn], config: DaemonConfig, asking: Asking, rounds: int) -> list[str]:
    """Return a row for each thing that is asked."""
    turns: dict[str, list[Turn]] = {}
    seconds: dict[str, list[float]] = {}

    async def timed(name: str, ask: Callable[[], Awaitable[None]]) -> None:
        longest()
        began_s = time.perf_counter()
        await ask()
        seconds.setdefault(name, []).append(time.perf_counter() - began_s)
        await asyncio.sleep(_SETTLE_S)
        turns.setdefault(name, []).append(longest())

    async def nothing() -> None:
        await asyncio.sleep(1)

    await asking.export()
    for number in range(rounds):
        await timed("nothing", nothing)
        await timed("list", asking.list_prompts)
        await timed("status", asking.status)
        await timed("show", asking.show)
        async with asking.attached(engine_id="first") as engine:  # for whom pins count against the quota
            await timed("pin, 512 tokens", partial(asking.pin, 512))
            await timed("unpin", asking.unpin)
            await timed("pin, 65,536 tokens", partial(asking.pin, LONG_TOKENS))
            await timed("bind, 4,096 keys", partial(asking.bind, engine))
            await timed("unpin a bound one, 4,096 keys", asking.unpin)
            await timed("import", asking.import_bundle)
            await timed("attach", asking.attach)
            fingerprint = {**FINGERPRINT, "number": str(number)}
            await timed("attach, another namespace", partial(asking.attach, fingerprint=fingerprint))
            for num_keys in (4096, LONG_KEYS):
                place = "from memory" if number else "from disk"
                await timed(f"acquire, {num_keys:,} keys {place}", partial(asking.acquire, engine, num_keys))
                await timed(f"touch, {num_keys:,} keys", partial(asking.touch, engine, num_keys))
        for kind in ("acquire", "touch"):
            await timed(f"{kind}, {TOO_MANY_KEYS:,} keys", partial(asking.too_many, kind))
    return [
        f"| {name} | {spread([1e3 * turn.cpu_s for turn in turns[name]], digits=1)} "
        f"| {spread([1e3 * turn.wall_s for turn in turns[name]], digits=1)} | {spread(seconds[name])} |"
        for name in turns
    ]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pins", default="10000x512,100x65536", help="numbers of pins, and how many tokens each has")
    options = parser.parse_args()
    print(machine_line())
    for case in options.pins.split(","):
        num_pins, num_tokens = map(int, case.split("x"))
        with tempfile.TemporaryDirectory(prefix="kvl-", dir="/dev/shm") as name:
            home = Path(name)
            keys, config = fill(home / STATE, num_pins, num_tokens), config_of(home)
            with daemon(config) as longest, AdminClient(config.server.socket, timeout_s=TIMEOUT_S) as client:
                rows = asyncio.run(measure(longest, config, Asking(config, client, num_pins, keys), options.rounds))
        print(f"\n{num_pins:,} pins of {num_tokens:,} tokens\n")
        print("| asked | longest turn, ms CPU | ms wall | seconds until answered |\n|---|---|---|---|")
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
