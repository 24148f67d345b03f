"""Pins get the very keys that vLLM computes for requests."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

import kvtier_connector.session.pin_binder
from kvtier._pb import engine_pb2 as pb
from kvtier_connector.engine.chunk_keys import GroupShape, chunk_key
from kvtier_connector.engine.lora.adapter_digests import Adapter, AdapterDigests
from kvtier_connector.engine.lora.adapter_files import adapter_digest
from kvtier_connector.kv_events.event_maker import router_hashes
from kvtier_connector.session.daemon_events import BackgroundThread
from kvtier_connector.session.pin_binder import BlockHasher, PinBinder
from tests.fakes.waiting import wait_for

HASH_TOKENS = 4
FULL = GroupShape(group_idx=0, chunk_tokens=8, hashes_per_chunk=2, window_chunks=0)
BLOCKS = GroupShape(group_idx=0, chunk_tokens=4, hashes_per_chunk=1, window_chunks=0)
WINDOW = GroupShape(group_idx=1, chunk_tokens=4, hashes_per_chunk=1, window_chunks=2)


@pytest.fixture
def hasher() -> BlockHasher:
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    made: BlockHasher = get_request_block_hasher(HASH_TOKENS, hash_fn)
    return made


@pytest.fixture
def binder(hasher: BlockHasher) -> PinBinder:
    return PinBinder(
        (FULL, WINDOW), lambda: hasher, AdapterDigests(BackgroundThread("test").submit), max_model_len=1000
    )


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def vllm_hashes(
    hasher: Any, tokens: list[int], salt: str | None = None, lora: LoRARequest | None = None
) -> list[bytes]:
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=lora,
        cache_salt=salt,
        block_hasher=hasher,
    )
    return list(request.block_hashes)


def pin_of(tokens: list[int], **fields: Any) -> pb.Pin:
    return pb.Pin(pin_id="p", name="sys", tokens=tokens, pinned=True, **fields)


def offload_key(block_hash: bytes, group_idx: int) -> bytes:
    return block_hash + group_idx.to_bytes(4, "big")


def test_keys_are_vllms_offload_keys_reachable_chunks_only(binder: PinBinder, hasher: BlockHasher) -> None:
    tokens = list(range(30))
    binding = binder.bind(pin_of(tokens))
    hashes = vllm_hashes(hasher, tokens)
    full = [offload_key(hashes[index], 0) for index in (1, 3, 5)]
    window = [offload_key(hashes[index], 1) for index in (4, 5)]
    assert list(binding.message.keys) == full + window
    assert binding.message.covered_tokens == 24
    assert binding.bound is not None
    assert binding.bound.keys == tuple(full + window)
    assert binding.bound.gpu_keys == (), "blocks of one group make no hit"


def test_gpu_keys_are_every_block_of_the_covered_chunks(hasher: BlockHasher) -> None:
    tokens = list(range(30))
    binding = PinBinder(
        (FULL,), lambda: hasher, AdapterDigests(BackgroundThread("test").submit), max_model_len=1000
    ).bind(pin_of(tokens))
    assert binding.bound is not None
    assert binding.bound.gpu_keys == tuple(offload_key(block_hash, 0) for block_hash in vllm_hashes(hasher, tokens)[:6])


def test_whole_chunks_are_covered_but_a_windows_end_is_one_token_before_the_prompts(hasher: BlockHasher) -> None:
    """Story: a Gemma-3 prompt of 19 x 32 tokens stayed at 34 of 39 chunks, whatever warmed it."""
    digests = AdapterDigests(BackgroundThread("test").submit)
    full_only = PinBinder((FULL,), lambda: hasher, digests, max_model_len=1000)
    hybrid = PinBinder((FULL, WINDOW), lambda: hasher, digests, max_model_len=1000)
    assert full_only.bind(pin_of(list(range(24)))).message.covered_tokens == 24
    assert hybrid.bind(pin_of(list(range(24)))).message.covered_tokens == 16
    assert hybrid.bind(pin_of(list(range(25)))).message.covered_tokens == 24


def test_a_prompt_of_more_chunks_than_a_binding_may_name_is_refused_with_the_remedy(
    binder: PinBinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon ends a session that binds more, and the next one would bind the same."""
    monkeypatch.setattr(kvtier_connector.session.pin_binder, "MAX_KEYS", 4)
    binding = binder.bind(pin_of(list(range(30))))
    assert binding.bound is None
    assert "the prompt has 5 chunks; a prompt has at most 4: raise blocks_per_chunk" in binding.message.error


def test_a_cache_salt_enters_as_for_a_request(binder: PinBinder, hasher: BlockHasher) -> None:
    tokens = list(range(17))
    salted = binder.bind(pin_of(tokens, cache_salt="tenant")).message.keys
    assert salted[0] == offload_key(vllm_hashes(hasher, tokens, salt="tenant")[1], 0)
    assert salted[0] != binder.bind(pin_of(tokens)).message.keys[0]


