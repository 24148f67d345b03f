"""GPU pins over vLLM's own KVCacheManager, in tiny pools, beside a brute-force model of its free queue.

A small scheduler does what vLLM's does with blocks: decode growth, chunked prefill, admission with prefix hits and
loads, preemption of the last, finish, abort, reset. Checked:

- Before vLLM takes blocks: no protected block among the first N of the queue, or nothing but protected ones behind
  them, in ranking order. What it then takes is at most N.
- So a protected block is evicted only when nothing else was free, and never before a worse one.
- A soft policy changes no reference, no hash, no count: with the prefix cache not read, every allocation of the same
  trace without pins has the same outcome and leaves as many free blocks. A hard one changes no outcome.
- The queue is the model's list, and a consistent doubly linked one.
"""

import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
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

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.request import Request, RequestStatus

from kvtier_connector.engine.vllm_block_pool import VllmBlockPool
from kvtier_connector.gpu_pins.block_demand import Demand, EngineShape
from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.policy import Policy
from kvtier_connector.metrics.engine_stats import ConnectorStats

BLOCK_TOKENS = 4
MAX_MODEL_LEN = 16 * BLOCK_TOKENS
NUM_EXAMPLES = int(os.environ.get("KVTIER_GPU_PINS", "0"))
SETTINGS = settings(
    max_examples=NUM_EXAMPLES or 60,
    derandomize=not NUM_EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
)
RARELY = st.integers(0, 7).map(lambda number: number == 7)
# 0 is a prefix of 1; 2 parts from 1 after two blocks; 3 has nothing in common.
_LONG = list(range(100, 100 + 6 * BLOCK_TOKENS))
PREFIXES: Sequence[list[int]] = (
    _LONG[: 3 * BLOCK_TOKENS],
    _LONG,
    [*_LONG[: 2 * BLOCK_TOKENS], *range(300, 300 + 3 * BLOCK_TOKENS)],
    list(range(400, 400 + 4 * BLOCK_TOKENS)),
)


