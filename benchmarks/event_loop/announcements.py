"""What announcing pins to routers takes of vLLM's scheduler thread, step by step.

usage: python -m benchmarks.event_loop.announcements [--rounds 9]

The connector's real events, made of vLLM's own objects; without vLLM's publisher, which encodes them in a thread of its
own. `nothing new` is what each step pays; `repeated` is all that is announced again every five minutes, in many steps.
"""

import argparse
import hashlib
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.measuring.machine import machine_line, spread
from kvtier.core.layout import suffix_of
from kvtier_connector.kv_events.event_maker import AnnouncedPrompt, EventMaker, router_hashes
from kvtier_connector.kv_events.host_events import REPEAT_S, HostEvents

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.distributed.kv_events  # noqa: F401 - not in the first round

BLOCK_TOKENS = 16
SIZES = ((1000, 188), (10_000, 32))
"""Prompts, and blocks of each."""
NUM_IDLE_STEPS = 1000
HEADER = ("prompts", "blocks of each", "nothing new, a step", "reported", "announced", "repeated", "longest step")


def prompts(num_prompts: int, num_blocks: int) -> list[AnnouncedPrompt]:
    """Return prompts that share nothing."""
    tokens = array("I", range(1000, 1000 + num_blocks * BLOCK_TOKENS))
    return [
        AnnouncedPrompt(
            tokens=tokens,
            blocks=router_hashes(
                [hashlib.sha256(f"{number}-{idx}".encode()).digest() + suffix_of(0) for idx in range(num_blocks)]
            ),
            blocks_per_chunk=1,
        )
        for number in range(num_prompts)
    ]


def seconds_of(call: Callable[[], object]) -> float:
    """Return how long a call takes of the thread."""
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s


def steps_until_done(events: HostEvents, now_s: float) -> list[float]:
    """Take events as vLLM does, step by step; return how long each took."""
    steps: list[float] = []
    while events.is_pending(now_s):
        events.step_scheduled(0, now_s)
        steps.append(seconds_of(lambda: list(events.take(now_s))))
    return steps


class Costs(NamedTuple):
    """Of one round, in seconds of the thread."""

    idle_step_s: float
    reported_s: float
    announced_s: float
    repeated_s: float
    longest_step_s: float


def round_of(known: Sequence[AnnouncedPrompt]) -> Costs:
    """Have all reported, announced and repeated; then steps with nothing new."""
    cache = object()
    events = HostEvents(EventMaker(BLOCK_TOKENS, 0, "full_attention"), lambda: cache)
    list(events.take(0.0))

    def report() -> None:
        for number, prompt in enumerate(known):
            events.bound(str(number), prompt)
            events.resident(str(number), len(prompt.blocks))

    def stand_still() -> None:
        for _ in range(NUM_IDLE_STEPS):
            list(events.take(2.0 + REPEAT_S))

    reported_s = seconds_of(report)
    first, again = steps_until_done(events, 1.0), steps_until_done(events, 1.0 + REPEAT_S)
    return Costs(seconds_of(stand_still) / NUM_IDLE_STEPS, reported_s, sum(first), sum(again), max(first + again))


def measure(num_prompts: int, num_blocks: int, rounds: int) -> str:
    """Return the row for one size."""
    known = prompts(num_prompts, num_blocks)
    idle, *others = zip(*(round_of(known) for _ in range(rounds)), strict=True)
    cells = (
        f"{num_prompts:,}",
        str(num_blocks),
        spread([each * 1e6 for each in idle], "us", digits=1),
        *(spread([each * 1e3 for each in kind], "ms", digits=1) for kind in others),
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(machine_line())
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for num_prompts, num_blocks in SIZES:
        print(measure(num_prompts, num_blocks, rounds), flush=True)


if __name__ == "__main__":
    main()
