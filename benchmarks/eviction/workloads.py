"""Requests as eviction policies see them: block numbers, read from a trace or drawn from a seed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, count
from pathlib import Path
from random import Random

from benchmarks.detect.generated_trace import generated_trace
from benchmarks.eviction.peers.base import Blocks
from benchmarks.measuring.request_trace import TracedRequest, read_trace

Requests = Sequence[Blocks]


def numbered(requests: Iterable[TracedRequest]) -> Requests:
    """Return the blocks of requests, each prefix with a number of its own; requests without a block are left out."""
    numbers: dict[bytes, int] = {}
    found = [[numbers.setdefault(block, len(numbers)) for block in request.blocks] for request in requests]
    return [blocks for blocks in found if blocks]


def from_file(path: Path) -> Requests:
    """Read a trace in Mooncake's format."""
    return numbered(read_trace(path))


class _Draw:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._numbers = count()

    def new(self, num_blocks: int) -> list[int]:
        return [next(self._numbers) for _ in range(num_blocks)]

    def between(self, low: int, high: int) -> list[int]:
        return self.new(self.random.randint(low, high))


def _zipf_weights(number: int, exponent: float) -> list[float]:
    return list(accumulate((rank + 1) ** -exponent for rank in range(number)))


def zipf(seed: int, num_requests: int = 8000) -> Requests:
    """2,000 prompts of 2 to 24 blocks by Zipf's law, each with up to 3 blocks of a user's own behind it."""
    draw = _Draw(seed)
    prompts, weights = [draw.between(2, 24) for _ in range(2000)], _zipf_weights(2000, 0.9)
    return [draw.random.choices(prompts, cum_weights=weights)[0] + draw.between(0, 3) for _ in range(num_requests)]


def agents(seed: int, num_requests: int = 8000) -> Requests:
    """30 system prompts; sixty percent of the sessions go on, for up to 60 turns that each repeat all before them."""
    return _agents(_Draw(seed), num_requests)


def _agents(draw: _Draw, num_requests: int) -> Requests:
    random = draw.random
    prompts, weights = [draw.new(random.choice((4, 8, 16))) for _ in range(30)], _zipf_weights(30, 1.0)
    turns: list[tuple[float, int, list[int]]] = []
    start_s = 0.0
    while len(turns) < num_requests:
        start_s += random.expovariate(1.0)
        time_s, blocks = start_s, random.choices(prompts, cum_weights=weights)[0] + draw.between(1, 3)
        num_turns = min(60, 1 + int(random.paretovariate(1.0))) if random.random() < 0.6 else 1
        for _ in range(num_turns):
            turns.append((time_s, len(turns), blocks))
            time_s += random.lognormvariate(3, 1)
            blocks = blocks + draw.between(1, 3)
    return [blocks for _, _, blocks in sorted(turns)[:num_requests]]


def floods(seed: int, num_requests: int = 8000) -> Requests:
    """Agents, and in a quarter of the time two requests of 20 blocks that never come again after each of theirs."""
    draw, found = _Draw(seed), []
    for number, blocks in enumerate(_agents(draw, num_requests)):
        found.append(blocks)
        if number // 500 % 4 == 3:
            found += [draw.new(20), draw.new(20)]
    return found[:num_requests]


def scans(seed: int, num_requests: int = 6000) -> Requests:
    """400 documents, one after the other and from the beginning again, in turns with 40 prompts at random."""
    draw = _Draw(seed)
    documents, prompts = [draw.between(10, 30) for _ in range(400)], [draw.new(10) for _ in range(40)]
    found = []
    for number in range(num_requests // 2):
        found += [documents[number % 400] + draw.new(1), draw.random.choice(prompts) + draw.new(2)]
    return found


def chats(seed: int, num_requests: int = 8000) -> Requests:
    """The trace of `benchmarks.detect`: 60 system prompts, a quarter of them replaced at half-time; chats; one-offs."""
    return numbered(generated_trace(seed, num_requests).requests)


GENERATED: Mapping[str, Callable[[int], Requests]] = {
    "zipf": zipf,
    "agents": agents,
    "floods": floods,
    "scans": scans,
    "chats": chats,
}
