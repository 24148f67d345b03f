"""Acquires of many engines at once: how many a second one daemon answers, at what CPU and after how long.

usage: python -m benchmarks.acquires [--engines 1,2,4] [--open 1,8] [--chunks 94] [--prompts 1] [--seconds 3]
                                     [--rounds 3]

Every engine is a process. It asks for the chunks of a prompt (or of `--prompts` in turn), all in host memory, waits
for the answer, releases, and asks again, with `--open` acquires under way at any time. `session` engines use the client
that the connector uses, and make each message. `raw` engines send bytes that they made before and hardly look at the
answers, so that on few cores the daemon gets more of them. CPU is that of whole processes per acquire (with its answer
and its release), and of the daemon's loop thread, which alone bounds the rate where cores are plenty.
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.acquires.engines import Load
from benchmarks.acquires.rounds import engine_process
from benchmarks.harness.daemon import Daemon
from benchmarks.measuring.daemon_fixtures import FINGERPRINT, LAYOUT, config_for_engine
from benchmarks.measuring.machine import machine_line, spread
from benchmarks.measuring.process_usage import cpu_of, thread_cpu_s
from benchmarks.measuring.tables import percentile, table
from kvtier._pb import cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.core.layout import ChunkKey
from tests.fakes.operator import pin
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key

HEADER = (
    "engines",
    "open each",
    "acquires/s",
    "daemon CPU, us",
    "its loop, us",
    "engine CPU, us",
    "p50, ms",
    "p99, ms",
)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What came of one round: latencies of all engines, CPU seconds of daemon, loop thread and engines."""

    latency_s: Sequence[float]
    wall_s: float
    daemon_s: float
    loop_s: float
    engines_s: float


def one_round(daemon: Daemon, load: Load, num_engines: int) -> Round:
    """Run the engines of one round at the same time."""
    with contextlib.ExitStack() as ends:
        pipes = [ends.enter_context(engine_process(load, number)) for number in range(num_engines)]
        for pipe in pipes:
            pipe.recv()
        daemon_s, loop_s, began_s = cpu_of([daemon.pid]), thread_cpu_s(daemon.pid, daemon.pid), time.perf_counter()
        for pipe in pipes:
            pipe.send(None)
        results = [pipe.recv() for pipe in pipes]
        return Round(
            latency_s=[each for latency_s, _ in results for each in latency_s],
            wall_s=time.perf_counter() - began_s,
            daemon_s=cpu_of([daemon.pid]) - daemon_s,
            loop_s=thread_cpu_s(daemon.pid, daemon.pid) - loop_s,
            engines_s=sum(used_s for _, used_s in results),
        )


async def _store(daemon: Daemon, prompts: Sequence[Sequence[ChunkKey]]) -> None:
    async with (
        grpc.aio.insecure_channel(channel_target(daemon.socket)) as channel,
        ScriptedEngine(config_for_engine(daemon), LAYOUT, fingerprint=FINGERPRINT) as engine,
    ):
        for number, keys in enumerate(prompts):
            tokens = 16 * len(keys)
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            await engine.bind(await pin(stub, f"p{number}", tokens, number * tokens), keys)
            await engine.store(keys)


def _row(rounds: Sequence[Round], num_engines: int, num_open: int) -> tuple[str, ...]:
    columns = zip(*map(_values, rounds), strict=True)
    return (f"{num_engines}", f"{num_open}", *(spread(column, digits=2 if column[0] < 50 else 0) for column in columns))


def _values(each: Round) -> tuple[float, ...]:
    number = len(each.latency_s)
    cpu_us = (1e6 * seconds / number for seconds in (each.daemon_s, each.loop_s, each.engines_s))
    return (number / each.wall_s, *cpu_us, *(1e3 * percentile(each.latency_s, percent) for percent in (50, 99)))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="session,raw")
    parser.add_argument("--engines", default="1,2,4")
    parser.add_argument("--open", default="1,8")
    parser.add_argument("--chunks", type=int, default=94)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine_line())
    prompts = [[chunk_key((number, chunk)) for chunk in range(options.chunks)] for number in range(options.prompts)]
    with tempfile.TemporaryDirectory(prefix="kva-") as home, Daemon(Path(home)) as daemon:
        asyncio.run(_store(daemon, prompts))
        for kind in options.kinds.split(","):
            rows = []
            for num_engines in map(int, options.engines.split(",")):
                for num_open in map(int, options.open.split(",")):
                    load = Load(
                        kind=kind, socket=daemon.socket, prompts=prompts, num_open=num_open, seconds=options.seconds
                    )
                    rounds = [one_round(daemon, load, num_engines) for _ in range(options.rounds)]
                    rows.append(_row(rounds, num_engines, num_open))
            print(f"\n{kind} engines, {options.chunks} chunks an acquire\n\n{table(HEADER, rows)}", flush=True)


if __name__ == "__main__":
    main()
