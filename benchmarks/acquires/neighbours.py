"""Neighbours on one daemon: engines of one model and of two, one of them greedy; and one model that fills memory.

usage: python -m benchmarks.acquires.neighbours [--chunks 94] [--seconds 3] [--rounds 5] [--stored 16384]

First fairness: every engine is a process with the connector's client, which acquires a prompt in host memory, releases
it, and asks again. A *polite* engine has one acquire under way, a *greedy* one 64. What do polite ones get beside
others? Then memory: four engines of one model store what no one pinned, several times what host memory takes, while an
engine of another model acquires its pinned prompt and one that it did not pin.
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from benchmarks.acquires.engines import Load
from benchmarks.acquires.rounds import engine_process
from benchmarks.harness.daemon import Daemon
from benchmarks.measuring.daemon_fixtures import LAYOUT, config_for_engine, one_group
from benchmarks.measuring.machine import machine_line, spread
from benchmarks.measuring.tables import percentile, table
from kvtier._pb import cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.client.admin import AdminClient
from kvtier.core.layout import ChunkKey, KVLayout
from tests.fakes.operator import pin
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key

MODELS = {"A": {"weights": "A"}, "B": {"weights": "B"}}
GREEDY = 64
# Model and acquires under way of each engine; polite ones first.
MIXES: Mapping[str, Sequence[tuple[str, int]]] = {
    "one engine": [("A", 1)],
    "four of one model": [("A", 1)] * 4,
    "two of each of two models": [("A", 1), ("A", 1), ("B", 1), ("B", 1)],
    "three, and a greedy one of their model": [("A", 1)] * 3 + [("A", GREEDY)],
    "three, and a greedy one of another model": [("A", 1)] * 3 + [("B", GREEDY)],
}
FAIRNESS = (
    "engines",
    "acquires/s, all",
    "of the slowest polite engine",
    "of the fastest",
    "p50, ms",
    "p99, ms",
    "greedy/s",
)
HOST_BYTES = 128 << 20
STORED = one_group(64 << 10)
NUM_STORING = 4
NUM_KEPT = 256
"""Chunks of each of B's two prompts: an eighth of host memory."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What came of one round of a mix: each polite engine's acquires a second, their latencies, and the greedy's."""

    polite_per_s: Sequence[float]
    latency_s: Sequence[float]
    greedy_per_s: float


@dataclass
class Looks:
    """What was seen of memory while others stored.

    Attributes:
        pinned_ratio: Of B's pinned chunks, the part in host memory at each of its acquires.
        unpinned_ratio: The same of its unpinned ones.
        seconds: From its acquires of pinned chunks to their answers.
        most_bytes: Of all namespaces' rows together.
    """

    pinned_ratio: list[float] = field(default_factory=list)
    unpinned_ratio: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    most_bytes: int = 0


def keys_of(name: str, num_chunks: int) -> list[ChunkKey]:
    """Return the keys of a prompt."""
    return [chunk_key((name, number)) for number in range(num_chunks)]


@contextlib.contextmanager
def daemon_of(host_bytes: str) -> Iterator[Daemon]:
    """Run a daemon that stores everything."""
    settings = {"KVTIER_CACHE_STORE": "all"}
    with (
        tempfile.TemporaryDirectory(prefix="kva-") as home,
        Daemon(Path(home), host_bytes=host_bytes, settings=settings) as daemon,
    ):
        yield daemon


def engine_of(daemon: Daemon, model: str, layout: KVLayout, number: int = 0) -> ScriptedEngine:
    """Return an engine that stores."""
    return ScriptedEngine(
        config_for_engine(daemon),
        layout,
        fingerprint=MODELS[model],
        engine_id=f"{model}-{number}",
        model_names=[model],
        store_credits=64,
    )


def one_round(daemon: Daemon, mix: Sequence[tuple[str, int]], keys: Sequence[ChunkKey], seconds: float) -> Shares:
    """Run the engines of a mix at the same time."""
    with contextlib.ExitStack() as ends:
        pipes = []
        for number, (model, num_open) in enumerate(mix):
            load = Load(
                kind="session",
                socket=daemon.socket,
                prompts=[keys],
                num_open=num_open,
                seconds=seconds,
                fingerprint=MODELS[model],
            )
            pipes.append(ends.enter_context(engine_process(load, number)))
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(None)
        latencies: list[list[float]] = [pipe.recv()[0] for pipe in pipes]
    polite = [each for each, (_, num_open) in zip(latencies, mix, strict=True) if num_open == 1]
    num_greedy = sum(map(len, latencies)) - sum(map(len, polite))
    return Shares(
        polite_per_s=[len(each) / seconds for each in polite],
        latency_s=[latency for each in polite for latency in each],
        greedy_per_s=num_greedy / seconds,
    )


