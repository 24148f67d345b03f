"""What lies in vLLM's blocks and in arena rows: digests of tokens, so that a wrong block, row or moment shows."""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FIRST_TOKEN, LAST_TOKEN = 50, 900


class TokenSequence:
    """The tokens that a request will turn out to have, and the KV of each.

    The model is deterministic: what it samples follows from the tokens before, so a sequence goes on for ever.
    """

    def __init__(self, prompt: Sequence[int], salt: str = "") -> None:
        self.num_prompt_tokens = len(prompt)
        self._last = zlib.crc32(salt.encode())
        self._tokens: list[int] = []
        self._digests: list[int] = []
        for token in prompt:
            self._append(token)

    def token(self, position: int) -> int:
        """Return the token at a position."""
        self._grow(position + 1)
        return self._tokens[position]

    def kv(self, begin: int, end: int) -> Digests:
        """Return the KV of these positions: of each a digest of all tokens up to it."""
        self._grow(end)
        return np.array(self._digests[begin:end], np.int64)

    def without_salt(self, num_tokens: int) -> "TokenSequence":
        """Return its first tokens as one without a salt has them."""
        self._grow(num_tokens)
        return TokenSequence(self._tokens[:num_tokens])

    def num_shared(self, prompt: Sequence[int]) -> int:
        """Return how many tokens it has in common with a prompt."""
        self._grow(len(prompt))
        pairs = enumerate(zip(self._tokens, prompt, strict=False))
        return next((index for index, (token, other) in pairs if token != other), len(prompt))

    def _grow(self, length: int) -> None:
        while len(self._tokens) < length:
            self._append(FIRST_TOKEN + self._last % (LAST_TOKEN - FIRST_TOKEN))

    def _append(self, token: int) -> None:
        self._last = hash((self._last, token))
        self._tokens.append(token)
        self._digests.append(self._last)
