"""Whatever is wrong with the daemon, its memory, its disk or its files: a serving vLLM answers, and answers right.

The tests run in order, on one engine that is asked without pause. docs/faults.md says what users see of each fault.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from signal import SIGCONT, SIGSTOP

import pytest

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from kvtier._pb.cache_pb2 import PromptStatus
from tests.e2e.conftest import Note
from tests.e2e.harness import HANG_S, Stack, ask, forget_gpu, running_stack, tokens
from tests.e2e.small_mounts import SmallMounts, may_mount, small_mounts
from tests.e2e.traffic import Client

BLOCK = 32
PREFIX, QUESTION, OTHER = tokens(1, 896), tokens(2, 40), tokens(3, 896)
NUM_CHUNKS = len(PREFIX) // BLOCK
HOST_BYTES = "32MiB"
SECONDS = 1.5

needs_mounts = pytest.mark.skipif(not may_mount(), reason="needs the right to mount")


@dataclass
class World:
    """What the tests share.

    Attributes:
        mounts: The small file systems below the daemon's arenas and disk, if they can be had here.
        attach_s: What passed from the answer of vLLM's /health to its session with the daemon.
    """

    stack: Stack
    client: Client
    mounts: SmallMounts | None
    attach_s: float

    def start_with_rows(self, num_rows: int) -> None:
        """Start the daemon with host memory for this many chunks, and wait for the engine."""
        self.stack.daemon.set_variable("KVTIER_HOST_BYTES", str(num_rows * self.row_bytes))
        self.stack.daemon.start()
        self.stack.wait_attached(self.client.engine)

    def start_as_before(self) -> None:
        """Start the daemon with the memory that it has in the other tests."""
        self.stack.daemon.set_variable("KVTIER_HOST_BYTES", HOST_BYTES)
        self.stack.daemon.start()
        self.stack.wait_attached(self.client.engine)

    @property
    def row_bytes(self) -> int:
        """Bytes of a chunk in host memory: one layer's keys and values of a block, over all layers."""
        return TINY.num_layers * 2 * BLOCK * TINY.num_kv_heads * TINY.head_dim * 2

    def is_durable(self, name: str) -> bool:
        """Say whether every chunk of a prompt is on disk."""
        with self.stack.admin() as client:
            return client.get(name).state == PromptStatus.DURABLE

    def ask_until_durable(self, name: str, prompt: list[int]) -> float:
        """Ask for a pinned prompt, so that it is captured, until all of it is; return how long that took."""

        def send() -> None:
            forget_gpu(self.client.engine)
            ask(self.client.engine, prompt + QUESTION, max_tokens=1, alone=False)

        return self.stack.ask_until_durable(name, send)

    def forget(self, name: str) -> None:
        """Unpin and evict a prompt."""
        self.stack.cli("unpin", name)
        self.stack.cli("evict", name)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """An engine and a daemon, started at the same moment, with a pinned prompt."""
    # Computing is taken to be slow: else a promotion, on a busy machine, would rightly not be waited for.
    config = {"prefill_tokens_per_s": 20}
    options = EngineOptions(model=str(cached_model("tiny", TINY)), block_size=BLOCK, connector_config=config)
    settings = {"TUNED_DISK_RESERVE_BYTES": "0"}
    with ExitStack() as exits:
        stack = exits.enter_context(
            running_stack(options, start_daemon=False, host_bytes=HOST_BYTES, daemon_settings=settings)
        )
        mounts, engine = None, exits.enter_context(stack.unstarted_engine())
        if may_mount():
            stack.daemon.disk_dir.mkdir(mode=0o700)
            sizes = {stack.daemon.arena_dir: "40m", stack.daemon.disk_dir: "16m"}
            mounts = exits.enter_context(small_mounts(sizes, stack.home / "mounts.log"))
            # The engine must be gone before the file systems are.
            exits.callback(engine.stop)
            exits.callback(stack.daemon.stop)
            mounts.move_in(stack.daemon)
            mounts.move_in(engine)
        engine.launch()
        stack.daemon.start()
        engine.wait_started()
        attach_s = stack.wait_attached(engine)
        client = Client(engine, PREFIX, QUESTION)
        client.check(client.ask())
        yield World(stack, client, mounts, attach_s)


def test_started_together(world: World, note: Note) -> None:
    """Neither waits for the other."""
    note(f"attached {world.attach_s:.2f} s after vLLM's first /health")
    assert world.stack.status().namespaces[0].row_bytes == world.row_bytes
    world.stack.pin("prompt", PREFIX, world.client.engine)
    note(f"computed in {world.client.references[0].seconds:.2f} s; restored after {world.client.resume_s():.2f} s")


