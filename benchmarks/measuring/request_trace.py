"""Traces of requests, and what an engine would report of each.

The format is that of Mooncake's traces (github.com/kvcache-ai/Mooncake, FAST25-release/traces): JSON lines with
`timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one for each block of 512 tokens. An optional
`system_length` says where the system prompt ends.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kvtier.discovery.seen import SeenPrefix, SeenRequest

BLOCK_TOKENS = 512
FIXED_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Where an engine cuts prefixes, besides the end of the system prompt."""


class TraceError(Exception):
    """A line of a trace cannot be used; the message says which, and why."""


@dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """One request.

    Attributes:
        time_s: Since the trace began.
        num_tokens: Of the prompt.
        blocks: Digest of the prompt up to the end of each whole block, 16 bytes.
        prompt_digest: 64 bits, of the whole prompt.
        system_tokens: Where the system prompt ends, in whole blocks; None when no one knows.
    """

    time_s: float
    num_tokens: int
    blocks: tuple[bytes, ...]
    prompt_digest: int
    system_tokens: int | None = None

    def seen(self) -> SeenRequest:
        """Return what an engine reports: the system prompt and the fixed lengths below it, or these alone."""
        system, end = self.system_tokens, len(self.blocks) * BLOCK_TOKENS
        fixed = [length for length in FIXED_TOKENS if length <= end and (system is None or length < system)]
        prefixes = [SeenPrefix(self.prefix(length), length) for length in fixed]
        if system is not None and BLOCK_TOKENS <= system <= end:
            prefixes.append(SeenPrefix(self.prefix(system), system, True))
        return SeenRequest(prefixes, self.prompt_digest, self.num_tokens)

    def prefix(self, num_tokens: int) -> bytes:
        """Return the digest of a prefix of whole blocks."""
        return self.blocks[num_tokens // BLOCK_TOKENS - 1]


def make_request(
    time_s: float, num_tokens: int, hash_ids: list[int], system_tokens: int | None = None
) -> TracedRequest:
    """Return a request, its block ids chained: equal ids behind different beginnings are different prefixes."""
    chained, digests = b"", []
    for hash_id in hash_ids:
        chained = xxhash.xxh3_128_digest(chained + hash_id.to_bytes(8, "little"))
        digests.append(chained)
    prompt_digest = xxhash.xxh3_64_intdigest(chained + num_tokens.to_bytes(8, "little"))
    whole = tuple(digests[: num_tokens // BLOCK_TOKENS])
    return TracedRequest(
        time_s=time_s, num_tokens=num_tokens, blocks=whole, prompt_digest=prompt_digest, system_tokens=system_tokens
    )


def read_trace(path: Path) -> list[TracedRequest]:
    """Return the requests of a file in the order of their time.

    Raises:
        TraceError: A line is not of the format.
        OSError: The file cannot be read.
    """
    with path.open() as file:
        requests = list(_parsed(path, file))
    return sorted(requests, key=lambda request: request.time_s)


def _parsed(path: Path, lines: Iterator[str]) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, 1):
        try:
            yield _request(json.loads(line))
        except (ValueError, TypeError, OverflowError) as exc:
            remedy = "a line has timestamp, input_length and hash_ids, as Mooncake's traces have"
            raise TraceError(f"{path}, line {number}: {exc}; {remedy}") from exc


def _request(fields: object) -> TracedRequest:
    if not isinstance(fields, dict):
        raise TypeError("it is no JSON object")
    hash_ids = fields.get("hash_ids")
    if not isinstance(hash_ids, list):
        raise TypeError(f"hash_ids = {hash_ids!r} is no list")
    return make_request(
        _whole(fields, "timestamp") / 1e3,
        _whole(fields, "input_length"),
        [_whole({"hash_ids": each}, "hash_ids") for each in hash_ids],
        _whole(fields, "system_length") // BLOCK_TOKENS * BLOCK_TOKENS if "system_length" in fields else None,
    )


def _whole(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{name} = {value!r} is no whole number")
    return value
