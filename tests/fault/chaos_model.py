"""What a daemon has promised, as those who asked it know it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.core.layout import ChunkKey
from tests.fakes.scripted_engine import chunk_key

CHUNK_TOKENS = 16
SPACES = ("model", "other")
"""Model names of the engines; each has a namespace of its own."""
MAX_BUNDLES = 30
Place = tuple[int, ChunkKey]


@dataclass
class Prompt:
    """One prompt as its operator knows it.

    Attributes:
        space: Which of `SPACES` its engine is in.
        keys: Its chunks; the head may be another prompt's too. The same key in another space is another chunk.
        pin_id: As acknowledged; None while no answer has come.
        pinned: Whether the promise stands; None: asked for a change, and no answer has come.
        durable: The daemon said so, and it was not evicted since.
        removal_pending: An operator asked to forget it, and no answer has come.
    """

    name: str
    space: int
    keys: tuple[ChunkKey, ...]
    first_token: int
    pin_id: str | None = None
    pinned: bool | None = None
    durable: bool = False
    removal_pending: bool = False

    @property
    def places(self) -> set[Place]:
        """Its chunks and the space they are in."""
        return {(self.space, key) for key in self.keys}

    @property
    def tokens(self) -> list[int]:
        """Token ids, of no meaning."""
        return list(range(self.first_token, self.first_token + len(self.keys) * CHUNK_TOKENS))


@dataclass
class Counts:
    """What a run has done, for its report."""

    kills: int = 0
    stops: int = 0
    reboots: int = 0
    damages: int = 0
    pins: int = 0
    stored_chunks: int = 0
    verified_chunks: int = 0
    evictions: int = 0
    unpins: int = 0
    checked_durable: int = 0
    exports: int = 0
    imports: int = 0

    @property
    def lives(self) -> int:
        """Ends of a daemon, however it ended."""
        return self.kills + self.stops


@dataclass
class Model:
    """What the daemon has promised, over all its lives.

    Attributes:
        bundles: The last few exports, by the prompt's name.
        is_damaged: Somebody has damaged a pack, and no repair was asked for since.
    """

    rng: random.Random
    chunks_per_prompt: int = 3
    prompts: dict[str, Prompt] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    num_prompts: int = 0
    num_ordinary: int = 0
    bundles: dict[str, tuple[Prompt, bytes]] = field(default_factory=dict)
    is_damaged: bool = False

    def new_prompt(self) -> Prompt:
        """Return another prompt; one in three shares its head with an earlier one."""
        number = self.num_prompts
        self.num_prompts += 1
        name = f"p{number}"
        keys = [chunk_key((name, i)) for i in range(self.chunks_per_prompt)]
        if self.prompts and self.rng.random() < 0.33:
            keys[0] = self.rng.choice(list(self.prompts.values())).keys[0]
        prompt = self.prompts[name] = Prompt(name, self.rng.randrange(len(SPACES)), tuple(keys), number * 1000)
        return prompt

    def keep_bundle(self, prompt: Prompt, data: bytes) -> None:
        """Remember an export, and the last few only."""
        self.bundles[prompt.name] = (prompt, data)
        while len(self.bundles) > MAX_BUNDLES:
            del self.bundles[next(iter(self.bundles))]

    def some(self, condition: Callable[[Prompt], bool]) -> Prompt | None:
        """Return a random prompt that fulfils a condition."""
        fitting = [prompt for prompt in self.prompts.values() if condition(prompt)]
        return self.rng.choice(fitting) if fitting else None

    def evicted(self, gone: set[Place]) -> None:
        """These chunks may be gone: what has one of them is not known to be durable any longer."""
        for prompt in self.prompts.values():
            if not gone.isdisjoint(prompt.places):
                prompt.durable = False
