"""A trace made small enough for this machine: whole sessions of it, in shorter time, with shorter blocks.

Sessions are drawn by their second block (the first one is often the same for all), so that what is repeated in the
whole trace is repeated in the sample, and as often.

Source: C. Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015, samples by place, not by time.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.measuring.request_trace import TracedRequest

TAIL_TOKENS = 8
"""Behind the whole blocks of each prompt, different in each."""


@dataclass(frozen=True, kw_only=True)
class ScaledTrace:
    """What is replayed.

    Attributes:
        requests: In the order of their time.
        block_tokens: Tokens that stand for one block of the trace.
        max_blocks: Of a prompt; the rest is cut off.
        duration_s: Until the last request is sent.
        output_tokens: Of each answer.
    """

    requests: Sequence[TracedRequest]
    block_tokens: int
    max_blocks: int
    duration_s: float
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(self._blocks(request)) * self.block_tokens + TAIL_TOKENS for request in self.requests)

    @property
    def repeated_tokens(self) -> int:
        """Tokens that a cache without a limit would hit, in whole blocks."""
        seen: set[bytes] = set()
        num_repeated = 0
        for request in self.requests:
            blocks = self._blocks(request)
            num_repeated += sum(block in seen for block in blocks)
            seen.update(blocks)
        return num_repeated * self.block_tokens

    def write(self, path: Path) -> None:
        """Write it as `vllm bench serve --dataset-name timed_trace` reads it, with timestamps in seconds."""
        ids: dict[bytes, int] = {}
        began_s = self.requests[0].time_s
        span_s = self.requests[-1].time_s - began_s
        with path.open("w") as file:
            for number, request in enumerate(self.requests):
                blocks = self._blocks(request)
                line = {
                    "timestamp": (request.time_s - began_s) / span_s * self.duration_s if span_s else 0.0,
                    "input_length": len(blocks) * self.block_tokens + TAIL_TOKENS,
                    "output_length": self.output_tokens,
                    "hash_ids": [*(ids.setdefault(block, len(ids)) for block in blocks), -1 - number],
                }
                file.write(json.dumps(line) + "\n")

    def _blocks(self, request: TracedRequest) -> Sequence[bytes]:
        return request.blocks[: self.max_blocks]


def sample_sessions(requests: Sequence[TracedRequest], num_requests: int, seed: int) -> list[TracedRequest]:
    """Return the requests of sessions that are drawn at random, this many or all that there are, by time."""
    sessions: dict[bytes, list[TracedRequest]] = defaultdict(list)
    for request in requests:
        if request.blocks:
            sessions[request.blocks[:2][-1]].append(request)
    drawn: list[TracedRequest] = []
    for first in Random(seed).sample(list(sessions), len(sessions)):
        if len(drawn) >= num_requests:
            break
        drawn += sessions[first]
    return sorted(drawn, key=lambda request: request.time_s)[:num_requests]
