"""Public prompts: which chunks that were stored without a salt a request with a salt may be restored.

vLLM's block hashes chain, and the salt is part of the first: a request with a salt shares no hash with the same prompt
without one. What it shares are the tokens. From them this finds the hashes that the request would have without its
salt, as far as a public prompt reaches. They were computed when its pin was bound, so nothing is hashed here.

Only lookups and loads use them. Stores never do: what a request computes stays under its own hashes.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvtier.core.layout import GROUP_SUFFIX_BYTES

_TOKEN_BYTES = array("I").itemsize

AdapterName = tuple[str, str]
"""Name and path of a LoRA adapter, which vLLM hashes; both empty without one."""


@dataclass(frozen=True, kw_only=True)
class PublicPrompt:
    """The whole chunks of a public prompt."""

    adapter: AdapterName
    tokens: bytes  # as `pack_tokens` returns them: all that its hashes cover
    hashes: tuple[bytes, ...]  # vLLM's block hashes, without a salt
    tokens_per_hash: int
    num_lookahead_tokens: int = 0  # tokens behind its block that a hash covers

    def shared_hashes(self, tokens: bytes) -> Sequence[bytes]:
        """Return the hashes of all blocks that are equal, from the first on, in these tokens."""
        if tokens.startswith(self.tokens):
            return self.hashes
        lengths = range(1, len(self.hashes) + 1)
        return self.hashes[: bisect_left(lengths, True, key=lambda length: not self._begins(tokens, length))]

    def _begins(self, tokens: bytes, num_hashes: int) -> bool:
        num_tokens = num_hashes * self.tokens_per_hash + self.num_lookahead_tokens
        return tokens.startswith(self.tokens[: num_tokens * _TOKEN_BYTES])


@dataclass(frozen=True)
class PublicPrefix:
    """The blocks that a request with a salt shares with a public prompt."""

    unsalted: Sequence[bytes] = ()  # their hashes in the public prompt
    salted: Sequence[bytes] = ()  # their hashes in the request

    def covers(self, offload_key: bytes) -> bool:
        """Return whether this chunk of the request, by vLLM's key, is one of the public prompt's."""
        return bool(self.salted) and offload_key[:-GROUP_SUFFIX_BYTES] in self._salted

    @cached_property
    def _salted(self) -> frozenset[bytes]:
        return frozenset(self.salted)


NOTHING_PUBLIC = PublicPrefix()


class PublicPrompts:
    """The public prompts that are pinned now. Scheduler thread only.

    Prompts are sorted by their tokens, so that the two beside a request's tokens share the most with it: what a request
    costs hardly depends on how many there are.
    """

    def __init__(self) -> None:
        self.version = 0  # grows when `find` may have another answer
        self._by_pin_id: dict[str, PublicPrompt] = {}
        self._sorted: dict[AdapterName, list[PublicPrompt]] = {}
        self._max_tokens: dict[AdapterName, int] = {}  # of the longest there was

    def add(self, pin_id: str, prompt: PublicPrompt) -> None:
        """Add a prompt; its pin must not be there."""
        self.version += 1
        self._by_pin_id[pin_id] = prompt
        insort(self._sorted.setdefault(prompt.adapter, []), prompt, key=_tokens_of)
        num_tokens = len(prompt.tokens) // _TOKEN_BYTES
        self._max_tokens[prompt.adapter] = max(num_tokens, self._max_tokens.get(prompt.adapter, 0))

    def remove(self, pin_id: str) -> None:
        """Remove the prompt of a pin, if it is public."""
        prompt = self._by_pin_id.pop(pin_id, None)
        if prompt is None:
            return
        self.version += 1
        prompts = self._sorted[prompt.adapter]
        index = bisect_left(prompts, prompt.tokens, key=_tokens_of)
        while prompts[index] is not prompt:  # others may have the same tokens
            index += 1
        del prompts[index]
        if not prompts:
            del self._sorted[prompt.adapter], self._max_tokens[prompt.adapter]

    def clear(self) -> None:
        """Remove all."""
        self.version += 1
        self._by_pin_id.clear()
        self._sorted.clear()
        self._max_tokens.clear()

    def find(self, request: Any) -> PublicPrefix:
        """Return what a request of vLLM shares with the public prompt that shares most with it.

        Tokens decide, one by one. So what vLLM hashes besides tokens ends the prefix (images), or rules it out
        (embeddings); an adapter must be the prompt's.
        """
        lora = request.lora_request
        adapter = (lora.lora_name, lora.lora_path) if lora else ("", "")
        prompts = self._sorted.get(adapter)
        if not prompts or request.prompt_embeds is not None:
            return NOTHING_PUBLIC
        num_tokens = self._max_tokens[adapter]
        if request.mm_features:
            num_tokens = min(num_tokens, request.mm_features[0].mm_position.offset)
        try:
            first_block = pack_tokens(request.all_token_ids[: min(num_tokens, prompts[0].tokens_per_hash)])
            index = bisect_left(prompts, first_block, key=_tokens_of)
            if index == len(prompts) or not prompts[index].tokens.startswith(first_block):
                return NOTHING_PUBLIC
            tokens = pack_tokens(request.all_token_ids[:num_tokens])
        except OverflowError:  # no token of a model
            return NOTHING_PUBLIC
        index = bisect_left(prompts, tokens, key=_tokens_of)
        beside = prompts[max(0, index - 1) : index + 1]
        unsalted = max((prompt.shared_hashes(tokens) for prompt in beside), key=len)
        return PublicPrefix(unsalted, request.block_hashes[: len(unsalted)]) if unsalted else NOTHING_PUBLIC


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as bytes that are compared fast; raises OverflowError for one that has not 32 bits."""
    return array("I", tokens).tobytes()


def _tokens_of(prompt: PublicPrompt) -> bytes:
    return prompt.tokens
