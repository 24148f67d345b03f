"""vLLM's block pool and its users, as far as admission sees them: prompts in use, idle in the cache, or gone."""

import random
from dataclasses import dataclass

PROMPT_BLOCKS = 62
BLOCK_TOKENS = 32
TURN_TOKENS = 46
"""What each turn of a conversation adds to its prompt, with the answer before it."""


@dataclass(kw_only=True, eq=False)
class SimulatedRequest:
    """One turn of a user; times in seconds.

    Attributes:
        own_blocks: Behind the prompt, which others share.
        computed_tokens: Of its prompt, when it begins.
        waits_for_answer: The daemon has not answered yet: vLLM goes on to the next request.
    """

    req_id: str
    user: int
    turn: int
    prompt: int
    own_blocks: int
    computed_tokens: int
    arrived_s: float
    waits_for_answer: bool = False
    ready_s: float = 0.0
    first_token_s: float = 0.0
    num_tokens: int = 0


class SimulatedPool:
    """Blocks; a prompt in use holds its blocks once, however many requests use it."""

    def __init__(self, num_blocks: int, num_prompts: int) -> None:
        self.num_free = num_blocks
        self.users = [0] * num_prompts
        self.since = [0] * num_prompts
        self._idle: dict[int, int] = {}  # prompts without users, and their blocks that are still cached; oldest first

    def cached_blocks(self, prompt: int) -> int:
        """Return how many blocks of the prompt vLLM's prefix cache has."""
        return PROMPT_BLOCKS if self.users[prompt] else self._idle.get(prompt, 0)

    def needed_blocks(self, request: SimulatedRequest) -> int:
        """Return how many free blocks the request takes."""
        return request.own_blocks + (0 if self.users[request.prompt] else PROMPT_BLOCKS)

    def admit(self, request: SimulatedRequest, step: int) -> None:
        """Give the request its blocks."""
        self.num_free -= self.needed_blocks(request)
        if not self.users[request.prompt]:
            self.since[request.prompt] = step
            self._idle.pop(request.prompt, None)
        self.users[request.prompt] += 1
        self._evict()

    def end(self, request: SimulatedRequest) -> None:
        """Take them back; the prompt's stay cached until others need them."""
        self.users[request.prompt] -= 1
        self.num_free += request.own_blocks
        if not self.users[request.prompt]:
            self.num_free += PROMPT_BLOCKS
            self._idle[request.prompt] = PROMPT_BLOCKS

    def _evict(self) -> None:
        num_over = sum(self._idle.values()) - self.num_free
        for prompt in list(self._idle):
            if num_over <= 0:
                return
            num_evicted = min(num_over, self._idle[prompt])
            num_over -= num_evicted
            self._idle[prompt] -= num_evicted
            if not self._idle[prompt]:
                del self._idle[prompt]


def conversations(num_users: int, num_turns: int, num_prompts: int, seed: int) -> list[list[tuple[int, int]]]:
    """Return what each user sends: the prompt of each turn, and which turn of its conversation it is."""
    users = []
    for user in range(num_users):
        chance, turns = random.Random(f"{seed}-{user}"), list[tuple[int, int]]()
        while len(turns) < num_turns:
            prompt = chance.randrange(num_prompts)
            turns += [(prompt, number) for number in range(chance.randint(1, 3))]
        users.append(turns[:num_turns])
    return users