def test_slow_daemon(world: World, note: Note) -> None:
    """A daemon that gets 0.1 s of every 0.5 s: stopped and continued again and again."""
    daemon = world.stack.daemon
    try:
        with world.client.asking() as answers:
            for _ in range(5):
                daemon.signal(SIGSTOP)
                time.sleep(0.4)
                daemon.signal(SIGCONT)
                time.sleep(0.1)
    finally:
        daemon.signal(SIGCONT)
    note(f"{world.client.summary(answers)}; hits again after {world.client.resume_s():.2f} s")


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_another_host_bytes(world: World, note: Note, end: str) -> None:
    """Less than the pinned prompt takes, then plenty: the limit is kept, what fits is used, then all is restored."""
    daemon, client = world.stack.daemon, world.client
    for num_rows in (16, 10 * NUM_CHUNKS):
        with client.asking() as answers:
            getattr(daemon, end)()
            world.start_with_rows(num_rows)
            time.sleep(SECONDS)
        note(f"{num_rows} rows: {client.summary(answers)}")
        host = world.stack.status().host
        assert host.used_bytes <= host.limit_bytes == num_rows * world.row_bytes
    note(f"hits again after {client.resume_s():.2f} s")


def test_pins_larger_than_host_memory(world: World, note: Note) -> None:
    """Memory for one of two pinned prompts: both become durable, and whatever is not in memory is a miss."""
    daemon, client = world.stack.daemon, world.client
    daemon.stop()
    world.start_with_rows(NUM_CHUNKS)
    world.stack.pin("other", OTHER, None, "--no-warm")
    captured_s = world.ask_until_durable("other", OTHER)
    with client.asking() as answers:
        time.sleep(SECONDS)
    note(f"the second prompt durable after {captured_s:.2f} s; {client.summary(answers)}")
    host = world.stack.status().host
    assert host.used_bytes <= host.limit_bytes
    world.forget("other")
    daemon.stop()
    world.start_as_before()
    note(f"hits again after {client.resume_s():.2f} s")


@needs_mounts
def test_full_disk(world: World, note: Note) -> None:
    """What is pinned then is served from memory, and becomes durable by itself when there is space."""
    assert world.mounts is not None
    stack, client = world.stack, world.client
    stack.pin("other", OTHER, None, "--no-warm")
    with world.mounts.filled(stack.daemon.disk_dir):
        ask(client.engine, OTHER + QUESTION, max_tokens=1)
        with client.asking() as answers:
            time.sleep(SECONDS)
        assert not world.is_durable("other")
        note(client.summary(answers))
    note(f"durable {world.ask_until_durable('other', OTHER):.2f} s after there was space again")
    world.forget("other")


@needs_mounts
def test_full_shared_memory(world: World, note: Note) -> None:
    """The daemon starts, the engine is refused with the reason, and is let in when there is memory."""
    assert world.mounts is not None
    daemon, client = world.stack.daemon, world.client
    daemon.stop()
    refusal = "has no space for an arena"
    with world.mounts.filled(daemon.arena_dir), client.asking() as answers:
        daemon.start()
        wait_until(lambda: refusal in client.engine.log_text(), HANG_S, "the engine to be refused")
    note(client.summary(answers))
    note(f"hits again {client.resume_s():.2f} s after there was memory (a refused engine asks every 10 s)")


@pytest.mark.parametrize("removed", ["socket", "arena", "lock", "folder"])
def test_removed_files(world: World, note: Note, removed: str) -> None:
    """The daemon notices, and starts again in place: no operator has to restart anything."""
    daemon, client = world.stack.daemon, world.client
    pid = daemon.pid
    arena_dir = world.mounts.seen(daemon.arena_dir) if world.mounts is not None else daemon.arena_dir
    patterns = {"arena": "arena-*", "lock": "session-*", "folder": "*"}
    paths = [daemon.socket] if removed == "socket" else list(arena_dir.glob(patterns[removed]))
    assert paths
    num_starts = daemon.log_text().count("lifecycle ready")
    with client.asking() as answers:
        for path in paths:
            path.unlink(missing_ok=True)  # once the daemon has noticed, it removes the others itself
        started_s = wait_until(lambda: daemon.log_text().count("lifecycle ready") > num_starts, HANG_S, "a new start")
        world.stack.wait_attached(client.engine)
    note(f"served again after {started_s:.2f} s; {client.summary(answers)}; hits after {client.resume_s():.2f} s more")
    assert daemon.pid == pid
    assert daemon.is_running
