"""A KVTierConnector (scheduler half) driven as vLLM's scheduler drives it, with a link that the test speaks through.

vLLM's own OffloadingConnectorScheduler runs underneath; only its configuration, requests and blocks are stand-ins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvtier._pb import engine_pb2 as pb
from kvtier.client.engine_session import Attachment
from kvtier.client.outbox import Outbox
from kvtier_connector import startup
from kvtier_connector.connector import KVTierConnector
from kvtier_connector.engine.facts import EngineFacts
from kvtier_connector.engine.lora.adapter_digests import AdapterDigests
from kvtier_connector.engine.row_layout import engine_layout, group_shapes
from kvtier_connector.scheduler.manager import EngineParts
from kvtier_connector.session.daemon_events import (
    Attached,
    BackgroundThread,
    Detached,
    Event,
    PinBound,
    PinGone,
    Received,
)
from kvtier_connector.session.pin_binder import BoundPin
from tests.fakes.daemon_model import add_resident

BLOCK_TOKENS = 4
LOOKUP_TIMEOUT_S = 0.25


class FakeClock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeLink:
    """What the scheduler half sees of the session's threads; behind it a test, or a `DaemonModel`, is the daemon.

    Attributes:
        attachment: Of the live session, or of the last one.
        ended: What the connector has reported of requests that ended, as far as `sent` has taken it.
    """

    def __init__(self) -> None:
        self.ended: list[pb.RequestEnded] = []
        self.events: list[Event] = []
        self.attachment: Attachment | None = None
        self._outbox = Outbox()
        self.probing = False
        self.num_reopened = self.num_reconnected = 0
        self.may_reconnect = False
        self.num_waits = 0
        self.is_failing = False
        self.meanwhile: Callable[[], None] = lambda: None  # what happens while somebody waits

    def wait_for_events(self, timeout_s: float) -> bool:
        self.num_waits += 1
        self.meanwhile()
        return bool(self.events)

    def poll(self) -> Iterator[Event]:
        while self.events:
            yield self.events.pop(0)

    def probe(self, wanted: bool) -> None:
        self.probing = wanted

    def reopen(self) -> None:
        self.num_reopened += 1

    def reconnect(self) -> None:
        assert self.may_reconnect, "the scheduler's half failed"
        self.num_reconnected += 1

    def close(self) -> None:
        pass

    # The daemon's side.

    def send(self, message: pb.DaemonMessage) -> None:
        """Pass a message to the scheduler; a Welcome begins another session."""
        if message.HasField("welcome"):
            self._outbox = Outbox()
            self.attachment = Attachment(self._outbox, 0, message.welcome)
            self.events.append(Attached(self.attachment))
        else:
            self.events.append(Received(self.live, message))

    def lost(self) -> None:
        """The session is over."""
        self.events.append(Detached(self.live))

    @property
    def live(self) -> Attachment:
        """The attachment of a session that there is."""
        assert self.attachment is not None
        return self.attachment

    def has_sent(self) -> bool:
        """Whether something is on its way that does not wait for others."""
        return not self._outbox._batches.empty()

    def sent(self) -> list[pb.EngineMessage]:
        """Take what the connector has sent since the last call, and what waits for others; `ended` gets reports."""
        messages: list[pb.EngineMessage] = []
        while batch := self._outbox.take(0):
            for message in batch:
                if message.HasField("requests_ended"):
                    self.ended += message.requests_ended.requests
                else:
                    messages.append(message)
        return messages


@dataclass
class FakeBlock:
    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


@dataclass
class FakeRequest:
    """As much of vLLM's Request as connector and base read."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    num_computed_tokens: int = 0
    lora_request: Any = None
    cache_salt: str | None = None
    all_token_ids: Sequence[int] = ()
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: Any = None
    status: RequestStatus = RequestStatus.WAITING
    shared_prefix_boundary: int = 0
    resumable: bool = False
    num_prompt_tokens: int = field(init=False)
    prompt_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens
        self.prompt_token_ids = list(range(self.num_tokens))

    def is_finished(self) -> bool:
        return bool(RequestStatus.is_finished(self.status))


def hashes_of(name: str, count: int) -> list[bytes]:
    """Return block hashes of a made-up prompt."""
    return [f"{name}-{index}".encode().ljust(32, b".") for index in range(count)]


def full_spec() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


def sliding_spec(window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=window
    )


def kv_cache_config_of(specs: Sequence[Any], num_blocks: int = 64) -> KVCacheConfig:
    """Return groups of one layer each, overlaid on one allocation as vLLM does."""
    page = specs[0].page_size_bytes
    names = [f"layer{index}" for index in range(len(specs))]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=page * num_blocks, layers=[name], layer_stride=page * num_blocks, block_stride=page)
            for name in names
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(layer_names=[name], kv_cache_spec=spec) for name, spec in zip(names, specs, strict=True)
        ],
    )


