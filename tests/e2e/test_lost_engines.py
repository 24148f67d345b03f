"""Two engines of one model beside each other, each killed in the middle of its work: what they held comes back.

The tests run in order, on one daemon. An engine is stopped at a moment at which the daemon says that it holds
something, looked at again, and killed.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import httpx
import openai
import pytest

from benchmarks.models import TINY, cached_model
from benchmarks.processes import Engine, EngineOptions, wait_until
from kvtier._pb.cache_pb2 import DaemonStatus, SessionStatus
from tests.e2e.conftest import Note
from tests.e2e.harness import PATIENT, Stack, running_stack, tokens
from tests.e2e.traffic import HANG_S, Client

PREFIX, QUESTION, OTHER = tokens(1, 896), tokens(2, 40), tokens(3, 896)
NUM_TRIES = 200
SETTLE_S = 0.1
EVICT_PERIOD_S = 0.2


@dataclass
class World:
    """What the tests share: a daemon, and two engines of one model."""

    stack: Stack
    one: Engine
    other: Engine

    def status(self) -> DaemonStatus:
        """Return the daemon's status."""
        with self.stack.admin() as client:
            return client.status()

    def session(self, engine: Engine) -> SessionStatus:
        """Return the engine's session; the process that opened it is a child of the engine's leader."""
        (found,) = (each for each in self.status().sessions if os.getpgid(each.pid) == engine.pid)
        return found

    def kill(self, engine: Engine) -> str:
        """Kill -9 a stopped engine; check that everything of its session comes back, and say how fast."""
        session = self.session(engine)
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
        return {session.session_id for session in self.status().sessions}


def stop_while(world: World, engine: Engine, client: Client, condition: Callable[[SessionStatus], bool]) -> None:
    """Stop an engine that is asked by `client` at a moment at which its session meets a condition."""
    session_id = world.session(engine).session_id

    def meets() -> bool:
        return any(each.session_id == session_id and condition(each) for each in world.status().sessions)

    stop = threading.Event()
    thread = threading.Thread(target=_ask_until, args=(stop, client), daemon=True)  # its last request is never answered
    thread.start()
    try:
        for _ in range(NUM_TRIES):
            wait_until(meets, HANG_S, "the moment")
            os.killpg(engine.pid, signal.SIGSTOP)
            time.sleep(SETTLE_S)
            if meets():
                return
            os.killpg(engine.pid, signal.SIGCONT)
        pytest.fail(f"the moment was gone {NUM_TRIES} times")
    finally:
        stop.set()


def _ask_until(stop: threading.Event, client: Client) -> None:
    with suppress(openai.OpenAIError, httpx.HTTPError, TimeoutError):
        while not stop.is_set():
            client.ask()


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
        stack.pin("prompt", PREFIX, engines[0])
        world = World(stack, *engines)
        wait_until(lambda: len(world.session_ids()) == len(engines), HANG_S, "both engines to attach")
        yield world


def test_two_engines_of_a_model_share_its_prompts(world: World, note: Note) -> None:
    """One stored it, both restore it, both at the same time."""
    clients = [Client(engine, PREFIX, QUESTION) for engine in (world.one, world.other)]
    with clients[0].asking() as first, clients[1].asking() as second:
        time.sleep(1.0)
    for client, answers in zip(clients, (first, second), strict=True):
        note(client.summary(answers))
        assert {answer.restored_tokens for answer in answers} == {len(PREFIX)}
    assert len(world.status().namespaces) == 1


def test_killed_in_mid_store(world: World, note: Note) -> None:
    """A stopped engine keeps its slots; once it is dead they are free. The other is served all the while."""
    engine = world.one
    wait_until(lambda: world.session(engine).num_store_grants > 0, HANG_S, "standing credits")
    num_standing = world.session(engine).num_store_grants
    other = Client(world.other, PREFIX, QUESTION)
    with other.asking() as answers, storing_again(world):
        # Credits are topped up as stores begin: what is above them is being written.
        stop_while(world, engine, Client(engine, OTHER, QUESTION), lambda each: each.num_store_grants > num_standing)
        note(world.kill(engine))
    note(f"the other engine meanwhile: {other.summary(answers)}")


def test_killed_in_mid_load(world: World, note: Note) -> None:
    """Its leases end with it, and what they protected may be evicted."""
    stop_while(world, world.other, Client(world.other, PREFIX, QUESTION), lambda each: each.num_leases > 0)
    note(world.kill(world.other))
    world.stack.cli("evict", "--all", "--force", "--tier", "host")
    status = world.status()
    assert status.host.num_chunks == len(status.sessions) == 0


@contextmanager
def storing_again(world: World) -> Iterator[None]:
    """Drop a pinned prompt again and again, so that every request for it stores it."""
    world.stack.pin("second", OTHER, None, "--no-warm")
    stop = threading.Event()

    def evict() -> None:
        with world.stack.admin() as client:
            while not stop.wait(EVICT_PERIOD_S):
                client.evict("second", force=True)

    thread = threading.Thread(target=evict)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
