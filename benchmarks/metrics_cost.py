"""What the metrics cost: an observation, a reading on the event loop, a scrape.

usage: python -m benchmarks.metrics_cost [--rounds 15]

An observation is measured in CPU time of this thread, kvtier's and prometheus_client's in turns. A reading is measured
likewise, over namespaces without chunks, because it counts no chunks. A scrape is wall time over HTTP to a server in
this process.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import prometheus_client

from benchmarks.growth import SilentPeer
from benchmarks.measuring.daemon_fixtures import FINGERPRINT, LAYOUT, config_over
from benchmarks.measuring.machine import machine_line
from kvtier.access.audit_log import AuditLog
from kvtier.access.gatekeeper import Gatekeeper
from kvtier.access.grants import GrantBook
from kvtier.obs.timings import Timings
from kvtier.service import Cache, EngineHello
from kvtier.service.metrics_reading import read_metrics
from kvtier.web.served_http import ServedDaemon, serve_http

OBSERVATIONS = 20_000
NAMESPACES = (1, 8, 64)


def cpu_time(call: Callable[[], object], times: int) -> float:
    """Return seconds of CPU per call."""
    began_s = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began_s) / times


def observations(rounds: int) -> list[str]:
    """Return a row for each histogram: a value in the fifth bucket of thirteen."""
    ours = Timings().acquire
    bounds = [bound for bound, _ in ours.cumulative()]
    theirs = prometheus_client.Histogram("seconds", "Seconds.", buckets=bounds, registry=None)
    seconds: dict[str, list[float]] = {"kvtier": [], "prometheus_client": []}
    for _ in range(rounds):
        seconds["kvtier"].append(cpu_time(lambda: ours.observe(0.0007), OBSERVATIONS))
        seconds["prometheus_client"].append(cpu_time(lambda: theirs.observe(0.0007), OBSERVATIONS))
    return [_row(f"observation, {name}", samples, 1e6, "us") for name, samples in seconds.items()]


async def reading(home: Path, arena: Path, rounds: int) -> list[str]:
    """Return a row for a reading on the loop per number of namespaces, and one for a whole scrape."""
    cache, rows = await Cache.open(config_over(home, arena)), []
    num_attached = 0
    for num_namespaces in NAMESPACES:
        for number in range(num_attached, num_namespaces):
            await cache.attach(_hello(number), SilentPeer())
        num_attached = num_namespaces
        samples = [cpu_time(lambda: read_metrics(cache), 50) for _ in range(rounds)]
        rows.append(_row(f"reading, {num_namespaces} namespaces with an engine each", samples, 1e3, "ms"))
    daemon = ServedDaemon(
        read=lambda: read_metrics(cache),
        why_not_ready=str,
        socket=home,
        vllm_url="",
        gatekeeper=Gatekeeper(GrantBook(home), AuditLog(None)),
    )
    server = serve_http(("127.0.0.1", 0), daemon)
    with httpx.Client() as client:
        samples = [await asyncio.to_thread(_scrape, client, f"{server.url}/metrics") for _ in range(3 * rounds)]
    server.close()
    await cache.close()
    return [*rows, _row("scrape over HTTP, wall time", samples, 1e3, "ms")]


def _hello(number: int) -> EngineHello:
    return EngineHello(
        engine_id=str(number), pid=1, vllm_version="", model_names=("model",), layout=LAYOUT, store_credits=1,
        fingerprint={**FINGERPRINT, "number": str(number)}, ephemeral=False,
    )  # fmt: skip


def _scrape(client: httpx.Client, url: str) -> float:
    began_s = time.perf_counter()
    client.get(url).raise_for_status()
    return time.perf_counter() - began_s


def _row(what: str, samples: list[float], scale: float, unit: str) -> str:
    low, _, high = statistics.quantiles([sample * scale for sample in samples], n=4)
    return f"| {what} | {statistics.median(samples) * scale:.2f} {unit} ({low:.2f}-{high:.2f}) |"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(machine_line())
    print("| what | median (quartiles) |\n|---|---|")
    for row in observations(rounds):
        print(row)
    with tempfile.TemporaryDirectory(prefix="kvm-") as home, tempfile.TemporaryDirectory(dir="/dev/shm") as arena:
        (Path(home) / "state").mkdir(mode=0o700)
        for row in asyncio.run(reading(Path(home), Path(arena), rounds)):
            print(row)


if __name__ == "__main__":
    main()
