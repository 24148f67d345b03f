"""Proof by a live vLLM: a right pin verifies, one with other bytes under valid checksums is caught, nothing is left.

The tests of this file run in order, on one daemon and one engine after the other.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import wait_until
from kvtier._pb.cache_pb2 import QuarantineNamespaceRequest, ReleaseNamespaceRequest, VerifyPromptRequest, VerifyReport
from kvtier.client.admin import AdminClient
from kvtier.verification import ComparisonVerdict
from kvtier.verification.comparison import TOLERANCE
from tests.e2e.conftest import Note
from tests.e2e.harness import (
    ANSWER_S,
    EVICTING,
    Stack,
    Tokens,
    as_pinned,
    ask,
    forget_gpu,
    proven,
    running_stack,
    tokens,
)
from tests.fakes.operator import stub_of

PREFIX_TOKENS = 640
PLAIN, SALTED, OTHER, BUSY = (tokens(seed, PREFIX_TOKENS) for seed in (1, 2, 3, 4))


@dataclass
class World:
    """What the tests share."""

    stack: Stack
    engines: ExitStack
    engine: Engine

    def restart(self) -> None:
        """End the engine and start another."""
        self.engines.close()
        self.engine = self.engines.enter_context(self.stack.engine())
        self.stack.wait_attached(self.engine)

    def verify(self, name: str) -> VerifyReport:
        """Read every chunk of a prompt."""
        with stub_of(self.stack.daemon.socket) as stub:
            report: VerifyReport = stub.VerifyPrompt(VerifyPromptRequest(name=name))
        return report


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    options = EngineOptions(model=str(cached_model("tiny", TINY)), max_batched_tokens=256, connector_config=EVICTING)
    with running_stack(options) as stack, ExitStack() as engines:
        world = World(stack, engines, engines.enter_context(stack.engine()))
        stack.wait_attached(world.engine)
        stack.pin("plain", PLAIN, world.engine)
        stack.pin("salted", SALTED, world.engine, "--cache-salt", "own")
        yield world


@pytest.mark.parametrize(("prefix", "own_salt"), [(PLAIN, ""), (SALTED, "own")], ids=["plain", "salted"])
def test_a_right_pin_is_equal(world: World, note: Note, prefix: Tokens, own_salt: str) -> None:
    """vLLM's own prefix cache has the prompt, and is not used: the tokens come from kvtier."""
    before = world.engine.cached_by_source()
    found = proven(world.engine, prefix, own_salt)
    after = world.engine.cached_by_source()
    assert (found.verdict, found.why) == (ComparisonVerdict.EQUAL, "")
    assert found.restored_tokens == found.reference_tokens == PREFIX_TOKENS
    assert found.max_difference == 0, "alone in the engine both compute the same bits"
    assert after["host"] - before["host"] == PREFIX_TOKENS
    assert after["device"] - before["device"] == PREFIX_TOKENS
    note(f"{found.restored_tokens} tokens restored; largest difference {found.max_difference}")


def test_the_commands(world: World, note: Note) -> None:
    """`verify`, `ready`, `top` and `watch`, on pins that are right."""
    stack = world.stack
    assert stack.cli("ready", "--timeout", "60").stdout.startswith("ready: 2 of 2 prompts")
    with AdminClient(stack.daemon.socket) as client:
        events = client.watch_events(["prompt_verified"], timeout_s=ANSWER_S)
        shown = stack.cli("verify", "--all", "--url", world.engine.url).stdout
        assert "verified 2 prompts: 2 ok" in shown, shown
        assert [dict(event.fields)["name"] for _, event in zip(range(2), events, strict=False)] == ["plain", "salted"]
    for each in stack.json("verify", "-l", "!team", "--url", world.engine.url):
        assert (each["live"]["verdict"], each["live"]["restored_tokens"]) == ("EQUAL", PREFIX_TOKENS)
        assert each["live_namespace_ids"] == [stack.status().namespaces[0].namespace_id]
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(stack.cli, "watch", "prompt_verified", "--timeout", "10")
        while not watching.done():
            world.verify("plain")  # by no command: that would take as long on a busy machine
            time.sleep(0.1)
    assert " info prompt_verified " in watching.result().stdout
    frame = stack.cli("top", "--once").stdout
    assert "Pins: 2 (2 durable)" in frame
    note(frame)


def test_another_salt_restores_nothing(world: World) -> None:
    """Who does not know the salt of a pin is not restored it."""
    found = proven(world.engine, SALTED, "guessed")
    assert (found.verdict, found.restored_tokens) == (ComparisonVerdict.INCONCLUSIVE, 0)


def test_nothing_of_a_verification_is_stored_or_observed(world: World) -> None:
    num_before, stored = world.stack.status().disk.num_chunks, world.stack.counters()["stored_chunks"]
    observed = world.stack.counters()["requests_observed"]
    assert proven(world.engine, OTHER).restored_tokens == 0
    assert proven(world.engine, PLAIN).verdict is ComparisonVerdict.EQUAL
    ask(world.engine, OTHER, max_tokens=1)  # a user's, reported behind these
    wait_until(lambda: world.stack.counters()["requests_observed"] > observed, 60, "the user's request to be reported")
    assert world.stack.counters()["requests_observed"] == observed + 1
    assert (world.stack.status().disk.num_chunks, world.stack.counters()["stored_chunks"]) == (num_before, stored)


