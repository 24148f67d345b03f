"""Whatever becomes of requests, sessions, slots and jobs: the right KV is read, and nothing is left over.

After every step: no lease without an owner, no slot in two states, every chunk stored with the bytes of its key. At the
end: every request has ended, and its leases, jobs and credits are back.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvtier._pb import engine_pb2 as pb
from tests.simulation.engine import BLOCK_TOKENS, SimulatedEngine
from tests.unit.connector.harness import LOOKUP_TIMEOUT_S

FULL = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=16, dtype=torch.bfloat16, sliding_window=2 * BLOCK_TOKENS
)
NUM_SLOTS = 24
MAX_UNFINISHED = 8
NUM_EXAMPLES = int(os.environ.get("KVTIER_LIFECYCLES", "0"))
MAX_STEPS_TO_END = 600
# Prompts share prefixes: 0 is a prefix of 1, 2 differs from 1 after three blocks, 3 has nothing in common.
_LONG = range(100, 100 + 6 * BLOCK_TOKENS)
PREFIXES: Sequence[list[int]] = (
    list(_LONG[: 2 * BLOCK_TOKENS]),
    list(_LONG),
    [*_LONG[: 3 * BLOCK_TOKENS], *range(300, 300 + 2 * BLOCK_TOKENS)],
    list(range(400, 400 + 4 * BLOCK_TOKENS)),
)
SETTINGS = settings(
    max_examples=NUM_EXAMPLES or 20,
    derandomize=not NUM_EXAMPLES,
    stateful_step_count=200,
    deadline=None,
    report_multiple_bugs=False,
)
RARELY = st.integers(0, 7).map(lambda number: number == 7)  # an example is long enough to see it
SALTS = ("", "", "", "salt")


class LifecycleMachine(RuleBasedStateMachine):
    """One engine, one daemon. Subclasses say of what kind."""

    specs: Sequence[Any] = (FULL,)
    num_blocks = 16
    blocks_per_chunk = 1
    is_async = False
    stores_all = False
    gpu_pin = "off"
    kv_role = "kv_both"
    is_public = False  # pins without a salt are
    seen: ClassVar[Counter[str]] = Counter()

    @initialize()
    def start(self) -> None:
        self.engine = SimulatedEngine(
            self.specs,
            num_blocks=self.num_blocks,
            num_slots=NUM_SLOTS,
            blocks_per_chunk=self.blocks_per_chunk,
            is_async=self.is_async,
            stores_all=self.stores_all,
            gpu_pin=self.gpu_pin,
            kv_role=self.kv_role,
        )
        self.daemon = self.engine.daemon
        self.num_requests = self.num_pins = 0
        self.wanted: dict[str, int] = {}
        self.attach()
        self.pin(prefix=1, salt="", pinned=True)
        # What is interesting happens to prompts that are held, and not by vLLM: begin with one.
        self.request(
            prefix=1, tail=1, question=0, max_tokens=1, salt="", count=1, skip=False, num_steps=30, alone=False
        )
        self.forget(running=False)

    @rule(at_once=st.booleans())
    def hurry(self, at_once: bool) -> None:
        """How soon the daemon answers from now on."""
        self.engine.answers_at_once = at_once

    # Clients

    @precondition(lambda self: len(self.engine.unfinished) < MAX_UNFINISHED)
    @rule(
        prefix=st.sampled_from((0, 1, 1, 1, 2, 3)),
        tail=st.integers(0, BLOCK_TOKENS + 1),
        question=st.integers(0, 3),
        max_tokens=st.integers(1, BLOCK_TOKENS + 2),
        salt=st.sampled_from(SALTS),
        count=st.sampled_from((1, 1, 1, 3)),
        skip=RARELY,
        num_steps=st.integers(0, 6),
        alone=RARELY,
    )
    def request(
        self,
        prefix: int,
        tail: int,
        question: int,
        max_tokens: int,
        salt: str,
        count: int,
        skip: bool,
        num_steps: int,
        alone: bool,
    ) -> None:
        """One or, as with n > 1, several of one prompt. vLLM has forgotten what is unused; mostly it has a daemon."""
        if self.daemon.session_id is None and not alone:
            self.attach()
        self.forget(running=False)
        if self.is_public and question % 2:
            salt = "pepper"  # most requests have a salt
        prompt = PREFIXES[prefix] + [600 + question * 50 + number for number in range(tail)]
        for _ in range(count):
            self.num_requests += 1
            req_id = f"r{self.num_requests}"
            self.wanted[req_id] = max_tokens
            self.engine.add(req_id, prompt, max_tokens=max_tokens, salt=salt, skip=skip)
        self.serve(num_copies=2, num_steps=num_steps)

    @precondition(lambda self: self.engine.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.engine.unfinished)))

    @rule(running=st.booleans())
    def forget(self, running: bool) -> None:
        """`/reset_prefix_cache`, with `reset_running_requests`."""
        self.reset(running=running, connector=False)

    @rule(running=st.booleans(), really=RARELY)
    def forget_all(self, running: bool, really: bool) -> None:
        """The same with `reset_external`."""
        if really:
            self.reset(running=running, connector=True)

    def reset(self, *, running: bool, connector: bool) -> None:
        try:
            self.engine.reset(running=running, connector=connector)
        except RuntimeError as error:  # vLLM cannot take blocks from a load, nor from a step that is executed
            if not (running and str(error).startswith("Failed to reset KV cache")):
                raise

    # Operators

    @precondition(lambda self: self.daemon.session_id is not None)
    @rule(prefix=st.integers(0, len(PREFIXES) - 1), salt=st.sampled_from(SALTS), pinned=st.booleans())
    def pin(self, prefix: int, salt: str, pinned: bool) -> None:
        self.num_pins += 1
        pin = pb.Pin(pin_id=f"p{self.num_pins}", name="p", tokens=PREFIXES[prefix], cache_salt=salt, pinned=pinned)
        if self.is_public and pinned and not salt:
            pin.public = True
            self.engine.public.append(PREFIXES[prefix])
        self.daemon.pins[pin.pin_id] = pin
        self.engine.link.bind(pin)

    @precondition(lambda self: self.daemon.pins and self.daemon.session_id is not None)
    @rule(data=st.data(), really=RARELY)
    def unpin(self, data: st.DataObject, really: bool) -> None:
        if not really:
            return
        pin_id = data.draw(st.sampled_from(sorted(self.daemon.pins)))
        del self.daemon.pins[pin_id]
        self.daemon.bound.pop(pin_id, None)
        self.engine.link.unbind(pin_id)

    # The daemon

    @precondition(lambda self: any(not acquire.is_answered for acquire in self.daemon.acquires.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        open_ids = [number for number, acquire in self.daemon.acquires.items() if not acquire.is_answered]
        self.daemon.answer(data.draw(st.sampled_from(open_ids)))

    @precondition(lambda self: self.daemon.promotions)
    @rule(data=st.data(), badly=RARELY)
    def promote(self, data: st.DataObject, badly: bool) -> None:
        self.daemon.promote(data.draw(st.sampled_from(self.daemon.promotions)), well=not badly)

    @precondition(lambda self: self.daemon.evictable())
    @rule(data=st.data(), for_good=RARELY)
    def evict(self, data: st.DataObject, for_good: bool) -> None:
        self.daemon.evict(data.draw(st.sampled_from(self.daemon.evictable())), write_back=not for_good)

    @precondition(lambda self: self.daemon.session_id is not None)
    @rule(really=RARELY)
    def lose_session(self, really: bool) -> None:
        if really:
            self.daemon.lose_session()

    @rule()
    def sweep(self) -> None:
        self.daemon.sweep()

    @precondition(lambda self: self.daemon.session_id is not None)
    @rule(really=RARELY)
    def restart(self, really: bool) -> None:
        """The daemon is gone and back before anybody steps, and gives out the slots again."""
        if really:
            self.daemon.lose_session()
            self.daemon.sweep()
            self.attach()

    @precondition(lambda self: self.daemon.session_id is None)
    @rule()
    def attach(self) -> None:
        self.engine.attach()
        for pin in self.daemon.pins.values():
            self.engine.link.bind(pin)

    # vLLM

    @rule(num_copies=st.integers(0, 3), num_steps=st.integers(1, 4))
    def step(self, num_copies: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step(num_copies)

    @rule(num_copies=st.integers(0, 3), num_steps=st.integers(1, 30))
    def serve(self, num_copies: int, num_steps: int) -> None:
        """For this many steps the daemon answers at once."""
        for _ in range(num_steps):
            self.engine.step(num_copies)
            self.answer_all()

    def answer_all(self) -> None:
        self.engine.answer_probe()
        for number, acquire in list(self.daemon.acquires.items()):
            if not acquire.is_answered:
                self.daemon.answer(number)

    @rule()
    def wait(self) -> None:
        """Longer than an answer may take."""
        self.engine.clock.now_s += LOOKUP_TIMEOUT_S * 1.1

    @invariant()
    def slots_have_one_state(self) -> None:
        if not hasattr(self, "engine"):
            return
        for slot in self.daemon.slots:
            assert sum((slot.key is not None, slot.loading is not None, slot.granted_to is not None)) <= 1

    @invariant()
    def leases_have_owners(self) -> None:
        """What the daemon leases to the live session, the scheduler knows as a lease of a request."""
        if not hasattr(self, "engine"):
            return
        self.engine.deliver()
        known = self.engine.manager._lookups._leases
        if self.daemon.session_id is not None and not self.engine.link.events:
            assert set(self.daemon.acquires) <= set(known)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        if self.daemon.session_id is None:
            self.attach()
        num_steps = 0
        while not self.engine.is_idle:
            num_steps += 1
            assert num_steps < MAX_STEPS_TO_END, f"these requests do not end: {self.engine.unfinished}"
            self.engine.step(num_copies=3)
            self.answer_all()
            for slot in self.daemon.promotions:
                self.daemon.promote(slot, well=True)
        for _ in range(3):  # a word, the answer to it, and what that changes
            self.engine.receive()
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        daemon, manager = self.daemon, self.engine.manager
        daemon.sweep()
        for req_id, max_tokens in self.wanted.items():
            assert req_id in self.engine.aborted or self.engine.num_received[req_id] == max_tokens
        assert not daemon.acquires
        assert not any(slot.leases for slot in daemon.slots)
        assert not manager._requests
        assert not manager._lookups._leases
        assert not manager.stores._writing
        assert not manager.stores._orphaned
        granted = {number for number, slot in enumerate(daemon.slots) if slot.granted_to is not None}
        assert granted == {grant.slot for grant in manager.stores._credits}
        seen = self.seen
        seen["requests"] += self.num_requests
        seen["aborted"] += len(self.engine.aborted)
        seen["chunks loaded"] += self.engine.copier.num_loaded
        seen["loads failed"] += self.engine.copier.num_failed
        seen["chunks stored"] += self.daemon.num_stored
        seen["preemptions"] += self.engine.num_preemptions
        seen["public tokens read with a salt"] += self.engine.num_read_public


class AsyncMachine(LifecycleMachine):
    """Async scheduling: a step is scheduled before the output of the one before is known."""

    is_async = True


class TinyPoolMachine(LifecycleMachine):
    """Hardly blocks for two requests: preemption."""

    num_blocks = 10


class AsyncTinyPoolMachine(TinyPoolMachine):
    """Preemption of requests whose output is not known yet."""

    is_async = True


class ProducerMachine(AsyncTinyPoolMachine):
    """The same, where vLLM takes blocks from requests whose step is on its way: it keeps those of a consumer only."""

    kv_role = "kv_producer"
    stores_all = True


class StoreAllMachine(LifecycleMachine):
    """Every whole chunk is stored."""

    stores_all = True
    num_blocks = 14


class LongChunksMachine(LifecycleMachine):
    """Two vLLM blocks are one chunk."""

    blocks_per_chunk = 2


class HybridMachine(LifecycleMachine):
    """Full attention and a sliding window."""

    specs = (FULL, WINDOW)
    num_blocks = 30


class HybridAsyncStoreAllMachine(HybridMachine):
    """The same with unpinned chunks, and async scheduling."""

    stores_all = True
    is_async = True


class SoftPinsMachine(LifecycleMachine):
    """Pinned blocks move in vLLM's free queue."""

    gpu_pin = "soft"
    num_blocks = 14


