"""A verification request is restored what a request with the pin's own salt would be (see `verify_salts.py`)."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvtier_connector.engine.public_prompts import NOTHING_PUBLIC, PublicPrefix


def verified_prefix(request: Any, own_salt: str, hasher: Callable[[Any], list[bytes]]) -> PublicPrefix:
    """Return the request's blocks by the hashes that they would have under `own_salt`, or under none if it is empty.

    vLLM's own hasher computes them, as it did for the request: about as long as vLLM took when the request came, and
    only for these rare requests. Rejected: to keep the tokens of all pins, as of public prompts, for comparing.
    """
    as_its_own = SimpleNamespace(
        all_token_ids=request.all_token_ids,
        num_tokens=request.num_tokens,
        cache_salt=own_salt or None,
        lora_request=request.lora_request,
        block_hashes=[],
        mm_features=request.mm_features,
        prompt_embeds=request.prompt_embeds,
    )
    if request.prompt_embeds is not None:  # vLLM hashes more of such a request than is known here
        return NOTHING_PUBLIC
    hashes = hasher(as_its_own)
    return PublicPrefix(hashes, request.block_hashes[: len(hashes)])
