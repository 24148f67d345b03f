"""What kvtier knows of one vLLM request."""

import enum
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvtier.core.layout import ChunkKey
from kvtier.core.requests.verify_salts import Verification, verification_of
from kvtier_connector.engine.chunk_keys import PromptHashes, chunk_key
from kvtier_connector.engine.lora.adapter_digests import Adapter, AdapterDigests
from kvtier_connector.engine.public_prompts import NOTHING_PUBLIC, PublicPrefix, PublicPrompts
from kvtier_connector.engine.verified_prefix import verified_prefix
from kvtier_connector.metrics.request_spans import RequestTrace
from kvtier_connector.outcomes.request_account import RequestAccount
from kvtier_connector.requests.instructions import Instructed
from kvtier_connector.scheduler.lease import Lease

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where a request is in its lookup round."""

    NEW = enum.auto()
    """Nothing asked in this round."""
    STORING = enum.auto()
    """Of a decode engine: what the prefill engine computed is not held yet."""
    ASKED = enum.auto()
    """Acquire sent, no answer yet."""
    PROMOTING = enum.auto()
    """Answered; waiting for promotions."""
    DECIDED = enum.auto()
    """HIT and MISS are fixed; vLLM may ask again for many steps."""
    TAKEN = enum.auto()
    """vLLM allocated; another question means a new round (preemption, failed load)."""


@dataclass(kw_only=True)
class RequestState:
    """Scheduler thread only."""

    req_id: str  # vLLM's id
    is_finished: Callable[[], bool] = lambda: True  # whether vLLM is done with it
    adapter: Adapter | None = None  # its LoRA adapter
    adapter_digest: bytes | None = None  # the adapter's content, once known
    is_adapter_read: bool = False  # whether that is what was read for this load, not before
    # until when the request waits for that digest; None before the first question
    adapter_deadline_s: float | None = None
    cacheable: bool = True  # False when chunk keys could not distinguish its KV: nothing is looked up or stored
    verification: Verification | None = None  # it compares KV, and is no user's
    public: PublicPrefix = NOTHING_PUBLIC  # what it shares with a public prompt, or verifies, if it has a salt
    public_version: int = -1  # of the public prompts that were looked through for it
    trace: RequestTrace | None = None  # its OpenTelemetry spans, if a client traces it
    lookup_end: str = ""  # how its last lookup round ended, as LookupEnd
    phase: Phase = Phase.NEW  # where its lookup round is
    asked_tokens: int = 0  # where the query of this round begins; without a query, vLLM's prefix-cache hit at that time
    lease: Lease | None = None  # of this round
    num_repeats: int = 0  # rounds that began again because the daemon had failed and is there again
    # when it began to wait for a prefill engine, and until when; None before
    prefill_since_s: float | None = None
    prefill_deadline_s: float | None = None
    is_prefill_over: bool = False  # that wait is over, or was none
    failed: bool = False  # a load failed; every later lookup is a MISS
    store_deadline_s: float | None = None  # until when its stores wait for arena slots; None: they have what they need
    # its chunks so far, as vLLM offered them for storing: prefix order within each group
    offered: dict[ChunkKey, None] = field(default_factory=dict)
    num_store_jobs: int = 0  # store jobs begun; `num_open_stores` of their chunks are with the workers
    num_open_stores: int = 0
    has_hole: bool = False  # one of its unpinned chunks found no slot: chunks behind it could not be hit
    instructed: Instructed | None = None  # what it asks of kvtier
    account: RequestAccount = field(default_factory=RequestAccount)  # what it got, and why not more
    is_over: bool = False  # vLLM has forgotten it, but for its jobs

    @property
    def lacks_digest(self) -> bool:
        """Whether its chunk keys are unknown: the content of its adapter is."""
        return self.adapter is not None and self.adapter_digest is None

    @property
    def may_store(self) -> bool:
        """Whether its chunks may be stored: it does not forbid that, and nothing about their keys is in doubt."""
        return self.cacheable and not self.no_store and (self.adapter is None or self.is_adapter_read)

    @property
    def no_store(self) -> bool:
        """Whether nothing of the request is stored: it asks for that, or is a verification."""
        if self.verification is not None:
            return True
        return self.instructed is not None and self.instructed.no_store

    def read_adapter(self, digests: AdapterDigests) -> None:
        """Take the adapter's digest if it is known by now; the first call has it computed in the background.

        If it was replaced since the request came, nothing of the request is looked up or stored from now on.
        """
        if self.adapter is None or not self.cacheable:
            return
        self.cacheable = not digests.is_replaced(self.adapter)
        if self.is_adapter_read or not self.cacheable:
            return
        if self.adapter_digest is None:
            self.adapter_digest = digests.digest(self.adapter)
        self.is_adapter_read = self.adapter_digest is not None and digests.is_read(self.adapter)

    def awaits_digest(self, digests: AdapterDigests, deadline_s: float, now_s: float) -> bool:
        """Return whether the adapter's content will be known by the deadline of the first call: it was read before."""
        self.adapter_deadline_s = self.adapter_deadline_s or deadline_s
        is_due = not self.cacheable or now_s >= self.adapter_deadline_s
        return self.adapter is not None and not is_due and digests.is_worth_waiting(self.adapter)

    def read_salt(self, request: Any, hasher: Callable[[], Callable[[Any], list[bytes]]] | None) -> None:
        """Find out whether vLLM's request is a verification, and what it is restored then.

        Args:
            request: vLLM's.
            hasher: Returns vLLM's block hasher; None: there is none, and nothing is restored.
        """
        self.verification = verification_of(request.cache_salt)
        if self.verification is None:
            return
        own_salt = self.verification.own_salt
        if own_salt is None or hasher is None:
            self.cacheable = False
            return
        try:
            self.public = verified_prefix(request, own_salt, hasher())
        except Exception:  # whatever another version of vLLM has there: the request is computed
            logger.exception("kvtier: a verification request cannot be hashed")
            self.cacheable = False

    def find_public(self, prompts: PublicPrompts, request: Any) -> None:
        """Take what vLLM's request shares with a public prompt now. One without a salt needs none of it."""
        if request.cache_salt and self.verification is None and self.public_version != prompts.version:
            self.public_version = prompts.version
            self.public = prompts.find(request)

    def prompt_hashes(self, request: Any) -> PromptHashes:
        """Return what names the chunks that vLLM's request may be restored."""
        return PromptHashes(request.block_hashes, self.adapter_digest, self.public.unsalted)

    def chunk_keys(self, offload_keys: Iterable[bytes]) -> list[ChunkKey]:
        """Return the request's own chunk keys of vLLM's offload keys: those that it stores under."""
        return [chunk_key(key, self.adapter_digest) for key in offload_keys]

    def leased_keys(self, offload_keys: Iterable[bytes]) -> list[ChunkKey]:
        """Return the keys by which its lease has these chunks: another one where a public prompt has the chunk."""
        keys = self.chunk_keys(offload_keys)
        return keys if self.lease is None else self.lease.leased_keys(keys)

    def num_public(self, leased_keys: Iterable[ChunkKey]) -> int:
        """Return how many of these, as in its lease, are a public prompt's."""
        aliases = self.lease.query.aliases if self.lease is not None and self.verification is None else None
        return len(set(aliases.values()).intersection(leased_keys)) if aliases else 0
