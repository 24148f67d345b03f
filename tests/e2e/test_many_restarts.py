"""A real vLLM that is started and ended again and again, beside one daemon, which keeps nothing of it but its prompts.

Ends take turns: a stop (SIGTERM) with and without time for vLLM to end in order, kill -9 while idle, in mid-store and
in mid-load. `make test-restarts` runs it, with 50 ends; `KVTIER_RESTARTS` says how many.
"""

import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import HANG_S, PATIENT, Answer, Stack, ask, prefix_cache_hit, running_stack, tokens
from tests.e2e.moments import standing_credits, stop_while, storing_again
from tests.e2e.traffic import Client
from tests.fakes.process_facts import Held, held

PREFIX, QUESTION, OTHER = tokens(1, 896), tokens(2, 40), tokens(3, 896)
NUM_RESTARTS = int(os.environ.get("KVTIER_RESTARTS", "50"))
LIFE_S = 180.0
MIB = 1024**2
IN_ORDER = ("--shutdown-timeout", "60")
# Allocators keep pages for later: what is forgotten for good adds up over the lives, and they are many.
MAX_GROWTH_BYTES = 16 * MIB
# Thread pools grow to their sizes when they are first busy, whenever that is.
NUM_POOL_THREADS = 10

pytestmark = [pytest.mark.restarts, pytest.mark.timeout(LIFE_S * (NUM_RESTARTS + 2))]


@dataclass
class World:
    """What the lives share.

    Attributes:
        reference: vLLM's own answer, its prefix from its prefix cache.
        ends: How each life ended.
        found: What the daemon held after each.
        seconds: From each end's signal to the daemon's having nothing of the engine.
    """

    stack: Stack
    compare: Comparisons
    reference: Answer
    ends: list[str] = field(default_factory=list)
    found: list[Held] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def live(self, end: Callable[["World", Engine], None]) -> None:
        """Start an engine, check that it is restored what is pinned, end it, and look at what the daemon keeps."""
        with self.stack.engine(extra_args=IN_ORDER if end is _stop_in_order else ()) as engine:
            self.stack.wait_attached(engine)
            self.compare.restored_equals_prefix_cache_hit(ask(engine, PREFIX + QUESTION), self.reference)
            end(self, engine)
            self.ends.append(end.__name__.strip("_"))
            start_s = time.monotonic()
            engine.stop(grace_s=HANG_S)
            wait_until(lambda: not self.stack.status().sessions, HANG_S, "the session to end")
            self.seconds.append(time.monotonic() - start_s)
        self._check_free()
        self.found.append(held(self.stack.daemon.pid, self.stack.daemon.arena_dir))
        print(f"{len(self.ends)}: {self.ends[-1]}, {self.found[-1]}", flush=True)  # minutes pass between two of them

    def _check_free(self) -> None:
        """No lease, no grant, nothing in quarantine: every slot is free, or holds a chunk that can be read."""
        daemon = self.stack.daemon
        for name in ("kvtier_leased_chunks", "kvtier_store_grants", "kvtier_quarantined_slots"):
            assert daemon.metric(name) == 0, (name, self.ends)
        assert not list(daemon.arena_dir.glob("session-*")), self.ends


def _stop_in_order(world: World, engine: Engine) -> None:
    """SIGTERM, which `live` sends to whatever still runs; vLLM has time to end its engine process."""
    _wait_idle(world)


def _stop(world: World, engine: Engine) -> None:
    """SIGTERM as well; vLLM's default is to kill its engine process at once."""
    _wait_idle(world)


def _wait_idle(world: World) -> None:
    wait_until(lambda: not sum(each.num_leases for each in world.stack.status().sessions), HANG_S, "an idle engine")


def _kill_idle(world: World, engine: Engine) -> None:
    _wait_idle(world)
    os.killpg(engine.pid, signal.SIGKILL)


