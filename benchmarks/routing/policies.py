"""How routers choose an engine for a request, each from what it knows."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from tests.subscribers.wire import AskedPrompt, Message, RefusedBatchError, RouterIndex

Load = tuple[int, int]
"""Of an engine: its requests under way, then all that it was sent."""
_TREE_THRESHOLD = 0.3
"""Of a prompt that has to match: `--cache-threshold` of vllm-router 0.1.17, by default."""


class Policy(Protocol):
    """Chooses engines."""

    def choose(self, prompt: AskedPrompt, loads: Mapping[str, Load]) -> str:
        """Return the engine for a request; it is sent there."""

    def receive(self, engine: str, message: Message) -> None:
        """Take what an engine has published."""

    def restarted(self, engine: str) -> None:
        """An engine was restarted: what it had in its cache is gone."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._num_sent = 0

    def choose(self, prompt: AskedPrompt, loads: Mapping[str, Load]) -> str:
        """Return the next engine."""
        self._num_sent += 1
        return list(loads)[self._num_sent % len(loads)]

    def receive(self, engine: str, message: Message) -> None:
        """Take no notice."""

    def restarted(self, engine: str) -> None:
        """Take no notice."""


class PrefixTree:
    """Remembers which engine was sent which prefix last, and sends what begins alike there.

    Source: `src/policies/cache_aware.rs` of vllm-project/router at 16917f4, whose tree is sglang-router's: it learns
    from requests only, and below a share of the prompt that matches it takes the engine with the least load. Blocks of
    tokens stand for its characters. Left out: what it does when loads differ by 64 requests, and its bound.

    Args:
        block_tokens: By how many it compares.
        forgets_restarted: A restarted engine is taken out and registered again, as where pods come and go; False: it
            stays registered, and was only unhealthy in between.
    """

    def __init__(self, block_tokens: int, *, forgets_restarted: bool) -> None:
        self._block_tokens, self._forgets_restarted = block_tokens, forgets_restarted
        self._sent: dict[int, dict[str, None]] = {}  # by the hash of a prefix: engines, the latest last

    def choose(self, prompt: AskedPrompt, loads: Mapping[str, Load]) -> str:
        """Return the engine that was sent the longest part of the prompt, if that is long enough."""
        prefixes = self._prefixes(prompt.tokens)
        matched = [each for each in prefixes if each in self._sent]
        if len(matched) * self._block_tokens > _TREE_THRESHOLD * len(prompt.tokens):
            engine = next(reversed(self._sent[matched[-1]]))
        else:
            engine = least_loaded(loads)
        for each in prefixes:
            engines = self._sent.setdefault(each, {})
            engines.pop(engine, None)
            engines[engine] = None
        return engine

    def receive(self, engine: str, message: Message) -> None:
        """Take no notice."""

    def restarted(self, engine: str) -> None:
        """Forget it, if it was taken out."""
        if self._forgets_restarted:
            for prefix, engines in list(self._sent.items()):
                engines.pop(engine, None)
                if not engines:
                    del self._sent[prefix]

    def _prefixes(self, tokens: Sequence[int]) -> list[int]:
        hashes: list[int] = []
        parent = 0
        for begin in range(0, len(tokens) - self._block_tokens + 1, self._block_tokens):
            parent = hash((parent, tuple(tokens[begin : begin + self._block_tokens])))
            hashes.append(parent)
        return hashes


class ByEvents:
    """Sends a request where a router's index has most of its prompt.

    Source: `kv_aware.rs` of vllm-project/router at 71af994, and llm-d's scorer: the highest score, and the least load
    where nothing is known. Left out: weights of load beside that of the prompt.
    """

    def __init__(self, index: RouterIndex) -> None:
        self._index = index

    def choose(self, prompt: AskedPrompt, loads: Mapping[str, Load]) -> str:
        """Return the engine with the highest score; of several, the one with the least load."""
        scores = self._index.scores(prompt)
        best = max((scores.get(engine, 0.0) for engine in loads), default=0.0)
        return least_loaded({engine: load for engine, load in loads.items() if scores.get(engine, 0.0) == best})

    def receive(self, engine: str, message: Message) -> None:
        """Have the index take it, if it can decode it."""
        with suppress(RefusedBatchError):
            self._index.receive(engine, message)

    def restarted(self, engine: str) -> None:
        """Forget it: its subscription ends, or its numbers begin again."""
        self._index.forget(engine)


class AllIsKnown:
    """Asks every engine what it has: no router does. It shows what could be hit.

    Args:
        ask: Returns how many tokens of a prompt an engine would not have to compute.
    """

    def __init__(self, ask: Callable[[str, AskedPrompt], int]) -> None:
        self._ask = ask

    def choose(self, prompt: AskedPrompt, loads: Mapping[str, Load]) -> str:
        """Return the engine that has most of the prompt; of several, the one with the least load."""
        hits = {engine: self._ask(engine, prompt) for engine in loads}
        best = max(hits.values())
        return least_loaded({engine: load for engine, load in loads.items() if hits[engine] == best})

    def receive(self, engine: str, message: Message) -> None:
        """Take no notice."""

    def restarted(self, engine: str) -> None:
        """Take no notice."""


def least_loaded(loads: Mapping[str, Load]) -> str:
    """Return the engine with the fewest requests under way; of several, the one that was sent the fewest."""
    return min(loads, key=loads.__getitem__)
