"""Real requests of vLLM, and the connector's view of them."""

from types import SimpleNamespace
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier_connector.discovery.observed_requests import ChunkShape, ObservedRequest, RequestQueue
from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.engine.lora.adapter_digests import Adapter

HASH_TOKENS = 16
CHUNK_TOKENS = 32
GROUPS = (GroupShape(group_idx=0, chunk_tokens=CHUNK_TOKENS, hashes_per_chunk=2, window_chunks=0),)
SHAPE = ChunkShape.of(GROUPS)
ADAPTER = Adapter("style", "/adapters/style", 7)


def request_of(
    tokens: list[int], *, req_id: str = "r", salt: str | None = None, adapter: Adapter | None = None, image_at: int = -1
) -> Request:
    """Return a request as vLLM's scheduler has it, hashed by vLLM's own hasher."""
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=image_at, length=4), identifier="i", modality="image")
    images: Any = [image] if image_at >= 0 else None
    return Request(
        request_id=req_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=images,
        lora_request=LoRARequest(adapter.name, adapter.load_id, adapter.path) if adapter is not None else None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(HASH_TOKENS, hash_fn),
    )


def observed(tokens: list[int], **fields: Any) -> ObservedRequest:
    """Return what the connector keeps of such a request."""
    queue = RequestQueue()
    queue.put(request_of(tokens, **fields), fields.get("adapter"))
    taken = queue.take()
    assert taken is not None
    return taken