def fairness_row(name: str, rounds: Sequence[Shares]) -> tuple[str, ...]:
    """Return medians over rounds, with the spread."""
    return (
        name,
        spread([sum(each.polite_per_s) + each.greedy_per_s for each in rounds], digits=0),
        spread([min(each.polite_per_s) for each in rounds], digits=0),
        spread([max(each.polite_per_s) for each in rounds], digits=0),
        *(spread([1e3 * percentile(each.latency_s, percent) for each in rounds]) for percent in (50, 99)),
        spread([each.greedy_per_s for each in rounds], digits=0) if rounds[0].greedy_per_s else "",
    )


async def _store_for_both(daemon: Daemon, keys: Sequence[ChunkKey]) -> None:
    for model in MODELS:
        async with engine_of(daemon, model, LAYOUT) as engine:
            await engine.store(keys)


async def fill_memory(daemon: Daemon, num_chunks: int) -> tuple[Looks, list[float]]:
    """Have engines of A store `num_chunks` each; return what B saw, and A's chunks a second by engine."""
    pinned, unpinned = keys_of("pinned", NUM_KEPT), keys_of("unpinned", NUM_KEPT)
    looks, done = Looks(), asyncio.Event()
    async with (
        grpc.aio.insecure_channel(channel_target(daemon.socket)) as channel,
        engine_of(daemon, "B", STORED) as looking,
    ):
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        pin_id = await pin(stub, "kept", 16 * NUM_KEPT, model="B")
        await looking.bind(pin_id, pinned)
        await looking.store(pinned)
        await looking.store(unpinned)
        looker = asyncio.create_task(_look(daemon, looking, pinned, unpinned, looks, done))
        rates = await asyncio.gather(*(_fill(daemon, number, num_chunks) for number in range(NUM_STORING)))
        done.set()
        await looker
    return looks, list(rates)


async def _fill(daemon: Daemon, number: int, num_chunks: int) -> float:
    async with engine_of(daemon, "A", STORED, number) as engine:
        began_s = time.perf_counter()
        await engine.store(keys_of(f"filling-{number}", num_chunks), wait=False)
        return num_chunks / (time.perf_counter() - began_s)


async def _look(
    daemon: Daemon,
    engine: ScriptedEngine,
    pinned: Sequence[ChunkKey],
    unpinned: Sequence[ChunkKey],
    looks: Looks,
    done: asyncio.Event,
) -> None:
    acquire_id = 0
    with AdminClient(daemon.socket) as admin:
        while not done.is_set():
            for keys, ratios in ((pinned, looks.pinned_ratio), (unpinned, looks.unpinned_ratio)):
                acquire_id += 1
                began_s = time.perf_counter()
                ratios.append(len(await engine.acquire(acquire_id, keys)) / len(keys))
                if keys is pinned:
                    looks.seconds.append(time.perf_counter() - began_s)
                await engine.send(release={"acquire_id": acquire_id, "all": True})
            status = await asyncio.to_thread(admin.status)
            num_bytes = sum(each.num_host_chunks * each.row_bytes for each in status.namespaces)
            looks.most_bytes = max(looks.most_bytes, num_bytes)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=94)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stored", type=int, default=16384, help="chunks of 64 KiB that four engines store together")
    options = parser.parse_args()
    print(machine_line())
    keys = keys_of("fairness", options.chunks)
    with daemon_of("1GiB") as daemon:
        asyncio.run(_store_for_both(daemon, keys))
        rounds: dict[str, list[Shares]] = {name: [] for name in MIXES}
        for _ in range(options.rounds):  # in turns: the machine is not equally busy all the time
            for name, mix in MIXES.items():
                rounds[name].append(one_round(daemon, mix, keys, options.seconds))
    rows = [fairness_row(name, each) for name, each in rounds.items()]
    print(f"\n{options.chunks} chunks an acquire, {options.rounds} rounds\n\n{table(FAIRNESS, rows)}", flush=True)
    with daemon_of(str(HOST_BYTES)) as daemon:
        looks, rates = asyncio.run(fill_memory(daemon, options.stored // NUM_STORING))
    filled = options.stored * STORED.row_bytes / HOST_BYTES
    print(f"\nhost memory of {HOST_BYTES >> 20} MiB; four engines of A store {filled:.1f} times that, unpinned")
    print(f"A's engines: {min(rates):.0f} to {max(rates):.0f} chunks/s each")
    print(f"rows in use, most: {looks.most_bytes / HOST_BYTES:.2f} of host memory")
    print(f"B's acquires of {NUM_KEPT} chunks: {len(looks.seconds)} of either prompt")
    print(f"of its pinned chunks from memory: {100 * min(looks.pinned_ratio):.0f} % at least")
    print(
        f"of its unpinned chunks: {100 * min(looks.unpinned_ratio):.0f} % at least, {_mean(looks.unpinned_ratio)} mean"
    )
    latencies_ms = [1e3 * seconds for seconds in looks.seconds]
    print(f"to an answer: p50 {percentile(latencies_ms, 50):.1f} ms, p99 {percentile(latencies_ms, 99):.1f} ms")


def _mean(ratios: Sequence[float]) -> str:
    return f"{100 * sum(ratios) / len(ratios):.0f} %"


if __name__ == "__main__":
    main()
