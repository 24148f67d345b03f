"""What the scheduler's thread keeps of a request: references in a bounded queue."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtier_connector.engine.chunk_keys import GroupShape
from kvtier_connector.engine.lora.adapter_digests import Adapter

MAX_QUEUED_REQUESTS = 512
MAX_QUEUED_TOKENS = 4 * 1024**2
"""Of all prompts in the queue: it may be the last that holds them, at 40 bytes a token."""


class ObservedRequest(NamedTuple):
    """References to vLLM's lists, and how much of them is the prompt: both may grow as the request goes on."""

    tokens: list[int]
    num_tokens: int
    block_hashes: list[bytes]
    num_hashes: int
    image_at: int  # where the first image, or another item that is no text, begins; num_tokens when there is none
    adapter: Adapter | None
    cache_salt: str

    @classmethod
    def of(cls, request: Any, adapter: Adapter | None) -> "ObservedRequest":
        """Return the references to a request of vLLM."""
        num_tokens = len(request.prompt_token_ids)
        images = request.mm_features  # in the order of their positions
        return cls(
            request.prompt_token_ids,
            num_tokens,
            request.block_hashes,
            len(request.block_hashes),
            images[0].mm_position.offset if images else num_tokens,
            adapter,
            request.cache_salt or "",
        )


class RequestQueue:
    """From the scheduler's thread, which puts, to the observer's, which takes. Neither ever waits.

    Attributes:
        num_skipped: Requests that found no place, so far.
    """

    def __init__(self) -> None:
        self._requests: deque[ObservedRequest] = deque()
        # Each is written by one thread only; the difference is what is queued.
        self._tokens_put, self._tokens_taken = 0, 0
        self.num_skipped = 0

    def put(self, request: Any, adapter: Adapter | None) -> None:
        """Append vLLM's request, or count it as skipped."""
        num_tokens = len(request.prompt_token_ids)
        num_queued = self._tokens_put - self._tokens_taken
        if len(self._requests) >= MAX_QUEUED_REQUESTS or (num_queued and num_queued + num_tokens > MAX_QUEUED_TOKENS):
            self.num_skipped += 1
            return
        observed = ObservedRequest.of(request, adapter)
        self._tokens_put += num_tokens
        self._requests.append(observed)

    def take(self) -> ObservedRequest | None:
        """Return the oldest request; None when there is none."""
        try:
            request = self._requests.popleft()
        except IndexError:
            return None
        self._tokens_taken += request.num_tokens
        return request


@dataclass(frozen=True)
class ChunkShape:
    """How a prompt divides into chunks: as a pin of it would.

    Attributes:
        chunk_tokens: Tokens after which a chunk of every KV cache group ends.
        hash_tokens: Tokens of a block hash.
        is_windowed: Some layers keep a window or a state: a pin of whole chunks needs the token behind them, or lacks
            the last ones, see `reachable_keys`.
    """

    chunk_tokens: int
    hash_tokens: int
    is_windowed: bool = False

    @classmethod
    def of(cls, groups: Sequence[GroupShape]) -> "ChunkShape":
        """Return the shape that the engine's KV cache groups have together."""
        return cls(
            math.lcm(*(group.chunk_tokens for group in groups)),
            groups[0].chunk_tokens // groups[0].hashes_per_chunk,
            any(group.window_chunks for group in groups),
        )

    def whole(self, num_tokens: int) -> int:
        """Return the tokens of the whole chunks of a prefix."""
        return num_tokens // self.chunk_tokens * self.chunk_tokens

    def covered(self, request: ObservedRequest) -> int:
        """Return the tokens of the whole chunks that hold text only."""
        return self.whole(min(request.num_hashes * self.hash_tokens, request.num_tokens, request.image_at))

    def chain_hash(self, request: ObservedRequest, num_tokens: int) -> bytes:
        """Return vLLM's chained hash of the whole blocks of a prefix; empty for less than one."""
        num_hashes = min(num_tokens // self.hash_tokens, request.num_hashes)
        return request.block_hashes[num_hashes - 1] if num_hashes else b""

    def identity(self, request: ObservedRequest, num_tokens: int) -> tuple[bytes, tuple[int, ...]]:
        """Return what is equal for equal prefixes, to the token: the chained hash, and the tokens behind it."""
        num_hashes = min(num_tokens // self.hash_tokens, request.num_hashes)
        tail = request.tokens[num_hashes * self.hash_tokens : num_tokens]
        return self.chain_hash(request, num_tokens), tuple(tail)
