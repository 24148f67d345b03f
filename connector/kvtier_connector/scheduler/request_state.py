"""What kvtier knows of one vLLM request."""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtier.core.layout import ChunkKey
from kvtier_connector.engine.chunk_keys import chunk_key
from kvtier_connector.engine.lora_adapters import Adapter, AdapterDigests
from kvtier_connector.scheduler.lease import Lease


class Phase(enum.Enum):
    """Where a request is in its lookup round."""

    NEW = enum.auto()
    """Nothing asked in this round."""
    ASKED = enum.auto()
    """Acquire sent, no answer yet."""
    PROMOTING = enum.auto()
    """Answered; waiting for promotions."""
    SETTLED = enum.auto()
    """HIT and MISS are fixed; vLLM may ask again for many steps."""
    TAKEN = enum.auto()
    """vLLM allocated; another question means a new round (preemption, failed load)."""


@dataclass(kw_only=True)
class RequestState:
    """Scheduler thread only.

    Attributes:
        req_id: vLLM's id.
        is_finished: Whether vLLM is done with it.
        adapter: Its LoRA adapter.
        adapter_digest: The adapter's content, once known.
        adapter_deadline_s: Until when the request waits for that digest; None before the first question.
        cacheable: False when chunk keys could not distinguish its KV: nothing is looked up or stored.
        phase: Where its lookup round is.
        asked_tokens: Where the query of this round begins; without a query, vLLM's prefix-cache hit at that time.
        lease: Of this round.
        failed: A load failed; every later lookup is a MISS.
        store_deadline_s: Until when its stores wait for arena slots; None before the first shortage.
        offered: Its chunks so far, as vLLM offered them for storing: prefix order within each group.
        num_store_jobs: Store jobs begun; `num_open_stores` of their chunks are with the workers.
        has_hole: One of its unpinned chunks found no slot: chunks behind it could not be hit.
        is_over: vLLM has forgotten it, but for its jobs.
    """

    req_id: str
    is_finished: Callable[[], bool] = lambda: True
    adapter: Adapter | None = None
    adapter_digest: bytes | None = None
    adapter_deadline_s: float | None = None
    cacheable: bool = True
    phase: Phase = Phase.NEW
    asked_tokens: int = 0
    lease: Lease | None = None
    failed: bool = False
    store_deadline_s: float | None = None
    offered: list[ChunkKey] = field(default_factory=list)
    num_store_jobs: int = 0
    num_open_stores: int = 0
    has_hole: bool = False
    is_over: bool = False

    @property
    def lacks_digest(self) -> bool:
        """Whether its chunk keys are unknown: the content of its adapter has not been read yet."""
        return self.adapter is not None and self.adapter_digest is None

    def read_adapter(self, digests: AdapterDigests) -> None:
        """Take the adapter's digest if it is known by now; the first call has it computed in the background."""
        if self.adapter is not None and self.adapter_digest is None and self.cacheable:
            self.adapter_digest = digests.digest(self.adapter)

    def chunk_keys(self, offload_keys: Iterable[bytes]) -> list[ChunkKey]:
        """Return the chunk keys of vLLM's offload keys."""
        return [chunk_key(key, self.adapter_digest) for key in offload_keys]
