"""Lookup rounds beside a daemon that answers when it likes, and a vLLM that evicts while requests wait.

After every turn: what the daemon leases is one request's, and released once; a request reads what is ready under its
lease, and what is promoted if its load begins early, all of it and nothing else; it waits for an answer no longer than
the lookup timeout, for promotions no longer than computing would take, and for nothing while there is no session. A
daemon that does not answer is asked nothing, and no session is sent what was touched in another.
"""

import os
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvtier_connector.scheduler.lookups import Lookups

from kvtier._pb import engine_pb2 as pb
from kvtier.client.circuit_breaker import CircuitBreaker
from kvtier.client.engine_session import Attachment
from kvtier.client.outbox import Outbox
from kvtier.core.layout import ChunkKey
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror
from kvtier_connector.scheduler.forecasts import PrefillRate
from kvtier_connector.scheduler.lookup_planner import LookupPlanner
from kvtier_connector.scheduler.request_state import Phase, RequestState
from kvtier_connector.scheduler.touches import Touches
from kvtier_connector.session.pin_binder import BoundPin
from tests.fakes.daemon_model import add_resident

BLOCK_TOKENS = 4
NUM_BLOCKS = 6
LOOKUP_TIMEOUT_S = 0.25
TOKENS_PER_S = 50.0
NUM_RUNS = int(os.environ.get("KVTIER_LOOKUPS", "0")) or 10
NUM_TURNS = 1000
GROUP = GroupShape(group_idx=0, chunk_tokens=BLOCK_TOKENS, hashes_per_chunk=1, window_chunks=0)
HOST, MISS, PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.MISS, pb.ChunkResidency.PROMOTING


def _hashes(names: str) -> list[bytes]:
    return [name.encode().ljust(32, b".") for name in names]


# The second parts from the first after three blocks; of the third nothing is known.
PROMPTS: Sequence[list[bytes]] = (_hashes("abcdef"), _hashes("abcxyz"), _hashes("123456"))
KNOWN = tuple(GROUP.key(hashes, index, None) for hashes in PROMPTS[:2] for index in range(NUM_BLOCKS))


