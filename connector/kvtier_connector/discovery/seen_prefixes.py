"""Names what a request begins with: at most seven prefixes of whole chunks."""

import hashlib
from array import array

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import GROUP_SUFFIX_BYTES
from kvtier.core.limits import MAX_TOKENS, PREFIX_DIGEST_BYTES
from kvtier_connector.discovery.observed_requests import ChunkShape, ObservedRequest
from kvtier_connector.engine.chunk_keys import chunk_key

MAX_PREFIXES = 7
FIXED_TOKENS = tuple(1024 << power for power in range(7))


def prefix_digest(shape: ChunkShape, request: ObservedRequest, num_tokens: int, adapter_digest: bytes | None) -> bytes:
    """Return the 16 bytes that name a prefix of whole chunks: the beginning of its last chunk's key."""
    chain_hash = shape.chain_hash(request, num_tokens)
    return chunk_key(chain_hash + bytes(GROUP_SUFFIX_BYTES), adapter_digest)[:PREFIX_DIGEST_BYTES]


def prompt_digest(shape: ChunkShape, request: ObservedRequest, num_tokens: int) -> int:
    """Return 64 bits that are equal for equal prompts, or for equal beginnings of prompts."""
    chain_hash, tail = shape.identity(request, num_tokens)
    digest = hashlib.blake2b(chain_hash + array("Q", tail).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def prefix_lengths(
    shape: ChunkShape, covered_tokens: int, system_tokens: int | None, stable_tokens: int | None
) -> list[int]:
    """Choose the prefixes that are counted: the marked ones, and fixed lengths, those below the system prompt first.

    Args:
        shape: In which prompts divide into chunks.
        covered_tokens: Of the request: whole chunks of text.
        system_tokens: Of the system prompt; None when it is not known.
        stable_tokens: Of the part of it before a place that changes; None when there is none.

    Returns:
        At most seven numbers of tokens, ascending, each of whole chunks.
    """
    most = min(covered_tokens, MAX_TOKENS)
    ends = [shape.whole(each) for each in (system_tokens, stable_tokens) if each is not None]
    marked = {end for end in ends if 0 < end <= most}
    fixed = [length for each in FIXED_TOKENS if 0 < (length := shape.whole(each)) <= most]
    chosen = dict.fromkeys(sorted(marked))
    for length in fixed:  # ascending: those below the system prompt come first
        if len(chosen) < MAX_PREFIXES:
            chosen[length] = None
    return sorted(chosen)


def seen_request(
    shape: ChunkShape,
    request: ObservedRequest,
    adapter_digest: bytes | None,
    system_tokens: int | None,
    stable_tokens: int | None,
) -> pb.SeenRequest:
    """Return what is reported of a request."""
    lengths = prefix_lengths(shape, shape.covered(request), system_tokens, stable_tokens)
    system_end = shape.whole(system_tokens) if system_tokens is not None else 0
    return pb.SeenRequest(
        prefixes=[
            pb.SeenPrefix(
                digest=prefix_digest(shape, request, length, adapter_digest),
                num_tokens=length,
                is_system_prompt=length == system_end,
            )
            for length in lengths
        ],
        prompt_digest=prompt_digest(shape, request, request.num_tokens),
        num_tokens=request.num_tokens,
    )