class QueueModel:
    """The free queue as a plain list, called as vLLM's pool is."""

    def __init__(self, pool: Any) -> None:
        self.order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        self.evicted: list[tuple[bytes, list[bytes | None]]] = []  # the key, and those of the blocks left behind it
        self.freed: set[int] = set()
        self.num_taken = 0
        self._pool = pool
        self._spy("get_new_blocks", self._before_new)
        self._spy("touch", self._before_touch)
        self._spy("free_blocks", self._before_free, makes_list=True)

    def _spy(self, name: str, before: Callable[[Any], None], *, makes_list: bool = False) -> None:
        real = getattr(self._pool, name)

        def spied(argument: Any) -> Any:
            argument = list(argument) if makes_list else argument
            before(argument)
            return real(argument)

        setattr(self._pool, name, spied)

    def _before_new(self, num_blocks: int) -> None:
        self.num_taken += num_blocks
        taken, self.order = self.order[:num_blocks], self.order[num_blocks:]
        left = [self.key(block_id) for block_id in self.order if block_id not in self.freed]
        self.evicted.extend((key, left) for block_id in taken if (key := self.key(block_id)) is not None)

    def _before_touch(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            if not block.ref_cnt and not block.is_null:
                self.num_taken += 1
                self.order.remove(block.block_id)

    def _before_free(self, blocks: list[Any]) -> None:
        left = Counter(block.block_id for block in blocks)
        freed = [block for block in blocks if block.ref_cnt == left[block.block_id] and not block.is_null]
        self.freed.update(block.block_id for block in freed)
        self.order = [block.block_id for block in freed if block.block_hash is None] + self.order
        self.order += [block.block_id for block in freed if block.block_hash is not None]

    def key(self, block_id: int) -> bytes | None:
        """Return the key under which vLLM would hit this very block."""
        key: bytes | None = self._pool.blocks[block_id].block_hash
        if key is None or self._pool.cached_block_hash_to_block.get_one_block(key).block_id != block_id:
            return None
        return key

    def shield(self, ranks: dict[bytes, int], num_blocks: int) -> None:
        """What a shield may do to the queue: nothing, or put every protected block behind, the worst first."""
        if all(self.key(block_id) not in ranks for block_id in self.order[:num_blocks]):
            return
        protected = [block_id for block_id in self.order if self.key(block_id) in ranks]
        protected.sort(key=lambda block_id: -ranks[self.key(block_id) or b""])
        self.order = [block_id for block_id in self.order if self.key(block_id) not in ranks] + protected


class Engine:
    """One KVCacheManager, and the policy on it or none."""

    def __init__(self, num_blocks: int, kind: str, shape: EngineShape, max_ratio: float) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        size = spec.page_size_bytes * num_blocks
        tensor = KVCacheTensor(size=size, layers=["layer"], layer_stride=size, block_stride=spec.page_size_bytes)
        config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            watermark=shape.watermark_ratio,
        )
        self.pool: Any = self.manager.block_pool
        self.model = QueueModel(self.pool)
        self.pinned = PinnedBlocks()
        self.policy: Policy | None = None
        self.requests: dict[str, Any] = {}
        if kind != "off":
            queue = VllmBlockPool(self.manager, BLOCK_TOKENS)
            self.pinned.bound(int(max_ratio * queue.num_blocks))
            self.policy = Policy(queue, self.pinned, Demand(shape), is_hard=kind == "hard")
            queue.before_reset(self.policy.release)
        self.is_hard = kind == "hard"

    @property
    def num_free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    @property
    def ranks(self) -> dict[bytes, int]:
        return {key: rank for rank, key in enumerate(self.pinned.ranking.keys())} if self.policy is not None else {}

    def check_queue(self) -> None:
        """The linked list is the model's, both ways."""
        queue = self.pool.free_block_queue
        forth = [block.block_id for block in queue.get_all_free_blocks()]
        back, block = [], queue.fake_free_list_tail.prev_free_block
        while block is not queue.fake_free_list_head:
            back.append(block.block_id)
            block = block.prev_free_block
        assert forth == self.model.order == back[::-1]
        assert queue.num_free_blocks == len(forth) == len(set(forth))

    def check_is_shielded(self, num_blocks: int) -> None:
        """The invariant."""
        ranks, order = self.ranks, self.model.order
        found = [self.model.key(block_id) for block_id in order]
        protected = [index for index, key in enumerate(found) if key in ranks]
        if protected and protected[0] < num_blocks:
            assert protected == list(range(len(order) - len(protected), len(order)))
            assert [ranks[found[index] or b""] for index in protected] == sorted(
                (ranks[found[index] or b""] for index in protected), reverse=True
            )

    def check_evictions(self) -> None:
        """Protected blocks were evicted only for want of others, the worst first.

        What a preemption frees while vLLM looks for blocks lies behind them, and does not count.
        """
        ranks = self.ranks
        for key, left in self.model.evicted:
            if key in ranks:
                assert all(other in ranks and ranks[other] < ranks[key] for other in left), "others were there"
        self.model.evicted.clear()