class SoftPinsAsyncMachine(SoftPinsMachine):
    """The same in a tiny pool, with async scheduling: preemption, and frees that come late."""

    is_async = True
    num_blocks = 10


class HardPinsMachine(LifecycleMachine):
    """Pinned blocks are held, until requests need the blocks."""

    gpu_pin = "hard"
    num_blocks = 14


class HardPinsAsyncMachine(HardPinsMachine):
    """The same in a tiny pool, with async scheduling."""

    is_async = True
    num_blocks = 10


class PublicMachine(LifecycleMachine):
    """Tenants with salts beside public prompts."""

    is_public = True


class PublicStoreAllMachine(PublicMachine):
    """The same with unpinned chunks, a small pool and async scheduling."""

    stores_all = True
    is_async = True
    num_blocks = 12


class PublicHybridMachine(PublicMachine):
    """The same with full attention and a sliding window."""

    specs = (FULL, WINDOW)
    num_blocks = 30
    stores_all = True


class PublicLongChunksMachine(PublicMachine):
    """The same with chunks of two blocks."""

    blocks_per_chunk = 2


MACHINES = (
    LifecycleMachine,
    AsyncMachine,
    TinyPoolMachine,
    AsyncTinyPoolMachine,
    ProducerMachine,
    StoreAllMachine,
    LongChunksMachine,
    HybridMachine,
    HybridAsyncStoreAllMachine,
    SoftPinsMachine,
    SoftPinsAsyncMachine,
    HardPinsMachine,
    HardPinsAsyncMachine,
    PublicMachine,
    PublicStoreAllMachine,
    PublicHybridMachine,
    PublicLongChunksMachine,
)


@pytest.mark.parametrize("machine", MACHINES)
def test_lifecycles(machine: type[LifecycleMachine], record_property: Callable[[str, object], None]) -> None:
    """A seeded short run in CI; KVTIER_LIFECYCLES=1000 for a long one."""
    machine.seen = Counter()
    run_state_machine_as_test(machine, settings=SETTINGS)
    record_property("note", ", ".join(f"{count} {what}" for what, count in machine.seen.items()))
    assert machine.seen["chunks loaded"]
    assert bool(machine.seen["public tokens read with a salt"]) is machine.is_public
