"""vLLM's real scheduler with the real connector, and a model runner that computes digests and checks what it reads."""

import functools
import json
import tempfile
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import ChunkKey
from kvtier_connector import startup
from kvtier_connector.connector import KVTierConnector
from kvtier_connector.engine.chunk_keys import chunk_key
from kvtier_connector.engine.facts import EngineFacts
from kvtier_connector.engine.lora.adapter_digests import AdapterDigests
from kvtier_connector.engine.row_layout import group_shapes
from kvtier_connector.scheduler.manager import EngineParts, KVTierOffloadingManager
from kvtier_connector.session.daemon_events import BackgroundThread, PinBound, PinGone
from kvtier_connector.session.pin_binder import BlockHasher, PinBinder
from tests.fakes.daemon_model import DaemonModel
from tests.simulation.memory import Digests, Flags, TokenSequence
from tests.simulation.workers import SimulatedCopier, SimulatedWorkers
from tests.unit.connector.harness import FakeClock, FakeLink, engine_parts, kv_cache_config_of

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 512
MAX_CREDITS = 8
STEP_S = 0.01
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "bfloat16",
}


@dataclass
class Running:
    """A request as the model runner knows it: block ids per group."""

    sequence: TokenSequence
    block_ids: list[list[int]]


@dataclass
class Step:
    """A step that was executed and whose output the scheduler has not seen."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput


class SimulatedLink(FakeLink):
    """The link to a `DaemonModel`, and the binding of pins, without a background thread."""

    def __init__(self, daemon: DaemonModel, binder: PinBinder) -> None:
        super().__init__()
        self._daemon, self._binder = daemon, binder

    def reconnect(self) -> None:
        raise AssertionError("the scheduler's half failed")

    def reopen(self) -> None:
        """The cache was reset: another session, of a namespace of its own."""
        self.events.clear()
        self._daemon.lose_session()
        self._daemon.forget()

    def bind(self, pin: pb.Pin) -> None:
        """Bind a pin as the background thread does: the mirror first, then the daemon."""
        binding = self._binder.bind(pin)
        if binding.bound is not None:
            self.events.append(PinBound(self.live, binding.bound))
        self.live.send(pb.EngineMessage(bind_pin=binding.message))

    def unbind(self, pin_id: str) -> None:
        """Forget a pin."""
        self.events.append(PinGone(self.live, pin_id))


class SimulatedEngine:
    """An engine of one worker. Every step checks that the model reads the KV of exactly the tokens before.

    Args:
        specs: One per KV cache group.
        num_blocks: Of vLLM's pool, the null block included.
        num_slots: Of the daemon's arena.
        blocks_per_chunk: vLLM blocks of one chunk.
        is_async: One step is scheduled ahead of the outputs.
        stores_all: The daemon keeps unpinned chunks too.
        gpu_pin: As in `kv_connector_extra_config`; so is `admission`.
        scheduling_policy: vLLM's.
        kv_role: vLLM's; with overlapping steps it may take blocks from a request of a `kv_producer` that has a step on
            its way.

    Attributes:
        answers_at_once: The daemon answers while the engine waits in a step, and not between two steps only.
        public: Prompts that were public at some time. Their chunks have no salt in them, and may be read with any.
        num_read_public: Tokens that requests with a salt have read of them.
        num_received: Output tokens that clients got, by request.
        aborted: Requests whose clients went away.
        num_preemptions: Requests that lost their blocks to others.
    """

    def __init__(
        self,
        specs: Sequence[Any],
        *,
        num_blocks: int,
        num_slots: int,
        blocks_per_chunk: int = 1,
        is_async: bool = False,
        stores_all: bool = False,
        gpu_pin: str = "off",
        admission: str = "prefix_first",
        scheduling_policy: str = "fcfs",
        kv_role: str = "kv_both",
    ) -> None:
        self.clock, self.answers_at_once = FakeClock(), False
        self._windows = [spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None for spec in specs]
        self.daemon = DaemonModel(
            num_slots, stores_all=stores_all, all_stamped=not any(self._windows), check_store=self._check_store
        )
        self._kv: Digests = np.zeros((num_blocks, BLOCK_TOKENS), np.int64)
        self.copier = SimulatedCopier(self._kv, self.daemon, blocks_per_chunk)
        self._workers = SimulatedWorkers(self.copier)
        self._queue: deque[Step] = deque()
        self._queue_length = 2 if is_async else 1
        self._running: dict[str, Running] = {}
        self._sequences: dict[str, TokenSequence] = {}
        self._expected: dict[ChunkKey, tuple[TokenSequence, int]] = {}  # whose tokens, and where they begin
        self.public: list[list[int]] = []
        self.num_read_public = 0
        self._blocks_per_chunk = blocks_per_chunk
        self.num_received: Counter[str] = Counter()
        self.aborted: set[str] = set()
        self.num_preemptions = 0
        extra = ("blocks_per_chunk", blocks_per_chunk), ("gpu_pin", gpu_pin), ("admission", admission)
        config = _vllm_config(num_blocks, extra, scheduling_policy, kv_role, is_async=is_async)
        self.scheduler = self._make_scheduler(config, kv_cache_config_of(specs, num_blocks), is_async=is_async)

    def _make_scheduler(self, config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_async: bool) -> Scheduler:
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher: BlockHasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        with mock.patch.object(startup, "start_session", self._start_session):
            scheduler = (AsyncScheduler if is_async else Scheduler)(
                vllm_config=config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_TOKENS,
            )
        connector = scheduler.connector
        assert isinstance(connector, KVTierConnector)
        self.connector = connector
        self.manager: KVTierOffloadingManager = connector.manager
        self.manager._clock = self.clock
        return scheduler

    def _start_session(self, facts: EngineFacts) -> EngineParts:
        self._shapes = group_shapes(facts.group_configs)
        digests = AdapterDigests(BackgroundThread("test").submit)
        binder = PinBinder(self._shapes, lambda: self._hasher, digests, MAX_MODEL_LEN)
        self.link = SimulatedLink(self.daemon, binder)
        self.link.meanwhile = self._answer_lookups
        return engine_parts(facts, self.link, digests, num_credits=MAX_CREDITS, prefill_tokens_per_s=100.0)

    def _answer_lookups(self) -> None:
        """While the engine waits in a step."""
        if self.answers_at_once:
            self.deliver()
            for number, acquire in list(self.daemon.acquires.items()):
                if not acquire.is_answered:
                    self.daemon.answer(number)

    def attach(self) -> None:
        """The daemon is there; the caller binds the pins."""
        self.daemon.attach(self.link, MAX_CREDITS)

    # The client's side

    def add(self, req_id: str, prompt: Sequence[int], *, max_tokens: int, salt: str = "", skip: bool = False) -> None:
        """A request arrives.

        Args:
            req_id: Never used before.
            prompt: Token ids.
            max_tokens: It ends after this many.
            salt: Its cache_salt.
            skip: Its prefix is not read from any cache, as with prompt logprobs.
        """
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0, prompt_logprobs=1 if skip else None
        )
        params.skip_reading_prefix_cache = skip
        hasher: Any = self._hasher
        request = Request(req_id, list(prompt), params, None, cache_salt=salt or None, block_hasher=hasher)
        self._sequences[req_id] = TokenSequence(prompt, salt)
        self._expect(request)
        self.scheduler.add_request(request)

    def abort(self, req_id: str) -> None:
        """Its client goes away."""
        if self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED):
            self.aborted.add(req_id)

    @property
    def unfinished(self) -> list[str]:
        """Requests that have not come to an end."""
        return [req_id for req_id, request in self.scheduler.requests.items() if not request.is_finished()]

    def reset(self, *, running: bool, connector: bool) -> bool:
        """Reset vLLM's prefix cache, and the connector's with it."""
        return bool(self.scheduler.reset_prefix_cache(running, connector))

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for its load, so that its blocks cannot be taken from it."""
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return any(request.status == waiting for request in self.scheduler.requests.values())

    # Steps

    @property
    def is_idle(self) -> bool:
        """Whether vLLM's engine loop would stop stepping."""
        return not (self.scheduler.has_requests() or self._queue)

    def step(self, num_copies: int) -> None:
        """One turn of vLLM's engine loop; up to this many transfer jobs run in it."""
        self.clock.now_s += STEP_S
        self.deliver()
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._queue.append(Step(scheduled, self._execute(scheduled, num_copies)))
            self.deliver()
            may_go_on = scheduled.total_num_scheduled_tokens or self.scheduler.has_requests()
            if len(self._queue) < self._queue_length and may_go_on:
                return
        if self._queue:
            self._take_output()

    def answer_probe(self) -> None:
        """The daemon answers the engine's ping, if it has sent one."""
        if self.link.probing and self.daemon.session_id is not None:
            self.daemon.pong()

    def receive(self) -> None:
        """Take in what the daemon has said, as at the next request's first lookup."""
        self.manager._session.take_events(self.clock())
        self.deliver()

    def deliver(self) -> None:
        """The daemon takes in what the engine has sent since the last time."""
        for message in self.link.sent():
            self.daemon.receive(message)

    def _take_output(self) -> None:
        """The scheduler takes the oldest step's output."""
        step = self._queue.popleft()
        outputs = self.scheduler.update_from_output(step.scheduled, step.output)
        for output in (output for group in outputs.values() for output in group.outputs):
            sequence = self._sequences[output.request_id]
            begin = sequence.num_prompt_tokens + self.num_received[output.request_id]
            expected = [sequence.token(begin + number) for number in range(len(output.new_token_ids))]
            assert output.new_token_ids == expected, "the client gets other tokens than the model's"
            self.num_received[output.request_id] += len(expected)

    def _execute(self, scheduled: SchedulerOutput, num_copies: int) -> ModelRunnerOutput:
        meta = scheduled.kv_connector_metadata
        self._update_tables(scheduled)
        self._workers.before_forward(meta)
        spans = _spans(scheduled)
        for req_id, (begin, end, _) in spans.items():
            self._write(req_id, begin, end)
        for req_id, (begin, end, _) in spans.items():  # in each layer all is written before anything is read
            self._read(req_id, begin, end)
        sampled = {req_id: self._sample(req_id, end, num_output) for req_id, (_, end, num_output) in spans.items()}
        output = self._workers.after_forward(meta, num_copies)
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={req_id: index for index, req_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=output,
        )

    def _update_tables(self, scheduled: SchedulerOutput) -> None:
        self.num_preemptions += len(scheduled.preempted_req_ids or ())
        for req_id in scheduled.finished_req_ids:
            self._running.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            tables = [list(ids) for ids in new.block_ids]
            self._running[new.req_id] = Running(self._sequences[new.req_id], tables)
        cached = scheduled.scheduled_cached_reqs
        for req_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            running = self._running[req_id]
            if req_id in cached.resumed_req_ids:
                assert new_ids is not None
                running.block_ids = [list(ids) for ids in new_ids]
            elif new_ids is not None:
                for table, ids in zip(running.block_ids, new_ids, strict=True):
                    table.extend(ids)

    def _write(self, req_id: str, begin: int, end: int) -> None:
        """Compute the KV of these tokens."""
        running, positions = self._running[req_id], np.arange(begin, end)
        for table in running.block_ids:
            blocks = np.array(table)[positions // BLOCK_TOKENS]
            self._kv[blocks, positions % BLOCK_TOKENS] = running.sequence.kv(begin, end)

    def _read(self, req_id: str, begin: int, end: int) -> None:
        """Attend to all tokens before `end`, or those in the window of the token at `begin`."""
        running = self._running[req_id]
        for table, window in zip(running.block_ids, self._windows, strict=True):
            first = 0 if window is None else max(0, begin - window + 1)
            read = self._kv[table].reshape(-1)[first:end]
            is_right, is_public = self._judge(read, running.sequence, first)
            self.num_read_public += int(is_public.sum())
            if not is_right.all():
                wrong = first + int(np.flatnonzero(~is_right)[0])
                raise AssertionError(f"request {req_id} computes {begin}..{end} and reads wrong KV at token {wrong}")

    def _sample(self, req_id: str, end: int, num_output: int) -> list[int]:
        """Return the next token; nothing inside a prefill."""
        sequence = self._running[req_id].sequence
        return [sequence.token(end)] if end == sequence.num_prompt_tokens + num_output else []

    # What chunks are to hold

    def _expect(self, request: Request) -> None:
        """Note what the chunks of a request hold: also those of the tokens that it will sample."""
        sequence = self._sequences[request.request_id]
        whole = Request(
            "whole",
            [sequence.token(position) for position in range(request.num_tokens + request.max_tokens)],
            SamplingParams(),
            None,
            cache_salt=request.cache_salt,
            block_hasher=request._block_hasher,
        )
        per_chunk = self._blocks_per_chunk
        for shape in self._shapes:
            for number, block_hash in enumerate(whole.block_hashes[per_chunk - 1 :: per_chunk]):
                key = block_hash + shape.group_idx.to_bytes(4, "big")
                self._expected[chunk_key(key, None)] = sequence, number * per_chunk * BLOCK_TOKENS

    def _check_store(self, key: ChunkKey, row: Digests) -> None:
        is_right, _ = self._judge(row.reshape(-1), *self._expected[key])
        assert is_right.all(), f"chunk {key.hex()} was stored with wrong bytes"

    def _judge(self, kv: Digests, sequence: TokenSequence, begin: int) -> tuple[Flags, Flags]:
        """Return, per token from `begin` on, whether its KV may be used for the sequence, and whether it is public.

        That of the sequence, salt and all, may; without a salt only what a public prompt begins with.
        """
        is_own = kv == sequence.kv(begin, begin + len(kv))
        num_public = max((sequence.num_shared(prompt) for prompt in self.public), default=0)
        plain = sequence.without_salt(num_public).kv(begin, num_public)[: len(kv)]
        is_public = np.zeros(len(kv), bool)
        is_public[: len(plain)] = (kv[: len(plain)] == plain) & ~is_own[: len(plain)]
        return is_own | is_public, is_public


def _spans(scheduled: SchedulerOutput) -> dict[str, tuple[int, int, int]]:
    """Return, per request: its first token in this step, the end of them, and its output tokens so far."""
    cached = scheduled.scheduled_cached_reqs
    begins = {new.req_id: (new.num_computed_tokens, 0) for new in scheduled.scheduled_new_reqs}
    begins |= dict(
        zip(cached.req_ids, zip(cached.num_computed_tokens, cached.num_output_tokens, strict=True), strict=True)
    )
    return {
        req_id: (begin, begin + scheduled.num_scheduled_tokens[req_id], num_output)
        for req_id, (begin, num_output) in begins.items()
    }


@functools.cache
def _vllm_config(
    num_blocks: int, extra: tuple[tuple[str, object], ...], scheduling_policy: Any, kv_role: Any, *, is_async: bool
) -> VllmConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_TOKENS,
            max_num_batched_tokens=4 * BLOCK_TOKENS,
            max_num_seqs=4,
            enforce_eager=True,
            async_scheduling=is_async,
            scheduling_policy=scheduling_policy,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector",
                kv_role=kv_role,
                kv_load_failure_policy="recompute",
                kv_connector_module_path="kvtier_connector.connector",
                kv_connector_extra_config={"socket": "/nowhere", **dict(extra)},
            ),
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    return config
