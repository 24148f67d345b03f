"""The longest turn of the daemon's event loop while operators and engines ask, with many and with long pins.

usage: python -m benchmarks.event_loop [--rounds 3] [--pins 10000x512,100x65536]

A real daemon over gRPC, in a process of its own, whose loop notes how long each turn takes, from one wait for events
to the next: as long do all engines wait for an answer. Every pin is bound and durable, with chunks of 64 bytes (what
counts here is their number). CPU is that of the loop's thread, so a machine on which others compute makes it no longer;
wall time is beside it.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from benchmarks.event_loop.daemon_calls import LONG_KEYS, LONG_TOKENS, TOO_MANY_KEYS, Asking, config_of, fill
from benchmarks.event_loop.timed_daemon import TIMEOUT_S, Turn, daemon
from benchmarks.measuring.daemon_fixtures import FINGERPRINT, STATE
from benchmarks.measuring.machine import machine_line, spread
from kvtier.client.admin import AdminClient
from kvtier.config import DaemonConfig

_SETTLE_S = 0.1  # the turn in which the answer was sent ends


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
