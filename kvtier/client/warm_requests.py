"""Warm requests, which load prompts back into vLLM's prefix cache; `kvtier warm` and the warm start send them.

One is a normal completion of one token whose prompt is the pinned tokens: vLLM takes what kvtier holds of it into
its own blocks. Its id marks it, so that it is never counted as a user's.
"""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

_ID_PREFIX = "kvtier-warm-"

P = TypeVar("P", bound=Any)
"""A prompt's status: the protocol's message (the connector has it), or the library's value with the same fields."""


def new_request_id() -> str:
    """Return an id for a warm request."""
    return f"{_ID_PREFIX}{uuid.uuid4().hex}"


def is_warm_request(request_id: str) -> bool:
    """Return whether a request is a warm request. vLLM adds to the id before and behind it."""
    return _ID_PREFIX in request_id


def by_importance(prompts: Iterable[P]) -> list[P]:
    """Return prompts by priority, the newest first among equals; those whose pin has ended last."""
    return sorted(prompts, key=lambda status: (status.pinned, status.priority, status.created_unix_s), reverse=True)


def same_request(status: Any) -> tuple[str, int, str, str, str]:
    """Return what is equal for prompts whose warm requests are the same: several names may stand for one prompt."""
    return status.tokens_digest, status.num_tokens, status.model, status.lora_name, status.cache_salt


def warm_tokens(status: Any, tokens: Sequence[int]) -> list[int]:
    """Return the tokens to ask with: one more where whole chunks cover the prompt to its end.

    vLLM always computes the last token of a request, and with it the chunk in which it lies: a request that ends where
    the last chunk does would leave that one out. Where windows or recurrent state keep a prompt from being bound up to
    there, it is not covered to its end, and nothing is added.
    """
    ends_with_a_chunk = any(binding.covered_tokens == len(tokens) for binding in status.bindings)
    return [*tokens, *tokens[-1:]] if ends_with_a_chunk else list(tokens)


def warm_body(model: str, tokens: Sequence[int], cache_salt: str, request_id: str) -> dict[str, Any]:
    """Return the body of a completion of one token; what is empty is left to vLLM."""
    body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
    body |= {"cache_salt": cache_salt} if cache_salt else {}
    return body | ({"request_id": request_id} if request_id else {})


def cache_tokens_taken(num_tokens: int, block_tokens: int) -> int:
    """Return the tokens of vLLM's cache that a prompt takes: whole blocks."""
    return -(-num_tokens // block_tokens) * block_tokens
