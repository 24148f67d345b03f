"""Makes vLLM's own event objects, so that every router that takes vLLM's events takes these.

Source: `BlockPool._build_block_stored_event`, `KVCacheManager.take_events` and `to_event_extra_keys` of vLLM 0.32. An
event without token ids, parent, salt or kind of its KV cache group is dropped by routers, or indexed wrongly: each
follows the root, or a block that was announced before.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.core.layout import GROUP_SUFFIX_BYTES

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

MEDIUM = "CPU"
"""vLLM's name of host memory. A router that does not know a medium rates it like the GPU (llm-d's scorer does)."""
RouterHash = int | bytes
"""What vLLM's events name a block by."""


@dataclass(frozen=True, kw_only=True)
class AnnouncedPrompt:
    """A pinned prompt, as routers have to know it."""

    tokens: "array[int]"
    blocks: Sequence[RouterHash]  # of its whole chunks
    blocks_per_chunk: int
    cache_salt: str = ""
    lora_name: str = ""


class EventMaker:
    """Any thread.

    Args:
        block_tokens: Of a block.
        group_idx: vLLM's index of the KV cache group.
        spec_kind: vLLM's name of what that group holds. llm-d drops stored blocks of a group whose kind it does not
            know, until the engine's own events name it.
    """

    def __init__(self, block_tokens: int, group_idx: int, spec_kind: str) -> None:
        self._block_tokens, self._group_idx, self._spec_kind = block_tokens, group_idx, spec_kind

    def stored(self, prompt: AnnouncedPrompt, begin: int, end: int) -> "KVCacheEvent":
        """Return that these blocks of the prompt are in host memory; those before are known to be."""
        from vllm.distributed.kv_events import BlockStored

        return BlockStored(
            block_hashes=list(prompt.blocks[begin:end]),
            parent_block_hash=prompt.blocks[begin - 1] if begin else None,
            token_ids=prompt.tokens[begin * self._block_tokens : end * self._block_tokens].tolist(),
            block_size=self._block_tokens,
            lora_id=None,
            medium=MEDIUM,
            lora_name=prompt.lora_name or None,
            extra_keys=_extra_keys(prompt, begin, end),
            group_idx=self._group_idx,
            kv_cache_spec_kind=self._spec_kind,
        )

    def removed(self, blocks: Sequence[RouterHash]) -> "KVCacheEvent":
        """Return that these blocks are not in host memory any longer."""
        from vllm.distributed.kv_events import BlockRemoved

        return BlockRemoved(block_hashes=list(blocks), medium=MEDIUM, group_idx=self._group_idx)


def spec_kind_of(kv_cache_spec: object) -> str:
    """Return vLLM's name of what a KV cache group holds, as its own events have it."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return str(get_kv_cache_spec_kind(kv_cache_spec).value)


def router_hashes(gpu_keys: Sequence[bytes]) -> list[RouterHash]:
    """Return what vLLM's events name blocks by: of each hash, without its group, 64 bits or all of it."""
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return [maybe_convert_block_hash(BlockHash(key[:-GROUP_SUFFIX_BYTES])) for key in gpu_keys]


def _extra_keys(prompt: AnnouncedPrompt, begin: int, end: int) -> list[tuple[Any, ...] | None]:
    """Return for each block what its hash covers beside tokens: the adapter in each, the salt in the first."""
    adapter = (prompt.lora_name,) if prompt.lora_name else ()
    of_blocks: list[tuple[Any, ...] | None] = [adapter or None] * (end - begin)
    if prompt.cache_salt and not begin:
        of_blocks[0] = (*adapter, prompt.cache_salt)
    return of_blocks
