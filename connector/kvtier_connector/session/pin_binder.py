"""Binds pins: computes a prompt's chunk keys with vLLM's own hasher, in the background."""

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import unpack
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import GROUP_SUFFIX_BYTES, ChunkKey, suffix_of
from kvtier.core.limits import MAX_KEYS
from kvtier_connector.engine.chunk_keys import (
    HASH_BYTES,
    GroupShape,
    ReachableKeys,
    gpu_keys,
    has_one_whole_prefix,
    reachable_keys,
)
from kvtier_connector.engine.lora.adapter_digests import Adapter, AdapterDigests
from kvtier_connector.engine.public_prompts import PublicPrompt, pack_tokens
from kvtier_connector.kv_events.event_maker import AnnouncedPrompt, router_hashes

logger = logging.getLogger(__name__)

_KEY_BYTES = HASH_BYTES + GROUP_SUFFIX_BYTES

BlockHasher = Callable[[Any], list[bytes]]
"""vLLM's `get_request_block_hasher`: block hashes of a request from its first unhashed block on."""


@dataclass(frozen=True, kw_only=True)
class BoundPin:
    """A pin whose chunk keys are known."""

    pin_id: str  # the daemon's name for it
    keys: tuple[ChunkKey, ...]  # its reachable chunks
    pinned: bool  # False when it was unpinned: it may be loaded, nothing of it is stored
    # by which vLLM caches the blocks of these chunks; empty where that does not suffice for a hit
    gpu_keys: tuple[bytes, ...] = ()
    priority: int = 0  # the higher, the longer it stays in vLLM's cache
    public: PublicPrompt | None = None  # as requests with a salt recognize it, if they may be restored its chunks
    announced: AnnouncedPrompt | None = None  # as routers know it, if it is pinned and they are to know


class Binding(NamedTuple):
    """The outcome for one pin: the message to the daemon, and what the mirror records (nothing on error)."""

    message: pb.BindPin
    bound: BoundPin | None


