"""Where the system prompt of a request ends: before the first run of tokens that opens a user turn."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvtier_connector.discovery.observed_requests import ChunkShape, ObservedRequest

MAX_HEADS = 256
_PIECE_TOKENS = 8192
"""Searched in one call, which keeps the interpreter's lock: some 0.1 ms."""
_MAX_SEARCHED_TOKENS = 131_072
_MAX_TRIED = 4096
"""Anchors that lead to no opening: a hostile prompt has nothing else. With these bounds a search takes 3 ms at most."""


class _KnownEnd(NamedTuple):
    end: int
    chain_hash: bytes  # of the whole blocks before it


class SystemPrompts:
    """Finds the end of system prompts, and remembers it by their first chunk. One thread.

    Args:
        opening: The tokens that open the first user turn.
        anchor: Index of the one among them that is the rarest in prompts.
    """

    def __init__(self, shape: ChunkShape, opening: Sequence[int], anchor: int = 0) -> None:
        self._shape, self._opening, self._anchor = shape, list(opening), anchor
        self._ends: OrderedDict[bytes, _KnownEnd] = OrderedDict()

    def end(self, request: ObservedRequest) -> int | None:
        """Return how many tokens stand before the first user turn; None when there is none before the first image."""
        if self._shape.covered(request) == 0:
            return self._find(request)
        head = self._shape.chain_hash(request, self._shape.chunk_tokens)
        known = self._ends.get(head)
        if known is None or not self._holds(known, request):
            end = self._find(request)
            if end is None:
                return None
            known = self._ends[head] = _KnownEnd(end, self._shape.chain_hash(request, end))
            if len(self._ends) > MAX_HEADS:
                self._ends.popitem(last=False)
        self._ends.move_to_end(head)
        return known.end

    def _holds(self, known: _KnownEnd, request: ObservedRequest) -> bool:
        """Return whether the request has this system prompt, but for tokens of a last block that is not whole."""
        end = known.end
        if self._shape.chain_hash(request, end) != known.chain_hash or not self._opens_at(request, end):
            return False
        whole = end - end % self._shape.hash_tokens
        return self._find(request, max(0, whole - len(self._opening) + 1)) == end

    def _opens_at(self, request: ObservedRequest, at: int) -> bool:
        return request.tokens[at : at + len(self._opening)] == self._opening

    def _find(self, request: ObservedRequest, first: int = 0) -> int | None:
        """Return where the opening begins, from a token on; None beyond the bounds of the search too."""
        tokens, anchor, tried = request.tokens, self._anchor, 0
        limit = min(request.num_tokens, request.image_at) - len(self._opening) + anchor + 1
        at = first + anchor
        limit = min(limit, at + _MAX_SEARCHED_TOKENS)
        while at < limit and tried < _MAX_TRIED:
            try:
                at = tokens.index(self._opening[anchor], at, min(at + _PIECE_TOKENS, limit))
            except ValueError:
                at = min(at + _PIECE_TOKENS, limit)
                continue
            if self._opens_at(request, at - anchor):
                return at - anchor
            at += 1
            tried += 1
        return None
