"""A request with a salt finds the hashes that it would have without, as far as public prompts reach, and no others."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier_connector.engine.public_prompts import (
    NOTHING_PUBLIC,
    PublicPrompt,
    PublicPrompts,
    pack_tokens,
)
from kvtier_connector.session.pin_binder import BlockHasher

BLOCK = 4
NO_ADAPTER = ("", "")


@pytest.fixture(scope="module")
def hasher() -> BlockHasher:
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    made: BlockHasher = get_request_block_hasher(BLOCK, hash_fn)
    return made


def request_of(hasher: Any, tokens: list[int], salt: str | None = "tenant", lora: LoRARequest | None = None) -> Request:
    return Request(
        "r", tokens, SamplingParams(max_tokens=1), None, cache_salt=salt, lora_request=lora, block_hasher=hasher
    )


def prompt_of(hasher: Any, tokens: list[int], lora: LoRARequest | None = None) -> PublicPrompt:
    return PublicPrompt(
        adapter=(lora.lora_name, lora.lora_path) if lora else NO_ADAPTER,
        tokens=pack_tokens(tokens[: len(tokens) // BLOCK * BLOCK]),
        hashes=tuple(request_of(hasher, tokens, None, lora).block_hashes),
        tokens_per_hash=BLOCK,
    )


def test_what_is_found_is_what_vllm_hashes_without_the_salt(hasher: BlockHasher) -> None:
    """Many prompts, many of which share prefixes, come and go; beside a search through all of them."""
    chance = random.Random(7)
    public, prompts = PublicPrompts(), dict[str, list[int]]()
    num_shared = 0
    for number in range(600):
        tokens = [chance.choice((1, 2)) for _ in range(chance.randint(BLOCK, 6 * BLOCK))]
        if chance.random() < 0.5:
            prompts[f"p{number}"] = tokens
            public.add(f"p{number}", prompt_of(hasher, tokens))
        elif prompts and chance.random() < 0.4:
            pin_id = chance.choice(list(prompts))
            del prompts[pin_id]
            public.remove(pin_id)
        request = request_of(hasher, tokens + [3] * chance.randint(0, BLOCK))
        shared = max((_num_equal_blocks(tokens, prompt) for prompt in prompts.values()), default=0)
        found = public.find(request)
        plain = request_of(hasher, list(request.all_token_ids), salt=None)
        assert list(found.unsalted) == plain.block_hashes[:shared]
        assert list(found.salted) == request.block_hashes[:shared]
        num_shared += shared
    assert num_shared > 500


def _num_equal_blocks(tokens: list[int], prompt: list[int]) -> int:
    num_equal = next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), None)
    return (min(len(tokens), len(prompt)) if num_equal is None else num_equal) // BLOCK


@pytest.fixture
def public(hasher: BlockHasher) -> PublicPrompts:
    made = PublicPrompts()
    made.add("p", prompt_of(hasher, list(range(12))))
    return made


def test_a_chunk_is_covered_by_the_requests_own_hash_only(public: PublicPrompts, hasher: BlockHasher) -> None:
    request = request_of(hasher, list(range(13)))
    found = public.find(request)
    assert [found.covers(each + bytes(4)) for each in request.block_hashes] == [True] * 3
    assert not any(found.covers(each + bytes(4)) for each in found.unsalted)
    assert not NOTHING_PUBLIC.covers(request.block_hashes[0] + bytes(4))


def test_two_pins_of_one_prompt_are_two(public: PublicPrompts, hasher: BlockHasher) -> None:
    public.add("q", prompt_of(hasher, list(range(12))))
    public.remove("p")
    request = request_of(hasher, list(range(13)))
    assert len(public.find(request).unsalted) == 3
    public.remove("q")
    public.remove("never there")
    assert public.find(request) == NOTHING_PUBLIC


def test_each_change_has_a_version_of_its_own(public: PublicPrompts, hasher: BlockHasher) -> None:
    versions = [public.version]
    public.add("q", prompt_of(hasher, list(range(8))))
    versions.append(public.version)
    public.remove("q")
    versions.append(public.version)
    public.clear()
    versions.append(public.version)
    assert sorted(set(versions)) == versions
    assert public.find(request_of(hasher, list(range(13)))) == NOTHING_PUBLIC


def test_an_adapter_must_be_the_prompts(public: PublicPrompts, hasher: BlockHasher) -> None:
    tuned, other = LoRARequest("tuned", 1, "/loras/a"), LoRARequest("tuned", 2, "/loras/b")
    public.add("tuned", prompt_of(hasher, list(range(8)), tuned))
    assert len(public.find(request_of(hasher, list(range(13)))).unsalted) == 3
    found = public.find(request_of(hasher, list(range(13)), lora=tuned))
    assert list(found.unsalted) == request_of(hasher, list(range(8)), None, tuned).block_hashes
    assert public.find(request_of(hasher, list(range(13)), lora=other)) == NOTHING_PUBLIC


@pytest.mark.parametrize(("offset", "num_blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (40, 3)])
def test_an_image_ends_what_is_shared(public: PublicPrompts, hasher: BlockHasher, offset: int, num_blocks: int) -> None:
    """Its placeholder tokens are the same for every image."""
    request: Any = request_of(hasher, list(range(13)))
    request.mm_features = [SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=2))]
    assert len(public.find(request).unsalted) == num_blocks


def test_embeddings_share_nothing(public: PublicPrompts, hasher: BlockHasher) -> None:
    """vLLM gives them token 0, all of them."""
    request: Any = request_of(hasher, list(range(13)))
    request.prompt_embeds = object()
    assert public.find(request) == NOTHING_PUBLIC


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_shares_nothing(public: PublicPrompts, token: int) -> None:
    for tokens in ([token, 1, 2, 3], [0, 1, 2, 3, token, 5, 6, 7]):
        request: Any = SimpleNamespace(
            all_token_ids=tokens, block_hashes=[b"h"], lora_request=None, prompt_embeds=None, mm_features=()
        )
        assert public.find(request) == NOTHING_PUBLIC


def test_a_hash_that_covers_tokens_after_its_block_needs_them_equal() -> None:
    """As vLLM 0.33 hashes for some draft models."""
    prompt = PublicPrompt(
        adapter=NO_ADAPTER,
        tokens=pack_tokens(range(9)),
        hashes=(b"a", b"b"),
        tokens_per_hash=BLOCK,
        num_lookahead_tokens=1,
    )
    public = PublicPrompts()
    public.add("p", prompt)
    for tokens, unsalted in (
        ([*range(9)], (b"a", b"b")),
        ([*range(8), 99], (b"a",)),
        ([*range(5), 99], (b"a",)),
        ([*range(4), 99], ()),
        ([*range(8)], (b"a",)),
    ):
        request: Any = SimpleNamespace(
            all_token_ids=tokens, block_hashes=[b"1", b"2"], lora_request=None, prompt_embeds=None, mm_features=()
        )
        found = public.find(request)
        assert (tuple(found.unsalted), len(found.salted)) == (unsalted, len(unsalted))