class PinBinder:
    """Turns pins into chunk keys. Background thread only."""

    def __init__(
        self,
        groups: Sequence[GroupShape],
        hasher: Callable[[], BlockHasher],
        digests: AdapterDigests,
        max_model_len: int,
        num_lookahead_tokens: int = 0,
        *,
        keys_are_hashes: bool = True,
        announces: bool = False,
    ) -> None:
        """`num_lookahead_tokens`: see `hash_lookahead_tokens`.

        Args:
            keys_are_hashes: vLLM's hashes are of `HASH_BYTES`, so that chunk keys of prompts without adapter have them.
            announces: Routers are to know of pins.
        """
        self._keys_are_hashes, self._announces = keys_are_hashes, announces
        self._groups, self._hasher, self._digests = groups, hasher, digests
        self._max_model_len, self._num_lookahead_tokens = max_model_len, num_lookahead_tokens

    @property
    def takes_joined_keys(self) -> bool:
        """Whether keys tell everything of a pin that is not public. Any thread."""
        return self._takes_keys and not self._announces

    @property
    def _takes_keys(self) -> bool:
        """Whether each key of a pin is a block's hash."""
        return self._keys_are_hashes and self._groups[0].hashes_per_chunk == 1 and has_one_whole_prefix(self._groups)

    def known(self, pin: pb.Pin) -> BoundPin | None:
        """Return a pin whose keys came with it, None unless they tell everything that `bind` would compute.

        They do if each is a block's hash: hashing 10,000 prompts of 512 tokens, and sending their keys, takes seconds.
        """
        group, num_tokens = self._groups[0], pin.num_tokens or len(pin.tokens)
        if not self._takes_keys or pin.lora_name or num_tokens >= self._max_model_len:
            return None
        suffix = suffix_of(group.group_idx)
        keys = _split_keys(pin.joined_keys, suffix) if pin.joined_keys else _whole_keys(pin.keys, suffix)
        if not keys or len(keys) != num_tokens // group.chunk_tokens:
            return None
        block_hashes = [key[:HASH_BYTES] for key in keys] if pin.public else ()
        return self._bound(pin, ReachableKeys(keys, len(keys) * group.chunk_tokens), keys, block_hashes)

    def bind(self, pin: pb.Pin) -> Binding:
        """Compute the pin's reachable keys, or the reason why it cannot be bound."""
        num_tokens = len(pin.tokens)
        digest: bytes | None = None
        if num_tokens >= self._max_model_len:
            remedy = "shorten it, or start vLLM with a larger --max-model-len"
            return _refuse(pin, f"the prompt has {num_tokens} tokens, max_model_len is {self._max_model_len}; {remedy}")
        if pin.lora_name:
            if not pin.lora_path:
                return _refuse(pin, f"LoRA adapter {pin.lora_name!r} has no path; pin with the path vLLM loads it from")
            digest = self._digests.digest_for_pin(Adapter(pin.lora_name, pin.lora_path))
            if digest is None:
                return _refuse(pin, f"LoRA adapter {pin.lora_path!r} cannot be read by the engine; check the path")
        block_hashes = self._block_hashes(pin)
        reachable = reachable_keys(self._groups, block_hashes, num_tokens, digest)
        if not reachable.keys:
            chunk_tokens = max(group.chunk_tokens for group in self._groups)
            remedy = "only whole chunks are kept, so pin a longer prompt (tools count)"
            return _refuse(pin, f"the prompt has {num_tokens} tokens, less than one chunk of {chunk_tokens}; {remedy}")
        if len(reachable.keys) > MAX_KEYS:
            remedy = f"a prompt has at most {MAX_KEYS}: raise blocks_per_chunk, or pin a shorter one"
            return _refuse(pin, f"the prompt has {len(reachable.keys)} chunks; {remedy}")
        covered = reachable.covered_tokens
        logger.info("kvtier pin bound name=%s tokens=%d covered=%d", pin.name, num_tokens, covered)
        return Binding(
            message=pb.BindPin(pin_id=pin.pin_id, keys=reachable.keys, covered_tokens=covered),
            bound=self._bound(pin, reachable, gpu_keys(self._groups, block_hashes, covered), block_hashes),
        )

    def _bound(
        self, pin: pb.Pin, reachable: ReachableKeys, in_gpu: tuple[bytes, ...], block_hashes: Sequence[bytes]
    ) -> BoundPin:
        return BoundPin(
            pin_id=pin.pin_id,
            keys=reachable.keys,
            pinned=pin.pinned,
            gpu_keys=in_gpu,
            priority=pin.priority,
            public=self._public_prompt(pin, block_hashes, reachable.covered_tokens),
            announced=self._announced_prompt(pin, in_gpu, reachable.covered_tokens),
        )

    def _announced_prompt(self, pin: pb.Pin, in_gpu: tuple[bytes, ...], covered_tokens: int) -> AnnouncedPrompt | None:
        if not (self._announces and pin.pinned and in_gpu):
            return None
        return AnnouncedPrompt(
            tokens=array("I", pin.tokens[:covered_tokens]),
            blocks=router_hashes(in_gpu),
            blocks_per_chunk=self._groups[0].hashes_per_chunk,
            cache_salt=pin.cache_salt,
            lora_name=pin.lora_name,
        )

    def _public_prompt(self, pin: pb.Pin, block_hashes: Sequence[bytes], covered_tokens: int) -> PublicPrompt | None:
        """Return what a request with a salt may share; nothing of a pin that has a salt, whatever it says."""
        if not (pin.pinned and pin.public) or pin.cache_salt:
            return None
        tokens_per_hash = self._groups[0].chunk_tokens // self._groups[0].hashes_per_chunk
        return PublicPrompt(
            adapter=(pin.lora_name, pin.lora_path),
            tokens=pack_tokens(pin.tokens[: covered_tokens + self._num_lookahead_tokens]),
            hashes=tuple(block_hashes[: covered_tokens // tokens_per_hash]),
            tokens_per_hash=tokens_per_hash,
            num_lookahead_tokens=self._num_lookahead_tokens,
        )

    def _block_hashes(self, pin: pb.Pin) -> list[bytes]:
        # As much of vLLM's Request as its hasher reads: so salts and adapters enter exactly as for a request.
        request = SimpleNamespace(
            all_token_ids=list(pin.tokens),
            num_tokens=len(pin.tokens),
            cache_salt=pin.cache_salt or None,
            lora_request=SimpleNamespace(lora_name=pin.lora_name, lora_path=pin.lora_path) if pin.lora_name else None,
            block_hashes=[],
            mm_features=(),
            prompt_embeds=None,
        )
        return self._hasher()(request)


def _split_keys(joined: bytes, suffix: bytes) -> tuple[ChunkKey, ...]:
    """Return keys that came as one field; none unless each is a block's hash and the suffix.

    A byte of all suffixes at a time: a slice of each key took as long as splitting them.
    """
    num_keys, rest = divmod(len(joined), _KEY_BYTES)
    if rest:
        return ()
    for position, byte in enumerate(suffix, start=HASH_BYTES):
        if joined[position::_KEY_BYTES] != bytes((byte,)) * num_keys:
            return ()
    return unpack(f"{_KEY_BYTES}s" * num_keys, joined)


def _whole_keys(keys: Sequence[ChunkKey], suffix: bytes) -> tuple[ChunkKey, ...]:
    """Return keys that came one by one; none unless each is a block's hash and the suffix."""
    keys = tuple(keys)
    return keys if {key[HASH_BYTES:] for key in keys} == {suffix} else ()


def _refuse(pin: pb.Pin, error: str) -> Binding:
    logger.warning("kvtier pin not bound name=%s: %s", pin.name, error)
    return Binding(message=pb.BindPin(pin_id=pin.pin_id, error=error), bound=None)