def test_a_lora_pin_is_bound_to_the_adapters_content(binder: PinBinder, hasher: BlockHasher, adapter: Path) -> None:
    tokens = list(range(17))
    pin = pin_of(tokens, lora_name="sql", lora_path=str(adapter))
    keys = binder.bind(pin).message.keys
    hashes = vllm_hashes(hasher, tokens, lora=LoRARequest("sql", 1, str(adapter)))
    assert keys[0] == chunk_key(offload_key(hashes[1], 0), adapter_digest(adapter))
    (adapter / "adapter_model.safetensors").write_bytes(b"changed")
    fresh = PinBinder((FULL,), lambda: hasher, AdapterDigests(BackgroundThread("test").submit), max_model_len=1000)
    assert fresh.bind(pin).message.keys[0] != keys[0]


@pytest.mark.parametrize(
    ("pin", "error"),
    [
        (pin_of([1] * 7), "7 tokens, less than one chunk of 8; only whole chunks are kept, so pin a longer prompt"),
        (
            pin_of([1] * 1000),
            "1000 tokens, max_model_len is 1000; shorten it, or start vLLM with a larger --max-model-len",
        ),
        (pin_of([1] * 16, lora_name="sql"), "LoRA adapter 'sql' has no path"),
        (pin_of([1] * 16, lora_name="sql", lora_path="/none"), "'/none' cannot be read by the engine"),
    ],
)
def test_what_cannot_be_bound_says_why(binder: PinBinder, pin: pb.Pin, error: str) -> None:
    binding = binder.bind(pin)
    assert error in binding.message.error
    assert binding.bound is None
    assert not binding.message.keys