class GpuPinsMachine(RuleBasedStateMachine):
    """Subclasses say which policy, and whether requests read the prefix cache."""

    kind = "soft"
    reads_cache = True
    num_blocks = 20
    max_ratio = 0.6
    shape = EngineShape(block_tokens=BLOCK_TOKENS, max_step_tokens=4 * BLOCK_TOKENS)
    seen: ClassVar[Counter[str]] = Counter()

    @initialize()
    def start(self) -> None:
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher: Any = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self.engines = [Engine(self.num_blocks, self.kind, self.shape, self.max_ratio)]
        if not self.reads_cache:
            self.engines.append(Engine(self.num_blocks, "off", self.shape, self.max_ratio))
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.max_tokens: dict[str, int] = {}
        self.loads: dict[str, int] = {}
        self.ids = itertools.count(1)
        self.pin(prefix=1)

    @property
    def policy(self) -> Policy:
        policy = self.engines[0].policy
        assert policy is not None
        return policy

    # What happens

    @precondition(lambda self: len(self.max_tokens) < 60)
    @rule(
        prefix=st.sampled_from((0, 1, 1, 2, 3)),
        tail=st.integers(0, 5 * BLOCK_TOKENS),
        question=st.integers(0, 9),
        max_tokens=st.integers(1, 2 * BLOCK_TOKENS),
        loads=st.sampled_from((0, 0, 0, 1, 3)),
        is_pinned=st.booleans(),
        num_steps=st.integers(0, 6),
    )
    def arrive(
        self,
        prefix: int,
        tail: int,
        question: int,
        max_tokens: int,
        loads: int,
        is_pinned: bool,
        num_steps: int,
    ) -> None:
        """A request; `loads` of its blocks would come from host memory if vLLM has none."""
        tokens = PREFIXES[prefix] if is_pinned else [1000 + 50 * question + n for n in range(3 * BLOCK_TOKENS)]
        tokens = [*tokens, *(2000 + 50 * question + n for n in range(tail))]
        req_id = f"r{next(self.ids)}"
        self.max_tokens[req_id] = max_tokens
        self.loads[req_id] = loads if self.reads_cache else 0
        for engine in self.engines:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
            engine.requests[req_id] = Request(req_id, tokens, params, None, block_hasher=self.hasher)
            engine.requests[req_id].skip_reading_prefix_cache = not self.reads_cache
        self.waiting.append(req_id)
        self.step(num_steps)

    @rule(prefix=st.integers(0, len(PREFIXES) - 1))
    def pin(self, prefix: int) -> None:
        probe = Request("pin", PREFIXES[prefix], SamplingParams(max_tokens=1), None, block_hasher=self.hasher)
        keys = [bytes(block_hash) + bytes(4) for block_hash in probe.block_hashes]
        self.engines[0].pinned.add(f"p{prefix}", keys)

    @rule(prefix=st.integers(0, len(PREFIXES) - 1))
    def unpin(self, prefix: int) -> None:
        self.engines[0].pinned.remove(f"p{prefix}")

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.running)))

    @rule(running=st.booleans(), really=RARELY)
    def reset(self, running: bool, really: bool) -> None:
        """`/reset_prefix_cache`, with `reset_running_requests`."""
        if not really:
            return
        while running and self.running:
            self.preempt()
        results = {engine.manager.reset_prefix_cache() for engine in self.engines}
        assert results == {not self.running}
        self.seen["resets"] += not self.running

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        """As vLLM's scheduler: running requests, then waiting ones, then the connector is called."""
        for _ in range(num_steps):
            self.one_step()

    # A step

    def one_step(self) -> None:
        scheduled: dict[str, int] = {}
        budget = self.shape.max_step_tokens
        self.before_step()
        num_next = self.policy._num_next
        self.begin_taking(num_next)
        index = num_preempted = 0
        while index < len(self.running) and budget > 0:
            req_id = self.running[index]
            request = self.engines[0].requests[req_id]
            num_tokens = min(budget, request.num_tokens - request.num_computed_tokens + self.num_drafts(request))
            while not self.allocate(req_id, num_tokens):
                num_preempted += 1
                if self.preempt() == req_id:
                    break
            if req_id not in self.running:
                break
            scheduled[req_id] = num_tokens
            budget -= num_tokens
            index += 1
        self.end_taking(num_next)
        while not num_preempted and self.waiting and budget > 0 and len(self.running) < 4:
            req_id = self.waiting[0]
            num_tokens = self.admit(req_id, budget)
            if num_tokens is None:
                break
            self.waiting.pop(0)
            self.running.append(req_id)
            scheduled[req_id] = num_tokens
            budget -= num_tokens
        self.tell(scheduled)
        self.advance(scheduled)

    def num_drafts(self, request: Any) -> int:
        """Speculative tokens of a request that decodes."""
        return self.shape.num_spec_tokens if request.num_computed_tokens >= request.num_prompt_tokens else 0

    def allocate(self, req_id: str, num_tokens: int) -> bool:
        return bool(
            self.same(
                engine.manager.allocate_slots(
                    engine.requests[req_id], num_tokens, num_lookahead_tokens=self.shape.num_lookahead_tokens
                )
                is not None
                for engine in self.engines
            )
        )

    def admit(self, req_id: str, budget: int) -> int | None:
        """Admit a waiting request if there is space; return its tokens of this step."""
        request = self.engines[0].requests[req_id]
        hits = [engine.manager.get_computed_blocks(engine.requests[req_id]) for engine in self.engines]
        num_hit = self.same(hit[1] for hit in hits)
        num_loaded = min(
            self.loads[req_id] * BLOCK_TOKENS, (request.num_tokens - 1 - num_hit) // BLOCK_TOKENS * BLOCK_TOKENS
        )
        is_load = num_loaded > 0
        num_tokens = 0 if is_load else min(budget, request.num_tokens - num_hit)
        num_blocks = self.before_admission(req_id, num_hit + num_loaded, is_load=is_load)
        self.begin_taking(num_blocks)
        is_admitted = self.same(
            engine.manager.allocate_slots(
                engine.requests[req_id],
                num_tokens,
                num_new_computed_tokens=num_hit,
                new_computed_blocks=hit[0],
                num_lookahead_tokens=0 if is_load else self.shape.num_lookahead_tokens,
                num_external_computed_tokens=num_loaded,
                delay_cache_blocks=is_load,
                full_sequence_must_fit=True,
                has_scheduled_reqs=bool(self.running),
            )
            is not None
            for engine, hit in zip(self.engines, hits, strict=True)
        )
        self.end_taking(num_blocks)
        if not is_admitted:
            return None
        for engine in self.engines:
            admitted = engine.requests[req_id]
            if engine.policy is not None:
                engine.policy.allocated(admitted)
            admitted.status = RequestStatus.RUNNING
            admitted.num_computed_tokens = num_hit + num_loaded
            if is_load:  # which is over at once; its tokens go on in the next step
                engine.manager.cache_blocks(admitted, admitted.num_computed_tokens)
        self.seen["admitted"] += 1
        self.seen["hit blocks"] += num_hit // BLOCK_TOKENS
        self.seen["loaded blocks"] += num_loaded // BLOCK_TOKENS
        return num_tokens

    def before_admission(self, req_id: str, num_cached_tokens: int, *, is_load: bool) -> int:
        engine, before = self.engines[0], self.state()
        assert engine.policy is not None
        request = engine.requests[req_id]
        num_blocks = engine.policy._demand.of_admission(request, num_cached_tokens, is_load=is_load)
        if not engine.is_hard:
            engine.model.shield(engine.ranks, num_blocks)
            engine.policy.before_admission(request, num_cached_tokens, is_load=is_load)
        else:
            self.hard(lambda policy: policy.before_admission(request, num_cached_tokens, is_load=is_load))
        self.changed_nothing(before)
        return num_blocks

    def before_step(self) -> None:
        engine, before = self.engines[0], self.state()
        assert engine.policy is not None
        if not engine.is_hard:
            engine.model.shield(engine.ranks, engine.policy._num_next)
            engine.policy.before_step()
        else:
            self.hard(lambda policy: policy.before_step())
        self.changed_nothing(before)

    def tell(self, scheduled: dict[str, int]) -> None:
        before = self.state()
        output: Any = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=self.finished,
            preempted_req_ids=self.preempted,
        )
        self.hard(lambda policy: policy.after_step(output, ConnectorStats()))
        self.finished, self.preempted = set(), set()
        self.changed_nothing(before)

    def hard(self, act: Callable[[Policy], None]) -> None:
        """References come and go; the model takes the order of the queue over, whatever it is."""
        engine = self.engines[0]
        assert engine.policy is not None
        act(engine.policy)
        engine.model.order = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]

    def advance(self, scheduled: dict[str, int]) -> None:
        """The step is over: tokens are computed, one is sampled where the prompt is at its end."""
        for req_id, num_tokens in scheduled.items():
            for engine in self.engines:
                request = engine.requests[req_id]
                request.num_computed_tokens = min(request.num_computed_tokens + num_tokens, request.num_tokens)
                if request.num_computed_tokens == request.num_tokens:
                    request.append_output_token_ids(5000 + request.num_tokens)
            request = self.engines[0].requests[req_id]
            if request.num_output_tokens >= self.max_tokens[req_id]:
                self.end(req_id)

    def preempt(self) -> str:
        """The last of the running requests gives its blocks back."""
        req_id = self.running.pop()
        for engine in self.engines:
            request = engine.requests[req_id]
            engine.manager.free(request)
            request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.waiting.insert(0, req_id)
        self.preempted.add(req_id)
        self.seen["preempted"] += 1
        return req_id

    def end(self, req_id: str) -> None:
        self.running.remove(req_id)
        self.finished.add(req_id)
        for engine in self.engines:
            engine.requests[req_id].status = RequestStatus.FINISHED_STOPPED
            engine.manager.free(engine.requests[req_id])

    # Checks

    def same(self, results: Iterable[Any]) -> Any:
        """Return what all engines say."""
        first, *others = results
        assert all(other == first for other in others), "pins changed what vLLM does"
        return first

    def state(self) -> Any:
        """Return what a policy must not change: references and hashes, of a soft one."""
        engine = self.engines[0]
        blocks = [] if engine.is_hard else [block.ref_cnt for block in engine.pool.blocks]
        return [block.block_hash for block in engine.pool.blocks], blocks

    def changed_nothing(self, before: Any) -> None:
        assert self.state() == before
        if not self.engines[0].is_hard:
            self.engines[0].check_queue()

    def begin_taking(self, num_blocks: int) -> None:
        self.engines[0].model.num_taken = 0
        self.engines[0].model.evicted.clear()
        self.engines[0].model.freed.clear()
        self.engines[0].check_is_shielded(num_blocks)

    def end_taking(self, num_blocks: int) -> None:
        engine = self.engines[0]
        assert engine.model.num_taken <= num_blocks, "vLLM took more than the bound"
        if num_blocks:
            self.seen["tightest"] = max(self.seen["tightest"], 100 * engine.model.num_taken // num_blocks)
        ranks = engine.ranks
        self.seen["evicted, protected"] += sum(key in ranks for key, _ in engine.model.evicted)
        self.seen["evicted"] += len(engine.model.evicted)
        engine.check_evictions()

    @invariant()
    def the_queue_is_whole(self) -> None:
        if not hasattr(self, "engines"):
            return
        for engine in self.engines:
            engine.check_queue()
        if len(self.engines) == 2:
            one, other = self.engines
            held = one.policy._hard.num_held if one.policy is not None and one.policy._hard is not None else 0
            assert one.num_free <= other.num_free <= one.num_free + held
            if not held:
                assert one.manager.usage == other.manager.usage

    def teardown(self) -> None:
        if hasattr(self, "engines"):
            policy = self.engines[0].policy
            assert policy is not None
            self.seen["moves"] += policy._soft.num_moved
            self.seen["released"] += policy._hard.num_released if policy._hard is not None else 0


class SoftTwinMachine(GpuPinsMachine):
    """The same trace without pins beside it."""

    reads_cache = False


class SoftSpeculativeMachine(GpuPinsMachine):
    """Drafts to verify, lookahead, a watermark; more is pinned than may be kept."""

    max_ratio = 0.25
    shape = EngineShape(
        block_tokens=BLOCK_TOKENS,
        max_step_tokens=3 * BLOCK_TOKENS + 1,
        num_spec_tokens=2,
        num_lookahead_tokens=3,
        watermark_ratio=0.1,
    )


class HardMachine(GpuPinsMachine):
    """References, with the valve."""

    kind = "hard"


class HardTwinMachine(HardMachine):
    """No request waits, or is preempted, for the sake of a reference."""

    reads_cache = False


class HardTwinSpeculativeMachine(SoftSpeculativeMachine, HardTwinMachine):
    """The same with drafts and a watermark."""

    max_ratio = 0.6


MACHINES = (
    GpuPinsMachine,
    SoftTwinMachine,
    SoftSpeculativeMachine,
    HardMachine,
    HardTwinMachine,
    HardTwinSpeculativeMachine,
)


@pytest.mark.parametrize("machine", MACHINES)
def test_gpu_pins(machine: type[GpuPinsMachine], record_property: Callable[[str, object], None]) -> None:
    """A seeded short run in CI; KVTIER_GPU_PINS=2000 for a long one."""
    machine.seen = Counter()
    run_state_machine_as_test(machine, settings=SETTINGS)
    note = ", ".join(f"{count} {what}" for what, count in machine.seen.items())
    record_property("note", note)
    print(f"{machine.__name__}: {note}")
    assert machine.seen["moves"]
    assert machine.seen["evicted"]
