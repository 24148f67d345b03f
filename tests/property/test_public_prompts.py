"""Requests of several salts beside public and private pins that come and go: who is restored and stores which chunk.

After each request, beside a model that knows tokens and salts only: it was restored the longest run that its own salt
or a public prompt has, and it stored under its own salt what is pinned there or, storing all, what no public prompt
has. Nothing that another salt stored was ever read, and of what has no salt only what a public prompt begins with.
"""

import itertools
import os
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

from kvtier._pb import engine_pb2 as pb
from kvtier.core.arena_format import key_tag_of
from kvtier_connector.session.daemon_events import PinBound
from kvtier_connector.session.pin_binder import PinBinder
from tests.unit.connector.harness import BLOCK_TOKENS, FakeBlock, FakeRequest, Scheduler, full_spec, sliding_spec

NUM_RUNS = int(os.environ.get("KVTIER_PUBLIC_PROMPTS", "0")) or 4
NUM_TURNS = 250
MAX_BLOCKS = 6
SALTS = ("", "a", "b")
HOST = pb.ChunkResidency.HOST


class Run:
    """One engine; the run is its daemon, which never evicts unless it says so, and its clients.

    Attributes:
        seen: How often what the test is about came about.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seed: int, specs: Sequence[Any], *, stores_all: bool) -> None:
        self.chance = random.Random(seed)
        self.stores_all, self.num_groups = stores_all, len(specs)
        self.scheduler = Scheduler(patch, specs, num_credits=64)
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self.hasher: Any = get_request_block_hasher(BLOCK_TOKENS, hash_fn)
        facts, digests = self.scheduler.facts, self.scheduler.digests
        self.binder = PinBinder(facts.shapes, lambda: self.hasher, digests, max_model_len=1000)
        self.pins: dict[str, pb.Pin] = {}
        self.bound: dict[str, tuple[bytes, ...]] = {}
        self.held: set[bytes] = set()
        self.writers: dict[bytes, set[str]] = defaultdict(set)
        self.seen: Counter[str] = Counter()
        self.num = self.num_slots = 0
        self.attach()

    def attach(self) -> None:
        self.scheduler.attach(64, pb.STORE_ALL if self.stores_all else pb.STORE_PINNED)
        if self.stores_all:
            self.scheduler.hold(sorted(self.held), complete=True)
        for pin in self.pins.values():
            self.bind(pin)

    # Operators

    def turn(self) -> None:
        chance = self.chance.random()
        if chance < 0.12:
            self.pin()
        elif chance < 0.2 and self.pins:
            self.unpin(self.chance.choice(list(self.pins)))
        elif chance < 0.22:
            self.scheduler.detach()
            self.attach()
        elif chance < 0.3 and self.held:
            key = self.chance.choice(sorted(self.held))
            self.held.discard(key)
            self.scheduler.hold([key], held=False)
        self.request(self.chance.choice(SALTS), self.tokens())

    def tokens(self) -> list[int]:
        """Two tokens and few blocks: most prompts share a prefix with others."""
        blocks = [[self.chance.choice((1, 2))] * BLOCK_TOKENS for _ in range(self.chance.randint(1, MAX_BLOCKS))]
        return [token for block in blocks for token in block]

    def pin(self) -> None:
        self.num += 1
        pin = pb.Pin(
            pin_id=f"p{self.num}",
            name="p",
            tokens=[*self.tokens(), 9],
            cache_salt=self.chance.choice(SALTS),
            pinned=self.chance.random() < 0.9,
            public=self.chance.random() < 0.6,  # with a salt too, which no daemon sends
        )
        self.pins[pin.pin_id] = pin
        self.bind(pin)

    def bind(self, pin: pb.Pin) -> None:
        binding = self.binder.bind(pin)
        assert binding.bound is not None
        self.bound[pin.pin_id] = keys = binding.bound.keys
        self.scheduler.link.events.append(PinBound(self.scheduler.link.live, binding.bound))
        for is_held in (True, False):
            self.scheduler.hold([key for key in keys if (key in self.held) is is_held], held=is_held)

    def unpin(self, pin_id: str) -> None:
        del self.pins[pin_id], self.bound[pin_id]
        self.scheduler.unpin(pin_id)

    # The model

    def keys(self, tokens: Sequence[int], salt: str, group_idx: int = 0) -> list[bytes]:
        request = SimpleNamespace(
            all_token_ids=tokens, num_tokens=len(tokens), cache_salt=salt or None, lora_request=None, block_hashes=[]
        )
        request.mm_features, request.prompt_embeds = (), None
        return [block_hash + group_idx.to_bytes(4, "big") for block_hash in self.hasher(request)]

    def num_public(self, tokens: Sequence[int], salt: str) -> int:
        """Return how many blocks a request shares with a public prompt."""
        public = [
            list(pin.tokens[:-1]) for pin in self.pins.values() if pin.public and pin.pinned and not pin.cache_salt
        ]
        return max((_num_equal(tokens, prompt) // BLOCK_TOKENS for prompt in public), default=0) if salt else 0

    def knows_held(self, key: bytes) -> bool:
        return key in self.held and (self.stores_all or any(key in keys for keys in self.bound.values()))

    def is_pinned(self, key: bytes) -> bool:
        return any(key in keys for pin_id, keys in self.bound.items() if self.pins[pin_id].pinned)

    # Clients

    def request(self, salt: str, tokens: list[int]) -> None:
        scheduler = self.scheduler
        self.num += 1
        own, plain, num_public = self.keys(tokens, salt), self.keys(tokens, ""), self.num_public(tokens, salt)
        request: Any = FakeRequest(f"r{self.num}", [key[:-4] for key in own], len(tokens) + 1)
        request.cache_salt, request.all_token_ids = salt or None, [*tokens, 7]
        scheduler.step()  # at the end of a step the connector reads the daemon's messages
        scheduler.connector.on_new_request(request)
        matched = scheduler.ask(request)
        asked: list[bytes] = []
        if matched is None:
            acquire = scheduler.sent_one("acquire")
            asked = list(acquire.keys)
            self.num_slots = 0
            scheduler.answer(acquire, [HOST] * len(asked))
            matched = scheduler.ask(request)
        assert matched is not None
        block_ids = self.allocate(request, matched)
        jobs = scheduler.step().load_jobs if matched else {}
        loaded = [chunk.key_tag for job in jobs.values() for chunk in job.src_spec.chunks]
        self.check_reads(salt, own, plain[:num_public], asked, loaded)
        scheduler.workers_report(list(jobs))
        request.num_computed_tokens = matched
        jobs = scheduler.step(new=[(request, block_ids)]).store_jobs
        self.check_stores(salt, own, num_public)
        scheduler.workers_report(list(jobs))
        scheduler.finish(request)
        scheduler.sent()
        self.top_up()

    def allocate(self, request: Any, num_external_tokens: int) -> list[int]:
        """As `Scheduler.allocate`, but of what is loaded only the window's blocks where there is one."""
        num_blocks, ids = -(-request.num_tokens // BLOCK_TOKENS), self.scheduler._block_ids
        groups = []
        for config in self.scheduler.connector.scheduler.config.kv_group_configs:
            num_loaded = num_external_tokens // BLOCK_TOKENS
            num_null = max(0, num_loaded - (config.sliding_window_size_in_chunks or num_loaded))
            nulls = [FakeBlock(0, is_null=True) for _ in range(num_null)]
            groups.append(nulls + [FakeBlock(next(ids)) for _ in range(num_blocks - num_null)])
        blocks: Any = SimpleNamespace(blocks=tuple(groups))
        self.scheduler.connector.update_state_after_alloc(request, blocks, num_external_tokens)
        return [block.block_id for block in groups[0]]

    def check_reads(
        self, salt: str, own: list[bytes], public: list[bytes], asked: list[bytes], loaded: list[int]
    ) -> None:
        by_tag = {key_tag_of(key): key for key in asked}
        read = [by_tag[tag] for tag in loaded]
        for key in read:
            assert self.writers[key] <= {"", salt}, "another salt stored it"
            is_public = key[:-4] in {each[:-4] for each in public}
            assert salt == "" or self.writers[key] == {salt} or is_public, "it is no one's, and not public"
            self.seen["public chunks restored"] += is_public
            self.seen["own chunks restored"] += not is_public and bool(salt)
        if self.num_groups == 1:
            assert read == self.longest_run(own, public)

    def longest_run(self, own: list[bytes], public: list[bytes]) -> list[bytes]:
        run: list[bytes] = []
        for index, key in enumerate(own):
            held = [each for each in (*public[index : index + 1], key) if self.knows_held(each)]
            if not held:
                break
            run.append(held[0])
        return run

    def check_stores(self, salt: str, own: list[bytes], num_public: int) -> None:
        messages = [each.store_begin for each in self.scheduler.sent() if each.WhichOneof("kind") == "store_begin"]
        stored = [store.key for message in messages for store in message.stores]
        wanted = []
        for group_idx in range(self.num_groups):
            for index, key in enumerate(key[:-4] + group_idx.to_bytes(4, "big") for key in own):
                may_store = self.is_pinned(key) or (self.stores_all and index >= num_public)
                if may_store and not self.knows_held(key):
                    wanted.append(key)
        if self.num_groups == 1:
            assert stored == wanted
        assert set(stored) <= set(wanted)
        for key in stored:
            self.writers[key].add(salt)
        self.seen["own chunks stored"] += len(stored) if salt else 0
        self.seen["public chunks kept out"] += sum(not self.is_pinned(key) for key in own[:num_public])
        self.held.update(stored)
        self.scheduler.hold(stored)

    def top_up(self) -> None:
        slots = [pb.SlotRef(slot=slot, generation=1) for slot in range(2 * MAX_BLOCKS)]
        self.scheduler.say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=slots)))


def _num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))


@pytest.mark.parametrize("seed", range(NUM_RUNS))
@pytest.mark.parametrize("stores_all", [False, True])
@pytest.mark.parametrize("specs", [(full_spec(),), (full_spec(), sliding_spec(window=8))], ids=["full", "hybrid"])
def test_public_prompts(monkeypatch: pytest.MonkeyPatch, specs: Sequence[Any], stores_all: bool, seed: int) -> None:
    """KVTIER_PUBLIC_PROMPTS=1000 for many runs."""
    run = Run(monkeypatch, seed, specs, stores_all=stores_all)
    for _ in range(NUM_TURNS):
        run.turn()
    assert min(run.seen[what] for what in ("public chunks restored", "own chunks stored", "public chunks kept out"))