def test_digests_are_computed_in_the_background_once(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    compute: Callable[[Path], bytes] = adapter_digest

    def recorded(folder: Path) -> bytes:
        threads.append(threading.current_thread().name)
        return compute(folder)

    monkeypatch.setattr("kvtier_connector.engine.lora.adapter_digests.adapter_digest", recorded)
    digests = AdapterDigests(BackgroundThread("kvtier-test").submit)
    wanted = Adapter("sql", str(adapter))
    assert digests.digest(wanted) is None, "unknown at first sight"
    wait_for(lambda: digests.digest(wanted) is not None)
    assert digests.digest(wanted) == compute(adapter)
    assert threads == ["kvtier-test"]


def test_an_adapter_loaded_again_is_read_again(adapter: Path) -> None:
    """Unloaded and loaded again from the same path, it has another id, and may have other weights."""
    digests = AdapterDigests(BackgroundThread("kvtier-test").submit)
    first, second = (Adapter("sql", str(adapter), load_id) for load_id in (1, 2))
    wait_for(lambda: digests.digest(first) is not None)
    (adapter / "adapter_model.safetensors").write_bytes(b"trained further")
    wait_for(lambda: digests.digest(second) is not None)
    assert digests.digest(second) == adapter_digest(adapter) != digests.digest(first)


def test_a_pin_is_bound_to_the_adapter_as_it_is_then(binder: PinBinder, adapter: Path) -> None:
    pin = pin_of(list(range(17)), lora_name="sql", lora_path=str(adapter))
    keys = binder.bind(pin).message.keys
    (adapter / "adapter_model.safetensors").write_bytes(b"trained further")
    assert binder.bind(pin).message.keys != keys


def test_an_adapter_that_could_not_be_read_is_tried_again(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may still be downloading it when its first request comes."""
    monkeypatch.setattr("kvtier_connector.engine.lora.adapter_digests.RETRY_S", 0.05)
    digests = AdapterDigests(BackgroundThread("kvtier-test").submit)
    late = Adapter("late", str(tmp_path / "late"), 1)
    assert digests.digest(late) is None
    wait_for(lambda: "cannot read LoRA adapter" in caplog.text)
    adapter.rename(tmp_path / "late")
    wait_for(lambda: digests.digest(late) is not None)
    assert caplog.text.count("cannot read LoRA adapter") == 1


def test_hashes_of_other_lengths_become_32_bytes() -> None:
    key = chunk_key(b"x" * 16 + b"\0\0\0\1", None)
    assert (len(key), key[-4:]) == (36, b"\0\0\0\1")
    plain = b"y" * 32 + b"\0\0\0\0"
    assert chunk_key(plain, None) is plain


def binder_of(hasher: BlockHasher, *groups: GroupShape, max_model_len: int = 1000, **options: bool) -> PinBinder:
    digests = AdapterDigests(BackgroundThread("test").submit)
    return PinBinder(groups, lambda: hasher, digests, max_model_len, **options)


def test_a_pin_that_comes_with_its_keys_is_bound_as_if_they_were_computed(hasher: BlockHasher) -> None:
    binder = binder_of(hasher, BLOCKS)
    fields: dict[str, Any]
    for fields in ({}, {"public": True}, {"cache_salt": "tenant"}, {"public": True, "cache_salt": "tenant"}):
        pin = pin_of(list(range(30)), priority=3, **fields)
        assert binder.known(pin) is None
        binding = binder.bind(pin)
        pin.keys.extend(binding.message.keys)
        assert binder.known(pin) == binding.bound


def test_keys_that_cannot_be_all_of_the_prompt_are_computed(hasher: BlockHasher) -> None:
    tokens = list(range(30))
    binder = binder_of(hasher, BLOCKS)
    keys = binder.bind(pin_of(tokens)).message.keys
    assert binder.known(pin_of(tokens, keys=keys)) is not None
    for wrong in (keys[:-1], [key + b"x" for key in keys], [key[:-1] + b"x" for key in keys]):
        assert binder.known(pin_of(tokens, keys=wrong)) is None


def test_keys_that_do_not_tell_all_hashes_are_computed(hasher: BlockHasher, adapter: Path) -> None:
    tokens = list(range(30))
    for groups in ((FULL,), (FULL, WINDOW)):
        keys = binder_of(hasher, *groups).bind(pin_of(tokens)).message.keys
        assert binder_of(hasher, *groups).known(pin_of(tokens, keys=keys)) is None
    pin = pin_of(tokens, lora_name="sql", lora_path=str(adapter))
    pin.keys.extend(binder_of(hasher, BLOCKS).bind(pin).message.keys)
    assert binder_of(hasher, BLOCKS).known(pin) is None
    # vLLM's hashes are of another length, and these keys are hashes of them: vLLM caches no block under such a key.
    plain = pin_of(tokens, keys=binder_of(hasher, BLOCKS).bind(pin_of(tokens)).message.keys)
    assert binder_of(hasher, BLOCKS, keys_are_hashes=False).known(plain) is None


def joined(pin: pb.Pin, keys: Iterable[bytes]) -> pb.Pin:
    return pb.Pin(
        pin_id=pin.pin_id,
        name=pin.name,
        pinned=pin.pinned,
        priority=pin.priority,
        joined_keys=b"".join(keys),
        num_tokens=len(pin.tokens),
    )


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pin_is_bound_by_joined_keys_without_its_tokens(hasher: BlockHasher, pinned: bool) -> None:
    binder = binder_of(hasher, BLOCKS)
    assert binder.takes_joined_keys
    pin = pin_of(list(range(30)), priority=3, cache_salt="tenant")
    pin.pinned = pinned
    binding = binder.bind(pin)
    assert binding.bound is not None
    assert binder.known(joined(pin, binding.message.keys)) == binding.bound


def test_joined_keys_that_cannot_be_all_of_the_prompt_bind_nothing(hasher: BlockHasher) -> None:
    pin, binder = pin_of(list(range(30))), binder_of(hasher, BLOCKS)
    keys = list(binder.bind(pin).message.keys)
    assert binder.known(joined(pin, keys)) is not None
    for wrong in (keys[:-1], [*keys, keys[0]], [*keys, b"x"], [key[:-1] + b"x" for key in keys]):
        assert binder.known(joined(pin, wrong)) is None
    assert binder_of(hasher, BLOCKS, max_model_len=30).known(joined(pin, keys)) is None


def test_an_engine_takes_joined_keys_where_they_tell_all_of_a_pin(hasher: BlockHasher) -> None:
    assert not binder_of(hasher, FULL).takes_joined_keys, "several blocks a chunk"
    assert not binder_of(hasher, BLOCKS, WINDOW).takes_joined_keys
    assert not binder_of(hasher, BLOCKS, keys_are_hashes=False).takes_joined_keys
    assert not binder_of(hasher, BLOCKS, announces=True).takes_joined_keys, "routers receive tokens"


def test_what_routers_are_to_know_of_a_pin_comes_with_its_keys_too(hasher: BlockHasher) -> None:
    tokens = list(range(30))
    binder = binder_of(hasher, BLOCKS, announces=True)
    pin = pin_of(tokens, cache_salt="tenant")
    binding = binder.bind(pin)
    assert binding.bound is not None
    announced = binding.bound.announced
    assert announced is not None
    covered_tokens = binding.message.covered_tokens
    assert (announced.tokens.tolist(), announced.cache_salt) == (tokens[:covered_tokens], "tenant")
    assert announced.blocks == router_hashes(binding.bound.gpu_keys)
    pin.keys.extend(binding.message.keys)
    assert binder.known(pin) == binding.bound
    assert binder_of(hasher, BLOCKS).bind(pin).bound.announced is None  # type: ignore[union-attr]
    pin.pinned = False
    assert binder.known(pin).announced is None  # type: ignore[union-attr]


def test_a_prompt_that_is_too_long_for_this_engine_is_refused_though_another_has_bound_it(hasher: BlockHasher) -> None:
    tokens = list(range(30))
    pin = pin_of(tokens, keys=binder_of(hasher, BLOCKS).bind(pin_of(tokens)).message.keys)
    short = binder_of(hasher, BLOCKS, max_model_len=20)
    assert short.known(pin) is None
    assert "max_model_len is 20" in short.bind(pin).message.error
