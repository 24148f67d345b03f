"""Corrects what vLLM's offloading scheduler remembers of blocks that a request has no longer."""

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.core.sched.output import SchedulerOutput


def forget_blocks(scheduler: "OffloadingConnectorScheduler", output: "SchedulerOutput") -> "SchedulerOutput":
    """Before vLLM's offloading scheduler gets a step: correct its state, and return the step as it shall see it.

    A preempted request has no blocks. vLLM's scheduler (0.26 to 0.33) remembers the old ones until the request is
    scheduled again; if it ends before that, by an output that was on its way, they would be stored as its own, with
    what other requests have written into them since.

    A session whose input goes on (`resumable`) is scheduled like a new request, with all its blocks. Before 0.33 they
    were added to those of its last turn: chunks of the next turn were stored from blocks of the first.

    A request that was preempted by a reset of the prefix cache between two steps may get a load in the very next one,
    where vLLM (before 0.33) asserts that a preempted request has none. Nothing of such a request is to be flushed: vLLM
    begins no load while a store is open.

    Source: `OffloadingConnectorScheduler.build_connector_meta`, `_build_store_jobs` and `_update_req_states`.
    """
    state: Any = scheduler
    preempted = output.preempted_req_ids or ()
    for req_id in (*preempted, *(request.req_id for request in output.scheduled_new_reqs)):
        if (status := state._req_status.get(req_id)) is not None:
            for group_state in status.group_states:
                group_state.block_ids.clear()
    if not preempted:
        return output
    loading = {job.req_id for job in state._current_batch_load_jobs.values()}
    if loading.isdisjoint(preempted):
        return output
    corrected = copy.copy(output)
    corrected.preempted_req_ids = set(preempted) - loading
    return corrected
