"""A request with a salt is restored a public prompt's chunks; what it computes of that prompt is no one's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

from kvtier._pb import engine_pb2 as pb
from kvtier.core.arena_format import key_tag_of
from kvtier_connector.engine.chunk_keys import GroupShape, PromptHashes
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror
from kvtier_connector.scheduler.lookup_planner import LookupPlanner
from kvtier_connector.session.daemon_events import PinBound
from kvtier_connector.session.pin_binder import BoundPin, PinBinder
from tests.unit.connector.harness import BLOCK_TOKENS, FakeRequest, Scheduler, full_spec, hashes_of, sliding_spec

PROMPT = list(range(100, 100 + 6 * BLOCK_TOKENS + 1))
HOST = pb.ChunkResidency.HOST


class Tenants:
    """An engine with one public pin, `PROMPT`, and its tenants."""

    def __init__(self, patch: pytest.MonkeyPatch, specs: Any = (), store_mode: pb.StoreMode = pb.STORE_PINNED) -> None:
        self.scheduler = Scheduler(patch, specs or [full_spec()], num_credits=64)
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self.hasher: Any = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
        self.scheduler.attach(64, store_mode)
        self.scheduler.hold([], complete=True)
        self.keys = self.pin(public=True)

    def pin(self, *, pin_id: str = "p", held: bool = True, **fields: Any) -> list[bytes]:
        facts, digests = self.scheduler.facts, self.scheduler.digests
        pin = pb.Pin(pin_id=pin_id, name=pin_id, tokens=PROMPT, pinned=True, **fields)
        bound = PinBinder(facts.shapes, lambda: self.hasher, digests, max_model_len=1000).bind(pin).bound
        assert bound is not None
        self.scheduler.link.events.append(PinBound(self.scheduler.link.live, bound))
        self.scheduler.hold(bound.keys, held=held)
        self.scheduler.step()
        return list(bound.keys)

    def request(
        self, req_id: str = "r", salt: str = "tenant", *, skip: bool = False, num_tail_tokens: int = BLOCK_TOKENS
    ) -> Any:
        source = SimpleNamespace(
            all_token_ids=[*PROMPT, *[7] * num_tail_tokens], cache_salt=salt, lora_request=None, block_hashes=[]
        )
        source.num_tokens, source.mm_features, source.prompt_embeds = len(source.all_token_ids), (), None
        request: Any = FakeRequest(req_id, self.hasher(source), source.num_tokens, skip_reading_prefix_cache=skip)
        request.cache_salt, request.all_token_ids = salt, source.all_token_ids
        self.scheduler.connector.on_new_request(request)
        return request

    def acquired(self, request: Any, num_computed_tokens: int = 0) -> pb.Acquire:
        assert self.scheduler.ask(request, num_computed_tokens) is None
        acquire: pb.Acquire = self.scheduler.sent_one("acquire")
        return acquire

    def stored(self) -> list[bytes]:
        messages = [each.store_begin for each in self.scheduler.sent() if each.WhichOneof("kind") == "store_begin"]
        return [store.key for message in messages for store in message.stores]


def test_a_salted_request_loads_the_public_chunks_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(monkeypatch)
    scheduler, request = tenants.scheduler, tenants.request()
    acquire = tenants.acquired(request)
    assert list(acquire.keys) == tenants.keys
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request) == 6 * BLOCK_TOKENS
    scheduler.allocate(request, 0, 6 * BLOCK_TOKENS)
    assert scheduler.manager.stats._stats.data["types"], "counted"
    ((job_id, job),) = scheduler.step().load_jobs.items()
    assert [chunk.key_tag for chunk in job.src_spec.chunks] == [key_tag_of(key) for key in tenants.keys]
    scheduler.workers_report([job_id])
    assert scheduler.sent_one("release") == pb.Release(acquire_id=acquire.acquire_id, all=True)


def test_a_prefix_cache_hit_of_a_salted_request_is_a_use_of_the_public_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(monkeypatch)
    tenants.acquired(tenants.request(), 2 * BLOCK_TOKENS)
    tenants.scheduler.step()
    assert list(tenants.scheduler.sent_one("touch").keys) == tenants.keys[:2]


def test_the_window_and_the_prefix_of_a_public_prompt_are_loaded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(monkeypatch, [full_spec(), sliding_spec(window=2 * BLOCK_TOKENS)])
    scheduler, request = tenants.scheduler, tenants.request()
    acquire = tenants.acquired(request)
    assert list(acquire.keys) == tenants.keys, "six chunks, and the last two of the window"
    assert len(tenants.keys) == 8
    scheduler.answer(acquire, [HOST] * 8)
    assert scheduler.ask(request) == 6 * BLOCK_TOKENS


def test_a_public_prompts_state_is_loaded_and_never_computed_for_a_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a salt that could produce the missing state may use vLLM's cache: it would not store the state."""
    state = MambaSpec(block_size=BLOCK_TOKENS, shapes=((128,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    tenants = Tenants(monkeypatch, [full_spec(), state])
    request = tenants.request()
    assert list(tenants.acquired(request).keys) == tenants.keys, "six chunks, and the state at their end"
    assert len(tenants.keys) == 7
    tenants.scheduler.hold(tenants.keys[6:], held=False)
    tenants.scheduler.step()
    for salt, must_compute in (("tenant", False), ("", True)):
        request = tenants.request(f"short {salt}", salt, num_tail_tokens=0)
        assert request.skip_reading_prefix_cache is must_compute


def test_a_public_pin_that_ends_while_a_request_waits_is_still_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was public when it was asked for; the next request computes."""
    tenants = Tenants(monkeypatch)
    scheduler, request = tenants.scheduler, tenants.request()
    acquire = tenants.acquired(request)
    scheduler.unpin("p")
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request) == 6 * BLOCK_TOKENS
    assert scheduler.ask(tenants.request("later")) == 0


def test_a_preempted_request_finds_what_has_become_public_since(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(monkeypatch)
    tenants.pin(public=False)
    scheduler, request = tenants.scheduler, tenants.request()
    assert scheduler.ask(request) == 0
    scheduler.allocate(request, 0, 0)
    tenants.pin(public=True)
    request.status = RequestStatus.PREEMPTED
    assert list(tenants.acquired(request).keys) == tenants.keys


@pytest.mark.parametrize("skip", [False, True])
def test_of_a_public_prompt_that_is_not_held_a_salted_request_stores_nothing(
    monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    """Storing all: each tenant would keep a copy. One that skips caches (prompt logprobs) is never looked up."""
    tenants = Tenants(monkeypatch, store_mode=pb.STORE_ALL)
    scheduler = tenants.scheduler
    scheduler.hold(tenants.keys, held=False)
    scheduler.step()
    request = tenants.request(skip=skip)
    assert scheduler.ask(request) == 0
    scheduler.step(new=[(request, scheduler.allocate(request, 0, 0))])
    assert tenants.stored() == [request.block_hashes[6] + bytes(4)], "what follows is the tenant's"


def test_an_adapters_content_is_part_of_the_public_keys_too() -> None:
    group = GroupShape(group_idx=0, chunk_tokens=BLOCK_TOKENS, hashes_per_chunk=1, window_chunks=0)
    own, public, digest = hashes_of("salted", 3), hashes_of("plain", 2), b"d" * 32
    mirror = ChunkMirror([group])
    keys = tuple(group.key(public, index, digest) for index in range(2))
    mirror.add(BoundPin(pin_id="p", keys=keys, pinned=True))
    mirror.set_held(keys, True)
    planner = LookupPlanner([group], mirror)
    plan = planner.plan(PromptHashes(own, digest, public), 0)
    assert plan is not None
    assert plan.keys == keys
    assert plan.aliases == {group.key(own, index, digest): keys[index] for index in range(2)}
    assert planner.plan(PromptHashes(own, b"e" * 32, public), 0) is None


def test_a_tenants_own_pin_of_the_public_prompt_is_stored_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the blocks into which the public chunks were loaded."""
    tenants = Tenants(monkeypatch)
    own = tenants.pin(pin_id="own", held=False, cache_salt="tenant")
    scheduler, request = tenants.scheduler, tenants.request()
    scheduler.answer(tenants.acquired(request), [HOST] * 6)
    assert scheduler.ask(request) == 6 * BLOCK_TOKENS
    block_ids = scheduler.allocate(request, 0, 6 * BLOCK_TOKENS)
    scheduler.workers_report(list(scheduler.step().load_jobs))
    request.num_computed_tokens = 6 * BLOCK_TOKENS
    scheduler.step(new=[(request, block_ids)])
    assert tenants.stored() == own
    assert not set(own) & set(tenants.keys)
    other = tenants.request("other", salt="someone")
    assert list(tenants.acquired(other).keys) == tenants.keys
