"""Requests of which vLLM's offloading scheduler has nothing left to store: it need not look at them in each step.

`OffloadingConnectorScheduler.build_connector_meta` of vLLM 0.32 goes through every running request in every step, some
microseconds for each, and longer for long prompts. Where only prompts are offered (`offload_prompt_only`) there is
nothing for it to find once all chunks of a prompt have been offered: the rest is the answer.
"""

from typing import TYPE_CHECKING, Any, TypeVar

from kvtier_connector.engine.vllm_compat import vllm_is_tested

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.core.sched.output import SchedulerOutput

_T = TypeVar("_T")


class DecodingRequests:
    """Leaves such requests out of the steps that vLLM's offloading scheduler gets. Scheduler thread only.

    Args:
        scheduler: vLLM's offloading scheduler. Where it has several KV cache groups, or one that is no plain full
            attention, or offers answers too, or is not of a tested version, every request is passed on.
    """

    def __init__(self, scheduler: "OffloadingConnectorScheduler") -> None:
        self._scheduler: Any = scheduler
        self._offered: set[str] = set()
        config, groups = self._scheduler.config, self._scheduler.config.kv_group_configs
        is_one_group = vllm_is_tested() and len(groups) == 1
        self._is_on = is_one_group and config.offload_prompt_only and _is_plain(groups[0])

    def left_out(self, output: "SchedulerOutput") -> "SchedulerOutput":
        """Return a step without these requests. Of the blocks that they got vLLM's scheduler knows: stores may be open.

        Its list of a request's blocks ends with the prompt then; it reads only what is still to be offered.
        """
        offered = self._offered
        if not offered:
            return output
        cached = output.scheduled_cached_reqs
        # These have other blocks by now, perhaps in this very step. From 0.33 on vLLM offers all their chunks again.
        offered.difference_update(output.preempted_req_ids or (), cached.resumed_req_ids)
        offered.difference_update(request.req_id for request in output.scheduled_new_reqs)  # so come some resumed ones
        if not offered:
            return output
        kept = []
        for index, req_id in enumerate(cached.req_ids):
            if req_id not in offered:
                kept.append(index)
            elif (groups := cached.new_block_ids[index]) is not None:
                self._scheduler._current_batch_allocated_block_ids.update(*groups)
        if len(kept) == len(cached.req_ids):
            return output
        # Only what vLLM's offloading scheduler reads.
        short, short_cached = _shallow_copy(output), _shallow_copy(cached)
        short_cached.req_ids = [cached.req_ids[index] for index in kept]
        short_cached.new_block_ids = [cached.new_block_ids[index] for index in kept]
        short.scheduled_cached_reqs = short_cached
        short.num_scheduled_tokens = {
            req_id: num_tokens for req_id, num_tokens in output.num_scheduled_tokens.items() if req_id not in offered
        }
        return short

    def step_built(self, output: "SchedulerOutput") -> None:
        """Called when vLLM's offloading scheduler has taken a step; with the whole of it."""
        if not self._is_on:
            return
        for req_id in output.num_scheduled_tokens:
            if req_id not in self._offered and self._is_offered(req_id):
                self._offered.add(req_id)
        self._offered.difference_update(output.finished_req_ids or ())

    def _is_offered(self, req_id: str) -> bool:
        """Return whether every whole chunk of the prompt was offered, and none was refused: that is offered again.

        A session that goes on (`resumable`) may yet get a longer prompt.
        """
        status = self._scheduler._req_status.get(req_id)
        if status is None or status.req.resumable:
            return False
        num_tokens = status.req.num_prompt_tokens
        if status.max_offload_tokens is not None:
            num_tokens = min(num_tokens, status.max_offload_tokens)
        num_chunks = num_tokens // self._scheduler.config.kv_group_configs[0].tokens_per_chunk
        return bool(status.group_states[0].next_stored_chunk_idx >= num_chunks)


def _shallow_copy(plain: _T) -> _T:
    """Copy an object of a plain dataclass: `copy.copy` takes four times as long, in each step."""
    copied = type(plain).__new__(type(plain))
    copied.__dict__.update(plain.__dict__)
    return copied


def _is_plain(group: Any) -> bool:
    special = group.sliding_window_size_in_chunks is not None, group.requires_cow_source, group.is_eagle_group
    return not any(special)
