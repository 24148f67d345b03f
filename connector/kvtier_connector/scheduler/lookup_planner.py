"""Which chunks of a request are worth asking the daemon for. Dict lookups only; most requests cost one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice, takewhile
from types import MappingProxyType
from typing import NamedTuple

from kvtier.core.layout import ChunkKey
from kvtier_connector.engine.chunk_keys import GroupShape, PromptHashes
from kvtier_connector.outcomes.pin_index import PinShare
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror


class LookupQuery(NamedTuple):
    """The chunks that one Acquire asks for."""

    keys: tuple[ChunkKey, ...]  # in prefix order within each group
    num_prefix_keys: int  # how many of `keys`, the first ones, are the run of the first full-attention group
    chunk_tokens: int  # tokens of one chunk of that run
    first_token: int  # where the run begins
    end_token: int  # where it ends
    # by the request's own key, that of a public prompt which is asked for in its place
    aliases: Mapping[ChunkKey, ChunkKey] = MappingProxyType({})


class LookupPlanner:
    """Chooses the keys of an Acquire from vLLM's block hashes and the mirror of what is held.

    It may ask for too much or too little, never wrongly: vLLM's own lookup decides over the answer, chunk by chunk.
    Where a request with a salt begins with a public prompt, chunks of that go before the request's own: all requests
    use them, so they are the more likely in host memory.
    """

    def __init__(self, groups: Sequence[GroupShape], mirror: ChunkMirror) -> None:
        self._full = tuple(group for group in groups if not group.window_chunks)
        self._windowed = tuple(group for group in groups if group.window_chunks)
        self._mirror = mirror
        # What vLLM drops at the end of each hit, its prefix cache's too. Source: `find_longest_cache_hit` of vLLM 0.32.
        self.dropped_tokens = max((group.chunk_tokens for group in groups if group.is_draft), default=0)

    def first_key(self, prompt: PromptHashes) -> ChunkKey | None:
        """Return the known key by which the request is recognized, or None when it begins like nothing that is known.

        With full attention that is its first chunk. Without, pins consist of last windows only: every chunk is tried.
        """
        group = self._full[0] if self._full else self._windowed[0]
        num_chunks = group.num_chunks(prompt.own)
        chunks = range(min(1, num_chunks) if self._full else num_chunks)
        return next(filter(self._mirror.knows, _keys(group, chunks, prompt, self._mirror.knows)), None)

    def share(self, prompt: PromptHashes) -> PinShare | None:
        """Return what a prompt shares with a pin."""
        return self._mirror.index.find(prompt)

    def reachable_tokens(self, num_prompt_tokens: int) -> int:
        """Return the tokens of a prompt that a hit may cover: whole chunks, without the last token."""
        chunk_tokens = (self._full or self._windowed)[0].chunk_tokens
        return (num_prompt_tokens - 1) // chunk_tokens * chunk_tokens

    def lacks_end(self, prompt: PromptHashes, num_prompt_tokens: int) -> bool:
        """Return whether the last chunk that a hit of this prompt may cover is not known to be held."""
        group = (self._full or self._windowed)[0]
        end = self._reachable_chunks(group, prompt, num_prompt_tokens)
        return end > 0 and not self._mirror.may_be_held(
            next(_keys(group, range(end - 1, end), prompt, self._mirror.may_be_held))
        )

    def missing_tokens(self, prompt: PromptHashes, num_computed_tokens: int, num_prompt_tokens: int) -> int:
        """Return the tokens of the prompt that a hit may cover, and neither vLLM's prefix cache nor the daemon has."""
        group = (self._full or self._windowed)[0]
        end = self._reachable_chunks(group, prompt, num_prompt_tokens)
        chunks = range(num_computed_tokens // group.chunk_tokens, end)
        keys = _keys(group, chunks, prompt, self._mirror.may_be_held)
        num_held = sum(1 for _ in takewhile(self._mirror.may_be_held, keys))
        return max(0, len(chunks) - num_held) * group.chunk_tokens

    def _reachable_chunks(self, group: GroupShape, prompt: PromptHashes, num_prompt_tokens: int) -> int:
        return min(self.reachable_tokens(num_prompt_tokens) // group.chunk_tokens, group.num_chunks(prompt.own))

    def has_whole_chunk(self, prompt: PromptHashes) -> bool:
        """Return whether a prompt has any chunk."""
        return (self._full or self._windowed)[0].num_chunks(prompt.own) > 0

    def plan(self, prompt: PromptHashes, num_computed_tokens: int) -> LookupQuery | None:
        """Return what to ask beyond vLLM's prefix-cache hit, or None when nothing that may be held could extend it."""
        aliases: dict[ChunkKey, ChunkKey] = {}
        end_token = max(group.num_chunks(prompt.own) * group.chunk_tokens for group in self._full + self._windowed)
        runs: list[list[ChunkKey]] = []
        for group in self._full:
            first = num_computed_tokens // group.chunk_tokens
            chunks = range(first, group.num_chunks(prompt.own))
            candidates = _keys(group, chunks, prompt, self._mirror.may_be_held, aliases)
            run = list(takewhile(self._mirror.may_be_held, candidates))
            if len(run) <= group.is_draft:
                return None
            end_token = min(end_token, (first + len(run)) * group.chunk_tokens)
            runs.append(run)
        windows: list[dict[int, ChunkKey]] = []
        for group in self._windowed:
            held = self._held_chunks(group, prompt, aliases, num_computed_tokens, end_token)
            if not held:
                return None
            # No hit ends behind the last chunk that a window needs: what lies there is not worth a lease.
            end_token = min(end_token, (max(held) + 1) * group.chunk_tokens)
            windows.append(held)
        return self._cut(runs, windows, num_computed_tokens, end_token)._replace(aliases=aliases)

    def _cut(
        self,
        runs: Sequence[list[ChunkKey]],
        windows: Sequence[dict[int, ChunkKey]],
        num_computed_tokens: int,
        end_token: int,
    ) -> LookupQuery:
        """Leave out what ends behind `end_token`; a chunk that reaches beyond it is kept, vLLM may ask for it."""
        keys: list[ChunkKey] = []
        num_prefix_keys = 0
        for group, run in zip(self._full, runs, strict=True):
            first = num_computed_tokens // group.chunk_tokens
            kept = run[: -(-end_token // group.chunk_tokens) - first]
            num_prefix_keys = num_prefix_keys or len(kept)
            keys.extend(kept)
        for group, held in zip(self._windowed, windows, strict=True):
            end = -(-end_token // group.chunk_tokens)
            keys.extend(held[chunk_idx] for chunk_idx in sorted(held) if chunk_idx < end)
        chunk_tokens = (self._full or self._windowed)[0].chunk_tokens
        first_token = num_computed_tokens // chunk_tokens * chunk_tokens
        return LookupQuery(tuple(keys), num_prefix_keys, chunk_tokens, first_token, end_token)

    def known_prefix(self, prompt: PromptHashes, num_tokens: int) -> list[ChunkKey]:
        """Return the known chunks within the first `num_tokens` tokens."""
        keys: list[ChunkKey] = []
        for group in self._full + self._windowed:
            chunks = range(min(num_tokens // group.chunk_tokens, group.num_chunks(prompt.own)))
            keys.extend(filter(self._mirror.knows, _keys(group, chunks, prompt, self._mirror.knows)))
        return keys

    def _held_chunks(
        self,
        group: GroupShape,
        prompt: PromptHashes,
        aliases: MutableMapping[ChunkKey, ChunkKey],
        num_computed_tokens: int,
        end_token: int,
    ) -> dict[int, ChunkKey]:
        """Return held chunks by index, the last ones: vLLM looks for a whole window from the end.

        A pinned prompt has one window or few. An unpinned prompt may have thousands of chunks, and asking for
        any but those of the last windows gains nothing.
        """
        end = min(-(-end_token // group.chunk_tokens), group.num_chunks(prompt.own))
        chunks = range(end - 1, num_computed_tokens // group.chunk_tokens - 1, -1)
        candidates = zip(chunks, _keys(group, chunks, prompt, self._mirror.may_be_held, aliases), strict=True)
        held = ((idx, key) for idx, key in candidates if self._mirror.may_be_held(key))
        return dict(islice(held, max(256, 4 * (group.window_chunks + 1))))


def _keys(
    group: GroupShape,
    chunks: Iterable[int],
    prompt: PromptHashes,
    is_preferred: Callable[[ChunkKey], bool],
    aliases: MutableMapping[ChunkKey, ChunkKey] | None = None,
) -> Iterator[ChunkKey]:
    """Yield the key by which to ask for each chunk: the public prompt's if it has one that is preferred, else its own.

    Args:
        group: Of the chunks.
        chunks: Their indexes.
        prompt: What names them.
        is_preferred: Asked of keys of the public prompt.
        aliases: Gets the keys of the public prompt that are yielded, by the request's own.
    """
    digest, num_public = prompt.adapter_digest, group.num_chunks(prompt.public)
    for chunk_idx in chunks:
        key = group.key(prompt.own, chunk_idx, digest)
        if chunk_idx < num_public and is_preferred(public := group.key(prompt.public, chunk_idx, digest)):
            if aliases is not None:
                aliases[key] = public
            key = public
        yield key
