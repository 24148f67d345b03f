"""What HTTP costs engines: the time of an acquire beside a scrape a second, ten consoles, busier clients, and none.

usage: python -m benchmarks.event_loop.http_clients [--rounds 5] [--seconds 8] [--cases nothing,consoles]

A real daemon in a process of its own with 1,000 durable pins, over gRPC and HTTP; an engine that acquires and releases
256 chunks in host memory, a hundred times a second; and clients in a third process. The cases go by turns. The time of
an acquire is from the message to its answer at the engine; the longest turn is that of the daemon's loop, as its CPU.

- `nothing`: HTTP is on, and only its own sample a second is taken
- `scrapes`: GET /metrics once a second
- `consoles`: besides, what ten browsers ask in which the console is open: each follows the events; five show the
  overview (status and readiness every 5 s, the history every 10 s, savings every 30 s), five all prompts (every 5 s)
- `clients`: in place of the consoles, five streams of events, and five clients that each ask once a second for the
  status, a page of a hundred prompts, and the history
- `grpc`: no HTTP; the same calls as `clients`, over gRPC, as the command line and the library make them
- `pins`: as `clients`, and one client that pins 100,000 token ids, once a second
"""

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.event_loop.daemon_calls import CHUNK_TOKENS, DaemonCalls, config_of, fill
from benchmarks.event_loop.timed_daemon import LoopTurn, daemon
from benchmarks.measuring.daemon_fixtures import STATE
from benchmarks.measuring.machine import machine_line, spread
from kvtier import Client
from kvtier.client.admin import AdminClient
from kvtier.config import HttpConfig
from kvtier.config.model import AccessConfig
from tests.fakes.scripted_engine import ScriptedEngine

PINS, TOKENS = 1000, 512
KEYS = 256
PAUSE_S = 0.01
CASES = ("nothing", "scrapes", "consoles", "grpc", "clients", "pins")
_STREAMS = _ASKING = 5
_CONSOLES = 10
_PINNED_TOKENS = 100_000


async def _every(seconds: float, ask: Callable[[], Coroutine[Any, Any, None]], *, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    while True:
        began_s = time.perf_counter()
        await ask()
        await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - began_s)))


async def _clients(url: str, case: str) -> None:
    """Ask for ever."""
    limits = httpx.Limits(max_connections=50)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client, asyncio.TaskGroup() as group:

        async def get(*paths: str) -> None:
            for answer in await asyncio.gather(*map(client.get, paths)):
                answer.raise_for_status()

        async def look() -> None:
            for path in ("/api/v1/status", "/api/v1/prompts?page_size=100", "/api/v1/history"):
                await get(path)

        async def look_at_overview() -> None:
            await get("/api/v1/status", "/api/v1/readiness")

        async def look_at_prompts() -> None:
            path = "/api/v1/prompts?page_size=500"
            page = (await client.get(path)).raise_for_status().json()
            while token := page["next_page_token"]:
                page = (await client.get(f"{path}&page_token={token}")).raise_for_status().json()

        async def stream() -> None:
            async with client.stream("GET", "/api/v1/events") as answer:
                async for _ in answer.aiter_bytes():
                    pass

        num_pinned = 0

        async def pin() -> None:
            nonlocal num_pinned
            num_pinned += 1
            tokens = [num_pinned, *range(_PINNED_TOKENS)]
            body = {"tokens": tokens, "warm": False, "replace": True}
            (await client.put("/api/v1/prompts/pinned", json=body)).raise_for_status()

        if case != "nothing":
            group.create_task(_every(1, lambda: get("/metrics")))
        if case == "consoles":
            for number in range(_CONSOLES):
                after_s = 5 * number / _CONSOLES  # people do not come at once
                group.create_task(stream())
                look_at = look_at_overview if number % 2 else look_at_prompts
                group.create_task(_every(5, look_at, after_s=after_s))
                if number % 2:
                    group.create_task(_every(10, lambda: get("/api/v1/history"), after_s=after_s))
                    group.create_task(_every(30, lambda: get("/api/v1/savings"), after_s=after_s))
        if case in ("clients", "pins"):
            for _ in range(_ASKING):
                group.create_task(_every(1, look))
            for _ in range(_STREAMS):
                group.create_task(stream())
        if case == "pins":
            group.create_task(_every(1, pin))


