"""Which prompts another one begins with: found by digests, because to compare each with each would take the loop."""

from collections.abc import Mapping

import xxhash

from kvtier.concurrency.turns import Breather
from kvtier.ledger import PromptRow

_Scope = tuple[str, str | None]
"""LoRA adapter and cache salt of requests that may be restored a prompt; None: with any salt."""


class Beginnings:
    """Prompts by the tokens that their whole chunks cover: a request must begin with these to be restored them.

    Attributes:
        digests: Of those tokens, by pin id and number of tokens.
    """

    def __init__(self, known: Mapping[tuple[str, int], bytes]) -> None:
        """Begin with no prompts; digests that are `known` are not made again: a pin's tokens do not change."""
        self._known = known
        self.digests: dict[tuple[str, int], bytes] = {}
        self._found: dict[_Scope, dict[int, dict[bytes, list[PromptRow]]]] = {}  # then by number and digest of tokens
        self._lengths: dict[_Scope, list[int]] = {}  # once all are there: in order

    def add(self, prompt: PromptRow, num_tokens: int) -> None:
        """Take a prompt of which whole chunks cover this many tokens, not 0. Called before `of`, and not after it."""
        key = prompt.pin_id, num_tokens
        digest = self._known.get(key) or xxhash.xxh3_128_digest(prompt.token_ids[:num_tokens].to_bytes())
        self.digests[key] = digest
        scope = prompt.lora_path, None if prompt.public else prompt.cache_salt
        self._found.setdefault(scope, {}).setdefault(num_tokens, {}).setdefault(digest, []).append(prompt)

    async def of(self, longer: PromptRow, breather: Breather) -> list[PromptRow]:
        """Return those with which each request begins that begins with this prompt; with turns of the loop."""
        found = list[PromptRow]()
        for scope in ((longer.lora_path, longer.cache_salt), (longer.lora_path, None)):
            by_length, digest, end = self._found.get(scope, {}), xxhash.xxh3_128(), 0
            if scope not in self._lengths:
                self._lengths[scope] = sorted(by_length)
            for num_tokens in self._lengths[scope]:
                if num_tokens > len(longer.tokens):
                    break
                digest.update(longer.token_ids[end:num_tokens].to_bytes())
                end = num_tokens
                same = by_length[num_tokens].get(digest.digest(), ())
                found += [each for each in same if each.model == longer.model or "" in (each.model, longer.model)]
                await breather.pause()
        return found
