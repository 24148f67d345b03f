"""Anthropic's `cache_control`, and the rules that markers of one request follow.

Source: the SDK's `CacheControlEphemeralParam` (anthropic 2.11) and errors of the hosted API.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvtier.gateway.markers.marked_request import MAX_BREAKPOINTS, Json, MarkerError, Path

CACHE_CONTROL = "cache_control"
TTL_S = {"5m": 300, "1h": 3600}
_DEFAULT_TTL = "5m"
_UNCACHEABLE = ("thinking", "redacted_thinking")


class Found(NamedTuple):
    """A marker in a body: where the marked block is, and its TTL in seconds."""

    place: Path
    ttl_s: int


def take_cache_control(block: Any, place: Path, found: list[Found]) -> Any:
    """Return a block without its `cache_control`, and add that to `found`.

    Raises:
        MarkerError: The hosted API refuses it.
    """
    if not isinstance(block, dict) or CACHE_CONTROL not in block:
        return block
    plain = {name: value for name, value in block.items() if name != CACHE_CONTROL}
    ttl_s = read_cache_control(block[CACHE_CONTROL], (*place, CACHE_CONTROL))
    if ttl_s is not None:
        _check_block(plain, place)
        found.append(Found(place, ttl_s))
    return plain


def read_cache_control(value: Any, path: Path) -> int | None:
    """Return the TTL of a `cache_control` in seconds, None for null. MarkerError: the hosted API refuses it."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise MarkerError(path, "Input should be an object")
    if value.get("type") != "ephemeral":
        raise MarkerError((*path, "type"), "Input should be 'ephemeral'")
    for name in value.keys() - {"type", "ttl"}:
        raise MarkerError((*path, name), "Extra inputs are not permitted")
    ttl = _DEFAULT_TTL if value.get("ttl") is None else value["ttl"]
    if not isinstance(ttl, str) or ttl not in TTL_S:
        raise MarkerError((*path, "ttl"), "Input should be '5m' or '1h'")
    return TTL_S[ttl]


def is_cacheable(block: Any) -> bool:
    """Return whether an automatic marker may stand on a block."""
    if not isinstance(block, dict) or block.get("type") in _UNCACHEABLE:
        return False
    return block.get("type") != "text" or bool(block.get("text"))


def check_together(found: Sequence[Found]) -> None:
    """Check the markers of a request, in the order of its prompt.

    Raises:
        MarkerError: More than the hosted API takes, or a long TTL behind a short one.
    """
    if len(found) > MAX_BREAKPOINTS:
        problem = f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided. Found {len(found)}."
        raise MarkerError((), problem)
    for before, marker in itertools.pairwise(found):
        if marker.ttl_s > before.ttl_s:
            raise MarkerError(
                (*marker.place, CACHE_CONTROL, "ttl"),
                "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that blocks "
                "are processed in the following order: `tools`, `system`, `messages`.",
            )


def _check_block(block: Json, place: Path) -> None:
    kind = block.get("type")
    if kind in _UNCACHEABLE:
        raise MarkerError((*place, str(kind), CACHE_CONTROL), "Extra inputs are not permitted")
    if kind == "text" and not block.get("text"):
        raise MarkerError((*place, "text"), "cache_control cannot be set for empty text blocks")
