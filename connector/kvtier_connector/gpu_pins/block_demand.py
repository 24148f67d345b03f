"""How many blocks vLLM may take out of its free queue: for one admission, and for running requests in the next step.

ADR 16 derives both bounds. "Running" are all requests that vLLM schedules without asking the connector, also those
whose load is over. Every other one it asks for first.

Source: `Scheduler.schedule` and `KVCacheManager.allocate_slots` of vLLM 0.32.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The part of vLLM's configuration that bounds its demand."""

    block_tokens: int
    max_step_tokens: int  # tokens of a step
    num_spec_tokens: int = 0  # speculative tokens of a request and step
    num_lookahead_tokens: int = 0  # tokens for which a request gets blocks beyond those
    watermark_ratio: float = 0.0  # of the pool, what vLLM keeps free when it admits a request
    reserves_whole_prompt: bool = True  # vLLM admits a request only when its whole prompt fits

    @staticmethod
    def of(config: "VllmConfig", block_tokens: int) -> "EngineShape":
        """Read it from vLLM's configuration."""
        scheduler = config.scheduler_config
        max_tokens = scheduler.max_num_scheduled_tokens
        return EngineShape(
            block_tokens=block_tokens,
            max_step_tokens=scheduler.max_num_batched_tokens if max_tokens is None else max_tokens,
            num_spec_tokens=config.num_speculative_tokens or 0,
            num_lookahead_tokens=config.num_lookahead_tokens,
            watermark_ratio=scheduler.watermark,
            reserves_whole_prompt=scheduler.scheduler_reserve_full_isl,
        )

    def blocks(self, num_tokens: int) -> int:
        """Return how many blocks these tokens take."""
        return -(-num_tokens // self.block_tokens)

    @property
    def extra_blocks(self) -> int:
        """Blocks of a request and step beyond the whole ones of a prompt's chunk."""
        return 1 + self.blocks(self.num_spec_tokens + self.num_lookahead_tokens)


class Demand:
    """The requests that have blocks. Scheduler thread only.

    They leave when vLLM reports that they ended or were preempted. One that is counted for too long makes the bound
    larger than needed, never too small.
    """

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self._holders: dict[str, Any] = {}
        self._prefilling: dict[str, Any] = {}

    def allocated(self, request: Any) -> None:
        """vLLM has given the request, which was waiting, its first blocks."""
        self._holders[request.request_id] = self._prefilling[request.request_id] = request

    def ended(self, over: Collection[str], preempted: Collection[str]) -> None:
        """Called once a step: requests have ended, or were preempted. Of these some have other blocks by now."""
        for req_id in over:
            self._forget(req_id)
        for req_id in preempted:
            request = self._holders.get(req_id)
            if request is not None and request.status == RequestStatus.PREEMPTED:
                self._forget(req_id)

    def of_next_step(self, num_scheduled: Mapping[str, int]) -> int:
        """Return how many more blocks vLLM may give, in the next step, to requests that hold blocks now.

        A step is scheduled, and vLLM has not yet added its tokens to the requests.
        """
        return self._of_step(min(self.shape.max_step_tokens, self._tokens_left(num_scheduled)))

    def max_next_step(self) -> int:
        """Return a bound of that which is larger, but needs no look at the requests."""
        return self._of_step(self.shape.max_step_tokens)

    def _of_step(self, num_chunk_tokens: int) -> int:
        return len(self._holders) * self.shape.extra_blocks + num_chunk_tokens // self.shape.block_tokens

    def _forget(self, req_id: str) -> None:
        self._holders.pop(req_id, None)
        self._prefilling.pop(req_id, None)

    def _tokens_left(self, num_scheduled: Mapping[str, int]) -> int:
        """Return what is left of all prompts; requests that only decode from now on are not looked at again."""
        num_left, done = 0, []
        for req_id, request in self._prefilling.items():
            if request.resumable:  # a streaming session: its next tokens are not known yet
                num_left += self.shape.max_step_tokens
                continue
            left = request.num_tokens - request.num_computed_tokens - num_scheduled.get(req_id, 0)
            num_left += max(0, left)
            if left <= 0 and request.status == RequestStatus.RUNNING:
                done.append(req_id)
        for req_id in done:
            del self._prefilling[req_id]
        return num_left

    def of_admission(self, request: Any, num_cached_tokens: int, *, is_load: bool) -> int:
        """Return how many blocks vLLM may take for a request that it has asked for."""
        shape = self.shape
        if is_load:
            return shape.blocks(num_cached_tokens)
        beyond = max(1 + shape.num_spec_tokens, min(shape.max_step_tokens, request.num_tokens - num_cached_tokens))
        return shape.blocks(num_cached_tokens + beyond + shape.num_lookahead_tokens)

    def to_admit(self, request: Any, num_cached_tokens: int, num_pool_blocks: int, *, is_load: bool) -> int:
        """Return how many blocks must be free at most, or vLLM does not admit the request.

        Beyond what it takes: the rest of the prompt, the watermark, and for a load what others have yet to compute.
        """
        shape = self.shape
        num_blocks = self.of_admission(request, num_cached_tokens, is_load=is_load)
        if shape.reserves_whole_prompt:
            num_blocks = max(num_blocks, shape.blocks(request.num_tokens))
        num_blocks += int(shape.watermark_ratio * (num_pool_blocks + 1))
        if is_load:
            num_blocks += shape.blocks(1 + 2 * (shape.num_spec_tokens + shape.num_lookahead_tokens))
            num_blocks += sum(
                shape.blocks(other.num_tokens) + shape.extra_blocks for other in self._prefilling.values()
            )
        return num_blocks
