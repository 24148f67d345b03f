"""The daemon absent, killed, stopped and restarted under a running vLLM: requests are answered as without kvtier.

The tests run in order, on one engine.
"""

import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.equality import Comparisons
from tests.e2e.harness import (
    Answer,
    Stack,
    ask,
    ask_until_restored,
    forget_gpu,
    prefix_cache_hit,
    running_stack,
    tokens,
)
from tests.e2e.traffic import Client

pytestmark = pytest.mark.timed

PREFIX, QUESTION = tokens(1, 640), tokens(2, 40)
# Two chunks: so fast to compute that the wait for the daemon is most of what is measured.
SMALL = tokens(3, 64)
NUM_PAIRS = 9
# Promised: the first MISS within 0.3 s, at once after it, hits within 2 s. What is measured is printed. Noise of a busy
# machine is of that size, so these tests fail on hangs only; the breaker's times are tested with a clock of their own.
HANG_S = 15.0


@dataclass
class World:
    """What the tests share."""

    stack: Stack
    engine: Engine
    reference: Answer
    questions: Iterator[int] = field(default_factory=lambda: iter(range(1000, 100_000)))

    def ask_small(self) -> Answer:
        """Ask a new question after the small prompt, which vLLM itself has forgotten."""
        forget_gpu(self.engine)
        return ask(self.engine, SMALL + tokens(next(self.questions), 8), max_tokens=1)

    def ask_unpinned(self) -> Answer:
        """Ask something of the same length that has nothing to do with kvtier."""
        forget_gpu(self.engine)
        return ask(self.engine, tokens(next(self.questions), len(SMALL) + 8), max_tokens=1)

    def ensure_daemon(self) -> None:
        """Start the daemon if a test before left it down."""
        if not self.stack.daemon.is_running:
            self.stack.daemon.start()
        self.stack.daemon.signal(signal.SIGCONT)
        self.stack.wait_attached(self.engine)

    def resume_s(self) -> float:
        """Ask until the small prompt is restored; return how long that took."""
        return wait_until(lambda: self.ask_small().restored_tokens == len(SMALL), 30, "hits again")

    def ask_prompt(self) -> Answer:
        """Ask until the long prompt is restored: on a busy machine the daemon may be too late for one request."""
        return ask_until_restored(self.engine, PREFIX + QUESTION, len(PREFIX))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """An engine whose daemon does not run."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)))
    with running_stack(options, start_daemon=False) as stack, stack.engine() as engine:
        ask(engine, SMALL)
        reference = prefix_cache_hit(engine, PREFIX, QUESTION)
        yield World(stack, engine, reference)


def test_absent_daemon_is_named_once_with_the_remedy(world: World) -> None:
    """The fixture's requests were answered; the log says what to do, once."""
    lines = [line for line in world.engine.log_text().splitlines() if "no kvtier-daemon answers" in line]
    assert len(lines) == 1
    assert str(world.stack.daemon.socket) in lines[0]
    assert "start `kvtier-daemon`" in lines[0]
    assert "start `kvtier-daemon`" in world.stack.cli("list", expect=3).stderr


def test_daemon_comes_later(world: World, compare: Comparisons, note: Note) -> None:
    """vLLM attaches by itself within 2 s."""
    world.stack.daemon.start()
    attach_s = world.stack.wait_attached(world.engine)
    note(f"attached {attach_s:.2f} s after the daemon's start")
    assert attach_s < HANG_S
    world.stack.pin("small", SMALL, world.engine)
    world.stack.pin("prompt", PREFIX, world.engine)
    compare.restored_equals_prefix_cache_hit(world.ask_prompt(), world.reference)
    note(f"hits after {world.resume_s():.2f} s")


def test_killed_daemon(world: World, compare: Comparisons, note: Note) -> None:
    """kill -9, start: misses meanwhile, hits within 2 s of its return."""
    world.ensure_daemon()
    world.stack.daemon.kill()
    _check_misses(world, note)
    world.stack.daemon.start()
    _check_resumes(world, note)
    compare.restored_equals_prefix_cache_hit(world.ask_prompt(), world.reference)


def test_stopped_daemon(world: World, compare: Comparisons, note: Note) -> None:
    """SIGSTOP: the first request waits 0.25 s, the next ones do not; SIGCONT: hits again."""
    world.ensure_daemon()
    world.stack.daemon.signal(signal.SIGSTOP)
    _check_misses(world, note)
    world.stack.daemon.signal(signal.SIGCONT)
    _check_resumes(world, note)
    compare.restored_equals_prefix_cache_hit(world.ask_prompt(), world.reference)


def test_daemon_killed_again_and_again_under_load(world: World, compare: Comparisons, note: Note) -> None:
    """Whatever a kill -9 hits, a store, a load or a lookup: every request is answered right, nothing durable lost."""
    world.ensure_daemon()
    stack, engine = world.stack, world.engine
    stack.cli("evict", "small", "--force")
    stored, client = stack.stored_checksums(), Client(engine, PREFIX, QUESTION)
    assert len(stored) == len(PREFIX) // engine.options.block_size, "the long prompt's chunks"
    with client.asking() as answers:
        for round_ in range(4):
            if round_:
                stack.daemon.start()
                stack.wait_attached(engine)
            # Something to store at the moment of the kill.
            stack.cli("evict", "small", "--force")
            time.sleep(0.2 * round_)
            stack.daemon.kill()
            time.sleep(0.2 * round_)
    note(f"through 4 kills {client.summary(answers)}")
    stack.daemon.start()  # nothing is asked any longer: what is lost now is not stored again
    stack.wait_attached(engine)
    after = stack.stored_checksums()
    compare.same_bytes(stored, {key: value for key, value in after.items() if key in stored})
    compare.restored_equals_prefix_cache_hit(world.ask_prompt(), world.reference)
    assert {prompt["name"] for prompt in stack.json("list")} == {"small", "prompt"}


def test_stopping_the_daemon_is_clean(world: World) -> None:
    """SIGTERM with an engine attached: it drains and leaves no arena behind; vLLM goes on."""
    world.ensure_daemon()
    daemon = world.stack.daemon
    daemon.signal(signal.SIGTERM)
    assert daemon.wait_ended(60) == 0, daemon.log_tail()
    assert list(daemon.arena_dir.rglob("arena-*")) == []
    assert ask(world.engine, PREFIX + QUESTION).text == world.reference.text


def _check_misses(world: World, note: Note) -> None:
    """Check what the first request pays without a daemon, and that the next ones pay nothing.

    Each is measured beside a request that has nothing to do with kvtier, for which the connector sends nothing.
    """
    pairs = [(world.ask_small(), world.ask_unpinned()) for _ in range(NUM_PAIRS)]
    assert not any(answer.cached_tokens for pair in pairs for answer in pair)
    first_s = pairs[0][0].seconds - statistics.median(unpinned.seconds for _, unpinned in pairs)
    rest_s = statistics.median(pinned.seconds - unpinned.seconds for pinned, unpinned in pairs[1:])
    note(f"MISS decided after {first_s * 1000:+.0f} ms at first, {rest_s * 1000:+.0f} ms from then on (median)")
    assert first_s < HANG_S
    assert rest_s < HANG_S


def _check_resumes(world: World, note: Note) -> None:
    resume_s = world.resume_s()
    note(f"hits again {resume_s:.2f} s after its return")
    assert resume_s < HANG_S