def _kill_in_mid_store(world: World, engine: Engine) -> None:
    num_standing = standing_credits(world.stack, engine)
    with storing_again(world.stack, "second", OTHER):
        client = Client(engine, OTHER, QUESTION)
        stop_while(world.stack, engine, client, lambda each: each.num_store_grants > num_standing)
        os.killpg(engine.pid, signal.SIGKILL)


def _kill_in_mid_load(world: World, engine: Engine) -> None:
    stop_while(world.stack, engine, Client(engine, PREFIX, QUESTION), lambda each: each.num_leases > 0)
    os.killpg(engine.pid, signal.SIGKILL)


ENDS = (_stop_in_order, _stop, _kill_idle, _kill_in_mid_store, _kill_in_mid_load)


@pytest.fixture
def world(compare: Comparisons) -> Iterator[World]:
    """Pin the prompt with a first engine, which says what vLLM itself answers."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)), connector_config=PATIENT)
    with running_stack(options, host_bytes="64MiB") as stack:
        with stack.engine() as engine:
            reference = prefix_cache_hit(engine, PREFIX, QUESTION)
            stack.pin("prompt", PREFIX, engine)
        yield World(stack, compare, reference)


def test_many_restarts(world: World, note: Note) -> None:
    """After the last end the daemon holds what it held after the first."""
    for number in range(NUM_RESTARTS):
        world.live(ENDS[number % len(ENDS)])
    for line in _summary(world):
        note(line)
    _check_for_leaks(world.found)
    _check_counted(world)
    world.stack.cli("fsck")


def _check_counted(world: World) -> None:
    """Only what was killed in the middle of its work was lost; the first engine was stopped too."""
    counters, ends = world.stack.status().counters, Counter(world.ends)
    assert counters["sessions_opened"] == NUM_RESTARTS + 1
    assert counters["sessions_ended_closed"] == ends["stop_in_order"], counters
    assert counters["sessions_ended_gone"] == ends["stop"] + ends["kill_idle"] + 1, counters
    assert counters["sessions_ended_cut"] == ends["kill_in_mid_store"] + ends["kill_in_mid_load"], counters
    assert counters["sessions_lost"] == counters["sessions_ended_cut"], counters


def _check_for_leaks(found: Sequence[Held]) -> None:
    first, last = found[0], found[-1]
    assert last.num_fds <= first.num_fds, found
    assert last.num_maps <= first.num_maps, found
    assert last.num_files <= first.num_files, found
    assert last.num_threads <= first.num_threads + NUM_POOL_THREADS, found
    assert last.private_bytes <= first.private_bytes + MAX_GROWTH_BYTES, found


def _summary(world: World) -> Iterator[str]:
    first, last = world.found[0], world.found[-1]
    how = ", ".join(f"{num} {end.replace('_', ' ')}" for end, num in Counter(world.ends).items())
    yield f"{len(world.ends)} ends of a vLLM ({how}); the prompt restored right after each start"
    for end in dict.fromkeys(world.ends):
        seconds = [each for name, each in zip(world.ends, world.seconds, strict=True) if name == end]
        yield (
            f"{end.replace('_', ' ')}: processes gone and all of the session free after "
            f"{statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s at most"
        )
    growth_bytes = max(each.private_bytes for each in world.found) - first.private_bytes
    yield (
        f"the daemon after the first and the last: descriptors {first.num_fds} and {last.num_fds}, arena mappings "
        f"{first.num_maps} and {last.num_maps}, threads {first.num_threads} and {last.num_threads}, files in the arena "
        f"folder {first.num_files} and {last.num_files}, private memory {first.private_bytes / MIB:.1f} and "
        f"{last.private_bytes / MIB:.1f} MiB (at most {growth_bytes / MIB:.1f} more)"
    )
    counters = world.stack.status().counters
    ended = {name: counters[name] for name in sorted(counters) if name.startswith("sessions_") and counters[name]}
    yield ", ".join(f"{name} {number}" for name, number in ended.items())
