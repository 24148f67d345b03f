"""A trace with known truth: which prompts there are is known, because they are drawn here from a seed.

Two hours of chat and completions. System prompts have 1,024 to 16,384 tokens and are used by Zipf's law; a quarter of
them is replaced at half-time; two begin with another one. A third of the chats goes on for some turns. Between them
come prompts that are never seen again (with and without a system prompt of their own), and the same requests, to the
token, again and again.
"""

from dataclasses import dataclass
from itertools import accumulate, count
from random import Random

from benchmarks.measuring.request_trace import BLOCK_TOKENS, TracedRequest, make_request

_DURATION_S = 7200.0
_NUM_PROMPTS = 60
_ZIPF = 1.1
_ONE_OFF, _OWN_SYSTEM_PROMPT, _IDENTICAL = 0.15, 0.05, 0.05  # shares of the requests
_GOES_ON = 0.35  # of chats
_NUM_IDENTICAL = 3


@dataclass(frozen=True, kw_only=True)
class GeneratedTrace:
    """Requests by time, and the digests of the system prompts that are worth knowing."""

    requests: tuple[TracedRequest, ...]
    prompts: frozenset[bytes]


class _Generator:
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._block = count()
        self._requests: list[TracedRequest] = []
        self._prompts = [self._new_blocks(self._random.choice((2, 3, 5, 8, 13, 20, 32))) for _ in range(_NUM_PROMPTS)]
        self._prompts[7] = self._prompts[4] + self._new_blocks(6)
        self._prompts[11] = self._prompts[4] + self._new_blocks(10)
        self._late = [
            self._new_blocks(self._random.choice((2, 5, 8, 13))) if number % 4 == 1 else prompt
            for number, prompt in enumerate(self._prompts)
        ]
        self._identical = [self._new_blocks(self._random.randint(4, 12)) for _ in range(_NUM_IDENTICAL)]
        self._use = list(accumulate((rank + 1) ** -_ZIPF for rank in range(_NUM_PROMPTS)))

    def generate(self, num_requests: int) -> GeneratedTrace:
        while len(self._requests) < num_requests:
            time_s = self._random.uniform(0, _DURATION_S)
            kind = self._random.random()
            if kind < _ONE_OFF:
                self._send(time_s, self._new_blocks(self._random.randint(2, 40)), None)
            elif kind < _ONE_OFF + _OWN_SYSTEM_PROMPT:
                self._chat(time_s, self._new_blocks(self._random.randint(2, 12)))
            elif kind < _ONE_OFF + _OWN_SYSTEM_PROMPT + _IDENTICAL:
                self._send(time_s, self._random.choice(self._identical), None)
            else:
                prompts = self._prompts if time_s < _DURATION_S / 2 else self._late
                self._chat(time_s, self._random.choices(prompts, cum_weights=self._use)[0])
        requests = sorted(self._requests[:num_requests], key=lambda request: request.time_s)
        known = {make_request(0, len(ids) * BLOCK_TOKENS, ids).blocks[-1] for ids in self._prompts + self._late}
        return GeneratedTrace(requests=tuple(requests), prompts=frozenset(known))

    def _chat(self, time_s: float, system: list[int]) -> None:
        blocks = system + self._new_blocks(self._random.randint(1, 4))
        self._send(time_s, blocks, len(system))
        while self._random.random() < _GOES_ON:
            time_s += self._random.uniform(10, 120)
            blocks = blocks + self._new_blocks(self._random.randint(1, 3))
            self._send(time_s, blocks, len(system))

    def _send(self, time_s: float, blocks: list[int], num_system_blocks: int | None) -> None:
        system_tokens = None if num_system_blocks is None else num_system_blocks * BLOCK_TOKENS
        self._requests.append(make_request(time_s, len(blocks) * BLOCK_TOKENS, blocks, system_tokens))

    def _new_blocks(self, num_blocks: int) -> list[int]:
        return [next(self._block) for _ in range(num_blocks)]


def generated_trace(seed: int = 1, num_requests: int = 20_000) -> GeneratedTrace:
    """Return the trace of a seed: the same for the same seed and number."""
    return _Generator(seed).generate(num_requests)
