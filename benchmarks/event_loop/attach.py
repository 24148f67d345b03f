"""How long an engine takes to attach to a daemon with thousands of pins: until all are bound, and known to be held.

usage: python -m benchmarks.event_loop.attach [--pins 1000,10000] [--tokens 512] [--rounds 9]

A real daemon over gRPC in a process of its own, and the connector's real session: its threads, vLLM's own hasher, the
mirror and the ranking that the scheduler keeps. Every pin is durable, with chunks of 64 bytes (only their number
matters here), so the scrub is off: it verifies bytes, and would go through a quarter of a million of these a second.
Another engine of the namespace has bound the pins before. CPU is that of threads; the longest turn is that of the
daemon's loop.
"""

import argparse
import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

from benchmarks.event_loop.daemon_calls import config_of, fill
from benchmarks.event_loop.timed_daemon import TIMEOUT_S, LoopTurn, daemon
from benchmarks.measuring.daemon_fixtures import FINGERPRINT, LAYOUT, STATE
from benchmarks.measuring.machine import machine_line, spread
from kvtier.config import DaemonConfig
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.engine.lora.adapter_digests import AdapterDigests
from kvtier_connector.gpu_pins import PinnedBlocks
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror
from kvtier_connector.session.daemon_events import BackgroundThread, DaemonEvents, PinBound, Received
from kvtier_connector.session.device_blocks import DeviceBlocks
from kvtier_connector.session.pin_binder import PinBinder
from tests.fakes.scripted_engine import hello_message

CHUNK_TOKENS = LAYOUT.groups[0].chunk_tokens
SHAPE = GroupShape(group_idx=0, chunk_tokens=CHUNK_TOKENS, hashes_per_chunk=1, window_chunks=0)
MAX_TOKENS = 1_000_000
HEADER = ("pins", "attached", "CPU of its threads", "CPU of the scheduler", "longest poll", "longest turn, ms CPU")


@dataclass(frozen=True, kw_only=True)
class Attach:
    """What one attach took.

    Attributes:
        seconds: Until the last answer on what is held.
        cpu_s: Of all threads of the engine's process.
        scheduler_s: Of them, of that which takes the events in.
        longest_poll_s: The most that one poll for events cost it.
    """

    seconds: float
    cpu_s: float
    scheduler_s: float
    longest_poll_s: float


class AttachingEngine:
    """The session of a connector, and what its scheduler keeps of pins."""

    def __init__(self, config: DaemonConfig) -> None:
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        hasher: Any = get_request_block_hasher(CHUNK_TOKENS, hash_fn)
        background = BackgroundThread("kvtier-bind")
        binder = PinBinder((SHAPE,), lambda: hasher, AdapterDigests(background.submit), MAX_TOKENS)
        hello = hello_message(LAYOUT, fingerprint=FINGERPRINT, takes_joined_keys=binder.takes_joined_keys)
        blocks = DeviceBlocks(CHUNK_TOKENS)
        self.events = DaemonEvents(config.server.socket, lambda turn: hello, binder, background, blocks)
        self.mirror, self.blocks = ChunkMirror([SHAPE]), PinnedBlocks()
        self.blocks.bound(MAX_TOKENS)
        self.num_bound = self.num_answered = 0

    def take_events(self) -> None:
        """Take in what has come, as `CurrentSession` does."""
        for event in self.events.poll():
            if isinstance(event, PinBound):
                self.mirror.add(event.pin)
                self.blocks.add(event.pin.pin_id, event.pin.gpu_keys)
                self.num_bound += 1
            elif isinstance(event, Received) and event.message.HasField("chunks_held"):
                held = event.message.chunks_held
                self.mirror.set_held(held.keys, held.held)
                self.num_answered += len(held.keys) + sum(len(self.mirror.hold_pin(pin_id)) for pin_id in held.pin_ids)


def attach(config: DaemonConfig, num_pins: int, num_keys: int) -> Attach:
    """Attach an engine and wait until every pin is bound, and every key answered."""
    gc.collect()  # the engine before this one refers to itself, and would be freed in one of the polls
    engine = AttachingEngine(config)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    scheduler_s = longest_poll_s = 0.0
    engine.events.start()
    while engine.num_bound < num_pins or engine.num_answered < num_keys:
        if time.perf_counter() - began_s > TIMEOUT_S:
            raise TimeoutError(f"{engine.num_bound} pins were bound, {engine.num_answered} keys answered")
        engine.events.wait_for_events(0.01)
        poll_began_s = time.thread_time()
        engine.take_events()
        poll_s = time.thread_time() - poll_began_s
        scheduler_s, longest_poll_s = scheduler_s + poll_s, max(longest_poll_s, poll_s)
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    engine.events.close()
    return Attach(seconds=seconds, cpu_s=cpu_s, scheduler_s=scheduler_s, longest_poll_s=longest_poll_s)


def measure(num_pins: int, num_tokens: int, rounds: int) -> str:
    """Return the row for one number of pins."""
    with TemporaryDirectory(prefix="kvl-", dir="/dev/shm") as name:
        home = Path(name)
        num_keys, config = len(fill(home / STATE, num_pins, num_tokens)), config_of(home)
        config = replace(config, disk=replace(config.disk, scrub_bytes_per_s=0))
        with daemon(config) as longest:
            taken = [_timed(longest, config, num_pins, num_keys) for _ in range(rounds)]
    return _row(num_pins, taken)


def _timed(
    longest: Callable[[], LoopTurn], config: DaemonConfig, num_pins: int, num_keys: int
) -> tuple[Attach, LoopTurn]:
    longest()
    return attach(config, num_pins, num_keys), longest()


def _row(num_pins: int, taken: list[tuple[Attach, LoopTurn]]) -> str:
    attaches = [each for each, _ in taken]
    cells = (
        f"{num_pins:,}",
        spread([each.seconds for each in attaches], "s"),
        spread([each.cpu_s for each in attaches], "s"),
        spread([each.scheduler_s for each in attaches], "s"),
        spread([each.longest_poll_s * 1e3 for each in attaches], "ms", digits=1),
        spread([turn.cpu_s * 1e3 for _, turn in taken], digits=1),
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pins", default="1000,10000")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(machine_line())
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    for count in options.pins.split(","):
        print(measure(int(count), options.tokens, options.rounds), flush=True)


if __name__ == "__main__":
    main()