@dataclass
class Question:
    """An acquire as the daemon sees it.

    Attributes:
        waits_since_s: When its request began to wait for an answer.
        chunks: State and slot of what it has named and was not released.
    """

    req_id: str
    keys: list[ChunkKey]
    waits_since_s: float
    answered_s: float | None = None
    chunks: dict[ChunkKey, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Waiter:
    """A request.

    Attributes:
        hit: Blocks that vLLM has of it.
        loading: What a load job of it reads.
        is_over: vLLM has forgotten it, but for that job.
    """

    state: RequestState
    hashes: list[bytes]
    hit: int
    loading: list[ChunkKey] = field(default_factory=list)
    is_over: bool = False


class Run:
    """One engine's lookups; the run is daemon, vLLM and clock.

    Attributes:
        seen: How often what is rare came about.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.is_early = seed % 2 == 1  # loads may begin while chunks are promoted
        self.now_s, self.num_requests, self.num_slots = 100.0, 0, 0
        self.mirror, self.breaker, rate = (
            ChunkMirror([GROUP]),
            CircuitBreaker(LOOKUP_TIMEOUT_S),
            PrefillRate(TOKENS_PER_S),
        )
        planner = LookupPlanner([GROUP], self.mirror)
        self.touches = Touches(planner)
        self.lookups = Lookups(
            planner, self.touches, self.breaker, rate, ConnectorStats(), can_load_early=self.is_early
        )
        self.waiters: dict[str, Waiter] = {}
        self.outbox: Outbox | None = None
        self.questions: dict[int, Question] = {}
        self.past_ids: list[int] = []
        self.to_touch: set[ChunkKey] = set()
        self.seen: Counter[str] = Counter()
        self.attach()

    def turn(self) -> None:
        """After a while the daemon has said something, and vLLM asks for a request, or its load ends."""
        self.now_s += self.chance.choice((0.0, 0.0, 0.01, 0.1, 0.3))
        self.happen(self.chance.random())
        while self.chance.random() < 0.4:
            self.say()
        if sum(not waiter.is_over for waiter in self.waiters.values()) < self.chance.randrange(4):
            self.arrive()
        if self.waiters:
            self.go_on(self.chance.choice(list(self.waiters.values())))
        if self.chance.random() < 0.3:
            self.touches.flush()
        self.receive(None)
        self.check_owners()

    # The daemon

    def happen(self, chance: float) -> None:
        """What is rare."""
        if chance < 0.02 or (chance < 0.2 and self.outbox is None):
            self.attach()
        elif chance < 0.03:
            self.detach()
        elif chance < 0.1:
            self.mirror.set_held([self.chance.choice(KNOWN)], self.chance.random() < 0.7)
        elif chance < 0.3:
            self.breaker.close()

    def attach(self) -> None:
        """Another session, after the last one's end or instead of it."""
        self.detach()
        self.outbox = Outbox()
        self.breaker.close()
        attachment = Attachment(self.outbox, 0, pb.Welcome())
        self.lookups.attach(attachment)
        self.touches.attach(attachment)
        self.mirror.add(BoundPin(pin_id="p", keys=KNOWN, pinned=True))
        self.mirror.set_held(KNOWN, True)

    def detach(self) -> None:
        self.outbox = None
        self.lookups.attach(None)
        self.touches.attach(None)
        self.mirror.clear()
        self.past_ids += self.questions
        self.questions.clear()
        self.to_touch.clear()

    def say(self) -> None:
        """Answer a question: any chunks at first, later some that were promoted. Or one that was taken back."""
        number = self.chance.choice([*self.questions, *self.past_ids[-2:], 0])
        question = self.questions.get(number) or Question("", list(KNOWN), 0.0)
        indexes: Sequence[int] = range(len(question.keys))
        if question.answered_s is not None:
            indexes = [i for i in indexes if question.chunks.get(question.keys[i], (MISS, 0))[0] == PROMOTING]
        update = pb.AcquireUpdate(acquire_id=number, ready_in_s=self.chance.choice((0.0, 0.05, 60.0)))
        for index in indexes:
            self.num_slots += 1
            state = self.chance.choice((HOST, HOST, HOST, PROMOTING, PROMOTING, MISS))
            question.chunks[question.keys[index]] = (state, self.num_slots)
            slot = pb.SlotRef(slot=self.num_slots, generation=1)
            if state == HOST and question.answered_s is None:
                add_resident(update, index, slot)
            else:
                update.chunks.add(index=index, state=state, slot=slot)
        question.answered_s = self.now_s if question.answered_s is None else question.answered_s
        self.lookups.apply(update, self.now_s)

    def receive(self, waiter: Waiter | None, waits_since_s: float = 0.0) -> None:
        """Take in what the daemon is sent, of a request's question if it is an acquire."""
        while self.outbox is not None and (messages := self.outbox.take(0)):
            for message in messages:
                match message.WhichOneof("kind"):
                    case "acquire":
                        assert waiter is not None
                        assert message.acquire.acquire_id not in [*self.questions, *self.past_ids]
                        assert message.acquire.keys
                        question = Question(waiter.state.req_id, list(message.acquire.keys), waits_since_s)
                        self.questions[message.acquire.acquire_id] = question
                    case "release":
                        self.receive_release(message.release)
                    case "touch":
                        assert self.to_touch.issuperset(message.touch.keys), "that was not touched in this session"
                    case kind:
                        raise AssertionError(kind)

    def receive_release(self, release: pb.Release) -> None:
        question = self.questions[release.acquire_id]  # else it was released before
        if release.all:
            del self.questions[release.acquire_id]
            self.past_ids.append(release.acquire_id)
            return
        assert release.indexes
        for index in release.indexes:
            question.chunks.pop(question.keys[index], None)

    # vLLM

    def arrive(self) -> None:
        self.num_requests += 1
        state = RequestState(req_id=f"r{self.num_requests}")
        hashes = self.chance.choice((*PROMPTS, *PROMPTS[:2]))
        self.waiters[state.req_id] = Waiter(state, hashes, self.chance.randint(0, NUM_BLOCKS))

    def go_on(self, waiter: Waiter) -> None:
        if not waiter.is_over and self.chance.random() < 0.1:
            self.finish(waiter)
        elif waiter.loading:
            waiter.state.failed |= self.chance.random() < 0.2
            self.end_load(waiter)
        elif not waiter.is_over:
            has_hit = self.ask(waiter, max(0, min(NUM_BLOCKS, waiter.hit - self.chance.choice((0, 0, 1, 2, -1)))))
            if has_hit and self.chance.random() < 0.4:
                self.allocate(waiter, loads=self.chance.random() < 0.7)

    def ask(self, waiter: Waiter, hit: int) -> bool:
        """vLLM asks for a request, of which it may have lost blocks meanwhile; return whether it may go on with it."""
        before, was_open = self.question_of(waiter), not self.breaker.is_closed
        waits_since_s = self.now_s if before is None or before.answered_s is not None else before.waits_since_s
        has_shrunk, waiter.hit = hit < waiter.hit, hit
        self.note_touches(waiter)
        request: Any = SimpleNamespace(block_hashes=waiter.hashes)
        is_decided = self.lookups.advance(waiter.state, request, hit * BLOCK_TOKENS, self.now_s)
        self.receive(waiter, waits_since_s)
        after = self.question_of(waiter)
        if has_shrunk and before is not None and after is not before:
            self.seen["asked again" if after is not None else "dropped"] += before.answered_s is None
        assert after in (None, before) or not was_open, "a daemon that does not answer was asked"
        if not is_decided:
            assert after is not None, "it waits, and asks nothing"
            self.check_wait(after, was_open=was_open)
        self.check_reads(waiter, after)
        return is_decided

    def note_touches(self, waiter: Waiter) -> None:
        """What the question may touch: what is known of vLLM's prefix-cache hit, if there is a daemon that answers."""
        if self.outbox is not None and self.breaker.is_closed:
            keys = [GROUP.key(waiter.hashes, index, None) for index in range(waiter.hit)]
            self.to_touch.update(key for key in keys if self.mirror.knows(key))

    def allocate(self, waiter: Waiter, *, loads: bool) -> None:
        """What is a hit is loaded, unless another request has by now."""
        if loads:
            waiter.loading = self.run_of(waiter)
            self.lookups.loading(waiter.state, waiter.loading, self.now_s)
            self.seen["loaded"] += bool(waiter.loading)
        self.lookups.take(waiter.state)

    def run_of(self, waiter: Waiter) -> list[ChunkKey]:
        """Return the hits behind vLLM's own."""
        run: list[ChunkKey] = []
        for index in range(waiter.hit, NUM_BLOCKS):
            key = GROUP.key(waiter.hashes, index, None)
            if self.lookups.hit(waiter.state, key) is None:
                break
            run.append(key)
        return run

    def end_load(self, waiter: Waiter) -> None:
        self.lookups.loaded(waiter.state, waiter.loading, self.now_s)
        waiter.loading = []

    def finish(self, waiter: Waiter) -> None:
        waiter.is_over = True
        self.lookups.finish(waiter.state)

    # Checks

    def question_of(self, waiter: Waiter) -> Question | None:
        found = [question for question in self.questions.values() if question.req_id == waiter.state.req_id]
        assert len(found) <= 1, "two questions of one request are open"
        return found[0] if found else None

    def check_wait(self, question: Question, *, was_open: bool) -> None:
        if question.answered_s is None:
            assert not was_open
            assert self.now_s < question.waits_since_s + LOOKUP_TIMEOUT_S
        else:
            self.seen["waited for promotions"] += 1
            assert self.now_s < question.answered_s + NUM_BLOCKS * BLOCK_TOKENS / TOKENS_PER_S

    def check_reads(self, waiter: Waiter, question: Question | None) -> None:
        """What is ready under the request's lease is a hit, in that very slot; nothing else is."""
        for index in range(NUM_BLOCKS):
            key = GROUP.key(waiter.hashes, index, None)
            state, slot = (MISS, 0) if question is None else question.chunks.get(key, (MISS, 0))
            readable = self.lookups.hit(waiter.state, key)
            is_hit = state == HOST or (state == PROMOTING and self.is_loading_early(waiter))
            assert (None if readable is None else readable.slot.slot) == (slot if is_hit else None)

    def is_loading_early(self, waiter: Waiter) -> bool:
        lease = waiter.state.lease
        is_early = lease is not None and lease.loads_early
        self.seen["began early"] += is_early
        assert self.is_early or not is_early
        return is_early

    def check_owners(self) -> None:
        for waiter in self.waiters.values():
            question = self.question_of(waiter)
            if waiter.loading:
                assert question is None or question.chunks.keys() >= set(waiter.loading), "a worker still reads it"
            elif waiter.is_over or waiter.state.phase is Phase.TAKEN:
                assert question is None, "a lease without a use"
        self.waiters = {each: waiter for each, waiter in self.waiters.items() if waiter.loading or not waiter.is_over}

    def end(self) -> None:
        for waiter in self.waiters.values():
            if waiter.loading:
                self.end_load(waiter)
            if not waiter.is_over:
                self.finish(waiter)
        self.receive(None)
        assert not self.questions
        assert not self.lookups._leases


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_lookups(seed: int) -> None:
    """KVTIER_LOOKUPS=10000 for many runs."""
    run = Run(seed)
    for _ in range(NUM_TURNS):
        run.turn()
    run.end()
    waits = "began early" if run.is_early else "waited for promotions"
    assert min(run.seen[what] for what in ("loaded", waits, "asked again", "dropped")), run.seen