def _grpc_clients(socket: Path) -> None:
    """Ask for ever what `_clients` asks."""

    def look(client: Client) -> None:
        while True:
            began_s = time.perf_counter()
            client.status()
            client.list_page(page_size=100)
            time.sleep(max(0.0, 1.0 - (time.perf_counter() - began_s)))

    with Client(socket) as client:
        watches = [client.watch_events() for _ in range(_STREAMS)]
        asking = [threading.Thread(target=look, args=(client,), daemon=True) for _ in range(_ASKING)]
        asking += [threading.Thread(target=list, args=(watch,), daemon=True) for watch in watches]
        for each in asking:
            each.start()
        for each in asking:
            each.join()


def _run_clients(url: str, socket: Path, case: str) -> None:
    if case == "grpc":
        _grpc_clients(socket)
    else:
        asyncio.run(_clients(url, case))


async def acquire_times(engine: ScriptedEngine, keys: list[bytes], seconds: float) -> list[float]:
    """Acquire and release for some seconds; return the seconds of each acquire."""
    times, end_s = [], time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        await engine.acquire(1, keys)
        times.append(time.perf_counter() - began_s)
        await engine.release(1)
        await asyncio.sleep(PAUSE_S)
    return times


async def measure(
    longest: Callable[[], LoopTurn],
    calls: DaemonCalls,
    keys: list[bytes],
    url: str,
    socket: Path,
    options: argparse.Namespace,
) -> list[str]:
    """Return a row for each case."""
    cases = options.cases.split(",")
    times: dict[str, list[list[float]]] = {case: [] for case in cases}
    turns: dict[str, list[float]] = {case: [] for case in cases}
    async with calls.attached() as engine:
        await acquire_times(engine, keys, 1)  # into memory
        for _ in range(options.rounds):
            for case in cases:
                clients = multiprocessing.get_context("spawn").Process(target=_run_clients, args=(url, socket, case))
                clients.start()
                await asyncio.sleep(2)
                longest()
                times[case].append(await acquire_times(engine, keys, options.seconds))
                turns[case].append(longest().cpu_s)
                assert case == "nothing" or clients.is_alive(), "the clients have failed"
                clients.terminate()
                clients.join()
    return [_row(case, times[case], turns[case]) for case in cases]


def _row(case: str, rounds: list[list[float]], turns: list[float]) -> str:
    def of_rounds(measure: Callable[[list[float]], float]) -> str:
        return spread([1e3 * measure(times) for times in rounds])

    p50, p99 = of_rounds(statistics.median), of_rounds(lambda times: statistics.quantiles(times, n=100)[98])
    return f"| {case} | {p50} | {p99} | {of_rounds(max)} | {spread([1e3 * turn for turn in turns], digits=1)} |"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    print(machine_line())
    with tempfile.TemporaryDirectory(prefix="kvl-", dir="/dev/shm") as name:
        home = Path(name)
        (home / STATE).mkdir(mode=0o700)
        keys = fill(home / STATE, PINS, TOKENS)
        assert len(keys) == PINS * TOKENS // CHUNK_TOKENS
        http, access = HttpConfig(listen="127.0.0.1:0"), AccessConfig(auth="none")
        config = replace(config_of(home), http=http, access=access)
        with daemon(config) as longest, AdminClient(config.server.socket) as client:
            while not (url := client.status().http_url):
                time.sleep(0.1)
            calls = DaemonCalls(config, client, PINS, keys)
            print("| beside | acquire p50, ms | p99, ms | longest, ms | longest turn of the loop, ms CPU |")
            print("|---|---|---|---|---|")
            measured = measure(longest, calls, keys[:KEYS], url, config.server.socket, options)
            for row in asyncio.run(measured):
                print(row)


if __name__ == "__main__":
    main()
