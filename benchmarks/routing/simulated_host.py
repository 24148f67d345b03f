"""A host without a model: vLLM's own block pool, pinned prompts in host memory, and the events of both.

The pool is vLLM's `KVCacheManager`, whose events are of real allocations and evictions; the announcements are those of
kvtier's connector. A request is served at once; its prompt is found in the pool, restored from host memory, or
computed.
"""

import itertools
import warnings
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvtier.core.layout import suffix_of
from kvtier_connector.kv_events.event_maker import AnnouncedPrompt, EventMaker, router_hashes, spec_kind_of
from kvtier_connector.kv_events.host_events import HostEvents
from tests.subscribers.wire import NUMBER_BYTES, AskedPrompt, Message

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

BLOCK_TOKENS = 16
_MAX_TOKENS = 1 << 17
_GROUP = 0
_hash_function = get_hash_fn_by_name("sha256")
init_none_hash(_hash_function)
_block_hasher: Callable[[Any], list[bytes]] = get_request_block_hasher(BLOCK_TOKENS, _hash_function)


class MessageMaker:
    """Makes the messages of one engine as vLLM's publisher does, without its thread and its socket.

    Source: `ZmqEventPublisher.publish` and `_publisher_thread` of vLLM 0.32; a test compares both.
    """

    def __init__(self, topic: str = "") -> None:
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers = itertools.count()

    def message(self, events: Iterable[Any], time_s: float = 0.0) -> Message:
        """Return the message of a step that has these events."""
        batch = KVEventBatch(ts=time_s, events=list(events), data_parallel_rank=0)
        number = next(self._numbers).to_bytes(NUMBER_BYTES, "big")
        return Message(self._topic, number, self._encoder.encode(batch))


@dataclass(frozen=True, kw_only=True)
class ServedTokens:
    """Where the tokens of a prompt came from."""

    total: int
    from_pool: int
    from_host_memory: int

    @property
    def hit(self) -> int:
        """Tokens that were not computed."""
        return self.from_pool + self.from_host_memory


class SimulatedHost:
    """One vLLM and its daemon.

    Args:
        name: The router's name of it.
        pool_blocks: Of vLLM's KV cache.
        announces: vLLM's connector takes kvtier's events; False: there are vLLM's own only.
        model: That its topic names, as llm-d wants it.
    """

    def __init__(self, name: str, pool_blocks: int, *, announces: bool, model: str = "model") -> None:
        self.name, self._pool_blocks, self._announces, self._model = name, pool_blocks, announces, model
        self._pins: dict[str, AnnouncedPrompt] = {}
        self._resident: dict[str, list[bytes]] = {}  # hashes of pinned blocks in host memory, by their pin
        self._request_ids = itertools.count()
        self._now_s = 1000.0
        self.restart()

    def restart(self) -> None:
        """Start another vLLM beside the daemon, which keeps what it holds: its cache is empty, and it attaches."""
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=self._pool_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)],
        )
        self._pool = KVCacheManager(
            config,
            max_model_len=_MAX_TOKENS,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            enable_kv_cache_events=True,
        )
        cache = self._pool.block_pool
        maker = EventMaker(BLOCK_TOKENS, _GROUP, spec_kind_of(spec))
        self.events = HostEvents(maker, lambda: cache.cached_block_hash_to_block)
        self._messages = MessageMaker(f"kv@{self.name}@{self._model}")
        for pin_id, pin in self._pins.items():
            self.events.bound(pin_id, pin)
            self.events.resident(pin_id, len(self._resident.get(pin_id, ())))

    def pin(self, pin_id: str, prompt: AskedPrompt) -> None:
        """Pin the whole blocks of a prompt, and hold them in host memory."""
        hashes = self._request(prompt).block_hashes
        self._pins[pin_id] = AnnouncedPrompt(
            tokens=array("I", prompt.tokens),
            blocks=router_hashes([block + suffix_of(_GROUP) for block in hashes]),
            blocks_per_chunk=1,
            cache_salt=prompt.cache_salt,
            lora_name=prompt.adapter,
        )
        self._resident[pin_id] = list(hashes)
        self.events.bound(pin_id, self._pins[pin_id])
        self.events.resident(pin_id, len(hashes))

    def evict(self, pin_id: str, num_blocks_left: int = 0) -> None:
        """Evict a pin from host memory, but for its first blocks."""
        del self._resident[pin_id][num_blocks_left:]
        self.events.resident(pin_id, num_blocks_left)

    def reset_cache(self) -> None:
        """Have vLLM clear its prefix cache."""
        if not self._pool.reset_prefix_cache():
            raise RuntimeError("vLLM has blocks in use")

    def cached(self, prompt: AskedPrompt) -> ServedTokens:
        """Return where a prompt's tokens would come from; changes nothing."""
        request = self._request(prompt)
        return self._served(request, self._pool.get_computed_blocks(request)[1])

    def serve(self, prompt: AskedPrompt) -> ServedTokens:
        """Serve a request: afterwards the blocks of its prompt are in the pool.

        Raises:
            ValueError: The pool is smaller than the prompt.
        """
        request = self._request(prompt)
        blocks, from_pool, _boundary = self._pool.get_computed_blocks(request)
        served = self._served(request, from_pool)
        allocated = self._pool.allocate_slots(
            request,
            num_new_tokens=served.total - served.hit,
            num_new_computed_tokens=from_pool,
            new_computed_blocks=blocks,
            num_external_computed_tokens=served.from_host_memory,
        )
        if allocated is None:
            raise ValueError(f"pool_blocks is {self._pool_blocks}: a prompt of {served.total} tokens does not fit")
        request.num_computed_tokens = served.total
        self._pool.free(request)
        return served

    def take_messages(self, passed_s: float = 0.0) -> list[Message]:
        """Return what vLLM publishes until nothing is left to announce, in steps as it makes them."""
        self._now_s += passed_s
        messages: list[Message] = []
        while events := [*self._pool.take_events(), *self.announcements()]:
            messages.append(self._messages.message(events, self._now_s))
        return messages

    def announcements(self) -> Sequence[Any]:
        if not self._announces or not self.events.is_pending(self._now_s):
            return ()
        self.events.step_scheduled(0, self._now_s)
        return list(self.events.take(self._now_s))

    def _served(self, request: Any, from_pool: int) -> ServedTokens:
        resident = {block for blocks in self._resident.values() for block in blocks}
        in_memory = sum(1 for _ in itertools.takewhile(resident.__contains__, request.block_hashes)) * BLOCK_TOKENS
        total: int = request.num_tokens
        restored = min(in_memory, (total - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        return ServedTokens(total=total, from_pool=from_pool, from_host_memory=max(restored - from_pool, 0))

    def _request(self, prompt: AskedPrompt) -> Any:
        adapter = prompt.adapter
        return Request(
            request_id=f"{self.name}-{next(self._request_ids)}",
            prompt_token_ids=list(prompt.tokens),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=LoRARequest(adapter, 1, f"/adapters/{adapter}") if adapter else None,
            cache_salt=prompt.cache_salt or None,
            block_hasher=_block_hasher,
        )
