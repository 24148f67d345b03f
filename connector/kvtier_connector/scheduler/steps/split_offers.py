"""Has vLLM's offloading scheduler offer again what of an offer was not stored for want of arena slots."""

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.kv_offload.base import OffloadKey


def offer_again(scheduler: "OffloadingConnectorScheduler", left: Mapping[str, Set["OffloadKey"]]) -> None:
    """Move each group of a request back to the first of these chunks; what follows is offered again in the next step.

    A prompt in vLLM's prefix cache is offered in one go, and may have more chunks than there can be slots. vLLM counts
    an offer as stored as soon as anything of it is stored.

    Source: `next_stored_chunk_idx` in `_build_store_jobs` and `reset_cache` of vLLM 0.31 to 0.33; the latter moves it
    back to the first chunk of all.

    Args:
        scheduler: vLLM's offloading scheduler, when it has built a step.
        left: By request, which chunks.
    """
    statuses: Any = scheduler
    for req_id, keys in left.items():
        if (status := statuses._req_status.get(req_id)) is None:
            continue
        for group in status.group_states:
            firsts = (index for index, key in enumerate(group.offload_keys) if key in keys)
            group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, next(firsts, group.next_stored_chunk_idx))
