"""Two engines of one model beside each other, each killed in the middle of its work: what they held comes back.

The tests run in order, on one daemon. An engine is stopped at a moment at which the daemon says that it holds
something, looked at again, and killed.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from tests.e2e.conftest import Note
from tests.e2e.harness import HANG_S, PATIENT, Stack, running_stack, tokens
from tests.e2e.moments import session_of, standing_credits, stop_while, storing_again
from tests.e2e.traffic import Client

PREFIX, QUESTION, OTHER = tokens(1, 896), tokens(2, 40), tokens(3, 896)


@dataclass
class World:
    """What the tests share: a daemon, and two engines of one model."""

    stack: Stack
    one: Engine
    other: Engine

    def kill(self, engine: Engine) -> str:
        """Kill -9 a stopped engine; check that everything of its session comes back, and say how fast."""
        session = session_of(self.stack, engine)
        arena_dir = self.stack.daemon.arena_dir
        assert (arena_dir / f"session-{session.session_id}.lock").exists()
        start_s = time.monotonic()
        engine.kill()
        wait_until(lambda: session.session_id not in self.session_ids(), HANG_S, "the session to end")
        gone_s = time.monotonic() - start_s
        assert not (arena_dir / f"session-{session.session_id}.lock").exists()
        held = f"{session.num_leases} leases and {session.num_store_grants} slots"
        return f"killed with {held}: all of it free {gone_s:.2f} s after the signal"

    def session_ids(self) -> set[str]:
        """Return the sessions that `kvtier status` would show."""
        return {session.session_id for session in self.stack.status().sessions}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Both engines start at once."""
    options = EngineOptions(model=str(cached_model("tiny", TINY)), connector_config=PATIENT)
    with running_stack(options, host_bytes="32MiB") as stack, ExitStack() as exits:
        engines = [exits.enter_context(stack.unstarted_engine()) for _ in range(2)]
        for engine in engines:
            engine.launch()
        for engine in engines:
            engine.wait_started()
        world = World(stack, *engines)
        wait_until(lambda: len(world.session_ids()) == len(engines), HANG_S, "both engines to attach")
        stack.pin("prompt", PREFIX, engines[0])
        for engine in engines:  # the other one is notified a little later
            Client(engine, PREFIX, QUESTION).resume_s()
        yield world


def test_two_engines_of_a_model_share_its_prompts(world: World, note: Note) -> None:
    """One stored it, both restore it, both at the same time."""
    clients = [Client(engine, PREFIX, QUESTION) for engine in (world.one, world.other)]
    with clients[0].asking() as first, clients[1].asking() as second:
        time.sleep(1.0)
    for client, answers in zip(clients, (first, second), strict=True):
        note(client.summary(answers))
        assert {answer.restored_tokens for answer in answers} == {len(PREFIX)}
    assert len(world.stack.status().namespaces) == 1


def test_killed_in_mid_store(world: World, note: Note) -> None:
    """A stopped engine keeps its slots; once it is dead they are free. The other is served all the while."""
    stack, engine = world.stack, world.one
    num_standing = standing_credits(stack, engine)
    other = Client(world.other, PREFIX, QUESTION)
    with other.asking() as answers, storing_again(stack, "second", OTHER):
        stop_while(stack, engine, Client(engine, OTHER, QUESTION), lambda each: each.num_store_grants > num_standing)
        note(world.kill(engine))
    note(f"the other engine meanwhile: {other.summary(answers)}")


def test_killed_in_mid_load(world: World, note: Note) -> None:
    """Its leases end with it, and what they protected may be evicted."""
    stop_while(world.stack, world.other, Client(world.other, PREFIX, QUESTION), lambda each: each.num_leases > 0)
    note(world.kill(world.other))

    def all_evicted() -> bool:
        world.stack.cli("evict", "--all", "--force", "--tier", "host")
        return not world.stack.status().host.num_chunks

    # What the other engine has stored last stays until it is on disk.
    wait_until(all_evicted, HANG_S, "host memory to be empty")
    assert not world.stack.status().sessions
