"""What a replay asks of a cache."""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import Protocol

Blocks = Sequence[int]
"""Numbers of a request's blocks; two requests share a number where their prefixes are equal up to there."""


class Cache(Protocol):
    """A cache that sees one request after the other."""

    def request(self, blocks: Blocks) -> int:
        """Serve a request and store what it missed; return how many of its first blocks were hit."""


def num_held(blocks: Blocks, held: Container[int]) -> int:
    """Return how many blocks are held up to the first one that is not: later ones serve no hit."""
    return next((number for number, block in enumerate(blocks) if block not in held), len(blocks))


class BlockCache(ABC):
    """A policy that knows blocks alone. Heads are used last, so that tails go before them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def request(self, blocks: Blocks) -> int:
        """See `Cache`."""
        num_hits = num_held(blocks, self)
        for block in reversed(blocks):
            self.use(block)
        return num_hits

    @abstractmethod
    def __contains__(self, block: object) -> bool: ...

    @abstractmethod
    def use(self, block: int) -> None:
        """Count a use; take the block in if it is not held."""
