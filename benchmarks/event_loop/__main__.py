"""The longest turn of the daemon's event loop while operators and engines make calls, with many and with long pins.

usage: python -m benchmarks.event_loop [--rounds 3] [--pins 10000x512,100x65536]

A real daemon over gRPC, in a process of its own, whose loop records how long each turn takes, from one wait for events
to the next: during a turn all engines wait. Every pin is bound and durable, with chunks of 64 bytes (only their number
matters here). CPU is that of the loop's thread, so other processes on the machine do not change it; wall time is
printed beside it.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from benchmarks.event_loop.daemon_calls import LONG_KEYS, LONG_TOKENS, TOO_MANY_KEYS, DaemonCalls, config_of, fill
from benchmarks.event_loop.timed_daemon import TIMEOUT_S, LoopTurn, daemon
from benchmarks.measuring.daemon_fixtures import FINGERPRINT, STATE
from benchmarks.measuring.machine import machine_line, spread
from kvtier.client.admin import AdminClient

_SETTLE_S = 0.1  # the turn in which the answer was sent ends


async def measure(longest: Callable[[], LoopTurn], calls: DaemonCalls, rounds: int) -> list[str]:
    """Return a row for each call."""
    turns: dict[str, list[LoopTurn]] = {}
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

    await calls.export()
    for number in range(rounds):
        await timed("nothing", nothing)
        await timed("list", calls.list_prompts)
        await timed("status", calls.status)
        await timed("show", calls.show)
        async with calls.attached(engine_id="first") as engine:  # pins count against its quota
            await timed("pin, 512 tokens", partial(calls.pin, 512))
            await timed("unpin", calls.unpin)
            await timed("pin, 65,536 tokens", partial(calls.pin, LONG_TOKENS))
            await timed("bind, 4,096 keys", partial(calls.bind, engine))
            await timed("unpin a bound one, 4,096 keys", calls.unpin)
            await timed("import", calls.import_bundle)
            await timed("attach", calls.attach)
            fingerprint = {**FINGERPRINT, "number": str(number)}
            await timed("attach, another namespace", partial(calls.attach, fingerprint=fingerprint))
            for num_keys in (4096, LONG_KEYS):
                place = "from memory" if number else "from disk"
                await timed(f"acquire, {num_keys:,} keys {place}", partial(calls.acquire, engine, num_keys))
                await timed(f"touch, {num_keys:,} keys", partial(calls.touch, engine, num_keys))
        for kind in ("acquire", "touch"):
            await timed(f"{kind}, {TOO_MANY_KEYS:,} keys", partial(calls.too_many, kind))
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
                calls = DaemonCalls(config, client, num_pins, keys)
                rows = asyncio.run(measure(longest, calls, options.rounds))
        print(f"\n{num_pins:,} pins of {num_tokens:,} tokens\n")
        print("| call | longest turn, ms CPU | ms wall | seconds until answered |\n|---|---|---|---|")
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