def test_beside_other_requests(world: World, note: Note) -> None:
    """Batches of other shapes round otherwise, also when KV is stored: a right pin is never called different for that.

    It was called so in one of twenty comparisons, when the reference's prefix was computed once for all attempts.
    """
    ends = threading.Event()

    def load(seed: int) -> None:
        while not ends.is_set():
            ask(world.engine, tokens(seed, 100), max_tokens=8, alone=False)

    threads = [threading.Thread(target=load, args=(100 + number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        world.stack.pin("busy", BUSY, world.engine)
        found = [proven(world.engine, PLAIN) for _ in range(8)]
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    note(f"beside 3 clients: {[(each.verdict.value, each.max_difference) for each in found]}")
    busy = proven(world.engine, BUSY)
    note(f"stored beside 3 clients: {busy}")
    assert all(each.verdict is not ComparisonVerdict.DIFFERENT for each in [*found, busy])


def test_a_quarantined_namespace_serves_nothing_until_it_is_released(world: World) -> None:
    (namespace,) = world.stack.status().namespaces
    with stub_of(world.stack.daemon.socket) as stub:
        stub.QuarantineNamespace(QuarantineNamespaceRequest(namespace_id=namespace.namespace_id, reason="a test"))
        forget_gpu(world.engine)
        assert proven(world.engine, PLAIN).restored_tokens == 0
        assert ask(world.engine, as_pinned(PLAIN), max_tokens=1).cached_tokens == 0
        stub.ReleaseNamespace(ReleaseNamespaceRequest(namespace_id=namespace.namespace_id))
    assert proven(world.engine, PLAIN).restored_tokens == PREFIX_TOKENS


def test_other_bytes_with_valid_checksums_are_caught(world: World, note: Note) -> None:
    """The rows of two chunks change places in the ledger: checksums are right, and one chunk is another prompt's."""
    stack = world.stack
    stack.pin("other", OTHER, world.engine)
    world.engines.close()
    stack.daemon.stop()
    num_chunks = swap_rows(stack, "plain", "other")
    stack.daemon.start()
    world.restart()
    (namespace,) = world.verify("plain").namespaces
    assert namespace.disk.num_verified_chunks == num_chunks, "checksums say that all is well"
    assert not namespace.disk.num_damaged_chunks
    found = proven(world.engine, PLAIN)
    note(f"one of {num_chunks} chunks is another prompt's: {found.why}")
    assert found.verdict is ComparisonVerdict.DIFFERENT, found
    assert found.max_difference is not None
    assert found.max_difference > 10 * TOLERANCE
    assert proven(world.engine, SALTED, "own").verdict is ComparisonVerdict.EQUAL


def test_verify_stops_the_namespace_that_differs(world: World) -> None:
    """As the test before has left it."""
    stack = world.stack
    shown = stack.cli("verify", "plain", "--url", world.engine.url, expect=1).stdout
    assert "DIFFERENT" in shown
    assert "QUARANTINED" in shown
    assert "QUARANTINED" in stack.cli("status").stdout
    (namespace,) = stack.status().namespaces
    assert namespace.quarantine_reason.startswith("kvtier verify: plain differs")
    assert proven(world.engine, SALTED, "own").restored_tokens == 0
    stack.cli("quarantine", namespace.namespace_id[:8], "--release")
    assert stack.cli("verify", "salted", "--url", world.engine.url).stdout.endswith("verified 1 prompt: 1 ok\n")


def swap_rows(stack: Stack, one: str, other: str) -> int:
    """Swap where one chunk of each prompt lies, while no daemon runs; return how many chunks each has."""
    with closing(sqlite3.connect(stack.daemon.disk_dir / "ledger.sqlite")) as ledger:
        keys = [_keys(ledger, name) for name in (one, other)]
        columns = "pack_id, offset, stored_bytes, raw_bytes, codec, checksum"
        sets = ", ".join(f"{name} = ?" for name in columns.split(", "))
        pair = [each[len(each) // 2] for each in keys]
        rows = [ledger.execute(f"SELECT {columns} FROM chunks WHERE key = ?", (key,)).fetchone() for key in pair]
        for key, row in zip(pair, reversed(rows), strict=True):
            ledger.execute(f"UPDATE chunks SET {sets} WHERE key = ?", (*row, key))
        ledger.commit()
    return len(keys[0])


def _keys(ledger: sqlite3.Connection, name: str) -> list[bytes]:
    query = "SELECT key_bytes, keys FROM bindings JOIN prompts USING (pin_id) WHERE name = ?"
    key_bytes, keys = ledger.execute(query, (name,)).fetchone()
    return [keys[start : start + key_bytes] for start in range(0, len(keys), key_bytes)]