def vllm_config_of(extra: dict[str, Any] | None = None, world_size: int = 1) -> Any:
    """Return as much of VllmConfig as connector and base read."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=dict(extra or {}),
            engine_id="engine",
            kv_load_failure_policy="recompute",
            is_kv_producer=True,
            kv_role="kv_both",
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
            block_size=BLOCK_TOKENS,
            prefix_match_unit=None,
            cache_dtype="auto",
            kv_cache_layout="LBHNC",
            prefix_cache_retention_interval=None,
            mamba_cache_mode="none",
        ),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=world_size,
            tensor_parallel_size=world_size,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            distributed_executor_backend="mp",
            nnodes_within_dp=1,
        ),
        model_config=SimpleNamespace(
            model="/models/llama",
            served_model_name="llama",
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            seed=0,
            use_mla=False,
            max_model_len=4096,
            hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4, "_name_or_path": "x"}),
            get_total_num_kv_heads=lambda: 2 * world_size,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        scheduler_config=SimpleNamespace(
            policy="fcfs",
            max_num_batched_tokens=64,
            max_num_scheduled_tokens=None,
            watermark=0.0,
            scheduler_reserve_full_isl=True,
        ),
        attention_config=SimpleNamespace(backend=None, hisparse_config=None),
        speculative_config=None,
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        kv_events_config=None,
        use_v2_model_runner=False,
    )


def engine_parts(facts: EngineFacts, link: FakeLink, digests: AdapterDigests, **options: Any) -> EngineParts:
    """Return what `start_session` does, with a link that the test speaks through."""
    shapes = group_shapes(facts.group_configs)
    layout = engine_layout(facts.offloading, facts.kv_cache_config, shapes)
    events: Any = link
    return EngineParts(
        events=events,
        digests=digests,
        groups=shapes,
        useful_bytes=tuple(group.useful_bytes for group in layout.groups),
        lookup_timeout_s=LOOKUP_TIMEOUT_S,
        **options,
    )


class Scheduler:
    """Drives a connector; the test plays the daemon.

    Attributes:
        facts: Of the engine, as the connector starts its session with them.
    """

    def __init__(
        self,
        monkeypatch: Any,
        specs: Sequence[Any] = (),
        num_credits: int = 8,
        world_size: int = 1,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.clock, self.link = FakeClock(), FakeLink()
        self.digests = AdapterDigests(BackgroundThread("test").submit)
        kv_cache_config = kv_cache_config_of(specs or [full_spec()])
        monkeypatch.setattr(startup, "start_session", lambda facts: self._parts(facts, num_credits, options))
        self.connector = KVTierConnector(
            vllm_config_of({"socket": "/nowhere", **(settings or {})}, world_size),
            KVConnectorRole.SCHEDULER,
            kv_cache_config,
        )
        self.manager = self.connector.manager
        self.manager._clock = self.clock
        self._block_ids = iter(range(1, 10_000))
        self._answered: list[pb.Acquire] = []

    def _parts(self, facts: EngineFacts, num_credits: int, options: Mapping[str, Any]) -> EngineParts:
        self.facts = facts
        return engine_parts(facts, self.link, self.digests, num_credits=num_credits, **options)

    # The daemon's side.

    def attach(self, num_credits: int = 8, store_mode: pb.StoreMode = pb.STORE_PINNED) -> None:
        """A (new) session is up."""
        welcome = pb.Welcome(
            namespace_id="n1",
            lock_path="/lock",
            arena=pb.ArenaInfo(arena_id=b"A" * 16, path="/arena"),
            store_mode=store_mode,
        )
        self.say(pb.DaemonMessage(welcome=welcome))
        slots = [pb.SlotRef(slot=slot, generation=1) for slot in range(num_credits)]
        self.say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=slots)))

    def detach(self) -> None:
        """The session is lost."""
        self.link.lost()

    @property
    def attachment(self) -> Attachment | None:
        """Of the live session, or of the last one."""
        return self.link.attachment

    def say(self, message: pb.DaemonMessage) -> None:
        self.link.send(message)

    def pin(self, keys: Sequence[bytes], pin_id: str = "p", held: bool = True, pinned: bool = True) -> None:
        """A pin is bound; the daemon holds its chunks or not."""
        self.link.events.append(PinBound(self.link.live, BoundPin(pin_id=pin_id, keys=tuple(keys), pinned=pinned)))
        self.say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys, held=held)))

    def hold(self, keys: Sequence[bytes], held: bool = True, complete: bool = False) -> None:
        """The daemon says what it holds."""
        self.say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys, held=held, complete=complete)))

    def unpin(self, pin_id: str) -> None:
        self.link.events.append(PinGone(self.link.live, pin_id))

    def answer(self, acquire: pb.Acquire, states: Sequence[Any], **fields: Any) -> None:
        """Answer an Acquire, for the first time or again: one state per key."""
        update = pb.AcquireUpdate(acquire_id=acquire.acquire_id, **fields)
        is_first = all(answered is not acquire for answered in self._answered)
        self._answered.append(acquire)
        for index, state in enumerate(states):
            slot = pb.SlotRef(slot=20 + index, generation=3)
            if is_first and state == pb.ChunkResidency.HOST:
                add_resident(update, index, slot)
            else:
                update.chunks.add(index=index, state=state, slot=slot)
        self.say(pb.DaemonMessage(acquire_update=update))

    def has_sent(self) -> bool:
        """See `FakeLink.has_sent`."""
        return self.link.has_sent()

    def sent(self) -> list[pb.EngineMessage]:
        """See `FakeLink.sent`."""
        return self.link.sent()

    def ended(self) -> list[pb.RequestEnded]:
        """Take what was reported of requests that ended; everything else that was sent is dropped."""
        self.sent()
        taken, self.link.ended = self.link.ended, []
        return taken

    def sent_one(self, kind: str) -> Any:
        """Take the only message of this kind."""
        (message,) = [message for message in self.sent() if message.WhichOneof("kind") == kind]
        return getattr(message, kind)

    # vLLM's side.

    def new_request(
        self, name: str, num_blocks: int, req_id: str = "r", tail_tokens: int = 1, **fields: Any
    ) -> FakeRequest:
        """A request arrives whose first `num_blocks` blocks are hashed."""
        num_tokens = num_blocks * BLOCK_TOKENS + tail_tokens
        request: Any = FakeRequest(req_id, hashes_of(name, num_blocks), num_tokens, **fields)
        self.connector.on_new_request(request)
        fake: FakeRequest = request
        return fake

    def ask(self, request: Any, num_computed_tokens: int = 0) -> int | None:
        """vLLM wants to schedule the request."""
        return self.connector.get_num_new_matched_tokens(request, num_computed_tokens)[0]

    def allocate(self, request: Any, num_computed_tokens: int, num_external_tokens: int) -> list[int]:
        """vLLM has allocated blocks for all its tokens; return the ids of the first group's."""
        num_blocks = -(-request.num_tokens // BLOCK_TOKENS)
        num_hit = num_computed_tokens // BLOCK_TOKENS
        groups = []
        for _ in self.connector.scheduler.config.kv_group_configs:
            hits = [FakeBlock(next(self._block_ids), block_hash=b"hit") for _ in range(num_hit)]
            groups.append(hits + [FakeBlock(next(self._block_ids)) for _ in range(num_blocks - num_hit)])
        blocks: Any = SimpleNamespace(blocks=tuple(groups))
        self.connector.update_state_after_alloc(request, blocks, num_external_tokens)
        return [block.block_id for block in groups[0]]

    def step(
        self,
        new: Sequence[tuple[Any, list[int]]] = (),
        running: Sequence[Any] = (),
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
    ) -> Any:
        """A step is scheduled; return the metadata for the workers."""
        return self.connector.build_connector_meta(self.output(new, running, finished, preempted))

    def output(
        self,
        new: Sequence[tuple[Any, list[int]]] = (),
        running: Sequence[Any] = (),
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
    ) -> Any:
        """Return what vLLM's scheduler says of a step."""
        groups = len(self.connector.scheduler.config.kv_group_configs)
        scheduled = {request.request_id: request.num_tokens - request.num_computed_tokens for request, _ in new}
        scheduled |= {request.request_id: 1 for request in running}
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=request.request_id, block_ids=tuple([block_ids] * groups))
                for request, block_ids in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id for request in running],
                new_block_ids=[None] * len(running),
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=set(finished),
            preempted_req_ids=set(preempted),
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )

    def workers_report(self, job_ids: Sequence[int], failed: Sequence[str] = (), count: int = 1) -> None:
        """The workers have finished these jobs."""
        meta = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(job_ids, count))
        output: Any = KVConnectorOutput(kv_connector_worker_meta=meta, failed_recving=set(failed))
        self.connector.update_connector_output(output)
        list(self.connector.take_events())

    def finish(self, request: Any, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> Any:
        """The request ends; return the next step's metadata."""
        request.status = status
        self.connector.request_finished(request, [])
        return self.step(finished=[request.request_id])
