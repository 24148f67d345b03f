"""Markers of Anthropic's Messages API: `cache_control` on tools, system and message blocks, or at the top level.

A breakpoint on the last tool or the last system block covers tools and system in the order in which the chat template
writes them, because a request that repeats them shares exactly that with this one.
"""

from typing import Any

from kvtier.gateway.markers.cache_control import (
    CACHE_CONTROL,
    Found,
    check_together,
    is_cacheable,
    read_cache_control,
    take_cache_control,
)
from kvtier.gateway.markers.conversations import continued, cut_content, role_of, user_turn
from kvtier.gateway.markers.marked_request import (
    MAX_BREAKPOINTS,
    PROBES,
    Api,
    Json,
    MarkedRequest,
    Marker,
    MarkerError,
    Path,
    as_dicts,
    render_body,
)

_PROBE_TEXT = {"type": "text", "text": PROBES[0]}
_PROBE_TOOL = {"name": "apricots", "description": PROBES[0], "input_schema": {"type": "object", "properties": {}}}


def read_messages_request(body: Json) -> MarkedRequest | None:
    """Return the markers of a request; None when it has none.

    Raises:
        MarkerError: The hosted API refuses a marker, or `max_tokens: 0` with what generates.
    """
    found: list[Found] = []
    plain = _without_markers(body, found)
    automatic = read_cache_control(body.get(CACHE_CONTROL), (CACHE_CONTROL,))
    if automatic is not None:
        _add_automatic(plain, automatic, found)
    check_together(found)
    is_prewarm = body.get("max_tokens") == 0 and not isinstance(body.get("max_tokens"), bool)
    if is_prewarm:
        _check_prewarm(body)
        plain["max_tokens"] = 1
    if not found and not is_prewarm:
        return None
    return MarkedRequest(
        api=Api.MESSAGES,
        body=plain,
        markers=tuple(_marker(plain, marker) for marker in found),
        has_cache_control=True,
        is_prewarm=is_prewarm,
    )


def _without_markers(body: Json, found: list[Found]) -> Json:
    """Return the body without markers, and add them to `found` in the order of the prompt: tools, system, messages."""
    plain = {name: value for name, value in body.items() if name != CACHE_CONTROL}
    for name in ("tools", "system"):
        if isinstance(blocks := body.get(name), list):
            plain[name] = [take_cache_control(block, (name, i), found) for i, block in enumerate(blocks)]
    if isinstance(messages := body.get("messages"), list):
        plain["messages"] = [_plain_turn(turn, ("messages", i), found) for i, turn in enumerate(messages)]
    return plain


def _plain_turn(turn: Any, place: Path, found: list[Found]) -> Any:
    if not isinstance(turn, dict) or not isinstance(content := turn.get("content"), list):
        return turn
    blocks = []
    for index, block in enumerate(content):
        here = (*place, "content", index)
        if isinstance(block, dict) and isinstance(inner := block.get("content"), list):  # a tool's result
            parts = [take_cache_control(part, (*here, "content", i), found) for i, part in enumerate(inner)]
            block = block | {"content": parts}
        blocks.append(take_cache_control(block, here, found))
    return turn | {"content": blocks}


def _add_automatic(body: Json, ttl_s: int, found: list[Found]) -> None:
    """Mark the last block that can be; the hosted API walks back from the end."""
    place = _last_cacheable(body)
    explicit = {marker.place: marker.ttl_s for marker in found}
    if place is None or explicit.get(place) == ttl_s:
        return
    if place in explicit:
        raise MarkerError((CACHE_CONTROL, "ttl"), "differs from the ttl of the cache_control on the last block")
    if len(found) >= MAX_BREAKPOINTS:
        problem = f"no breakpoint is left: {MAX_BREAKPOINTS} blocks have a cache_control of their own"
        raise MarkerError((CACHE_CONTROL,), problem)
    found.append(Found(place, ttl_s))


def _last_cacheable(body: Json) -> Path | None:
    turns = as_dicts(body.get("messages"))
    for i in reversed(range(len(turns))):
        content = turns[i].get("content") if isinstance(turns[i], dict) else None
        if isinstance(content, str) and content:
            return ("messages", i)
        blocks = as_dicts(content)
        for k in reversed(range(len(blocks))):
            if is_cacheable(blocks[k]):
                return ("messages", i, "content", k)
    for name in ("system", "tools"):
        blocks = as_dicts(body.get(name))
        if blocks and is_cacheable(blocks[-1]):
            return (name, len(blocks) - 1)
    return None


def _check_prewarm(body: Json) -> None:
    """Refuse what the hosted API does not combine with `max_tokens: 0`, which generates nothing."""
    thinking, choice, output = (body.get(name) for name in ("thinking", "tool_choice", "output_config"))
    refused = {
        "stream": bool(body.get("stream")),
        "thinking": isinstance(thinking, dict) and thinking.get("type") == "enabled",
        "tool_choice": isinstance(choice, dict) and choice.get("type") in ("any", "tool"),
        "output_config.format": isinstance(output, dict) and bool(output.get("format")),
    }
    for name, is_set in refused.items():
        if is_set:
            raise MarkerError(("max_tokens",), f"0 pre-warms the cache and cannot be combined with {name}")


def _marker(body: Json, found: Found) -> Marker:
    return Marker(ttl_s=found.ttl_s, variants=tuple(_variants(body, found.place)))


def _variants(body: Json, place: Path) -> list[Json]:
    first, second = ([user_turn(probe)] for probe in PROBES)
    name, index = str(place[0]), int(place[1])
    if name == "messages":
        return _turn_variants(body, place)
    blocks = body[name]
    kept = blocks[: index + 1]
    # Some templates take one system turn, so vLLM moves the text of later ones to the end of the system's.
    is_last = index == len(blocks) - 1 and all(role_of(turn) != "system" for turn in as_dicts(body.get("messages")))
    if name == "system" and is_last:
        return [render_body(Api.MESSAGES, body, messages=turns) for turns in (first, second)]
    more = [*kept, _PROBE_TEXT if name == "system" else _PROBE_TOOL]
    changes: list[Json] = [{name: kept, "messages": first}, {name: more, "messages": second}]
    return [render_body(Api.MESSAGES, body, **change) for change in changes]


def _turn_variants(body: Json, place: Path) -> list[Json]:
    turns, index = body["messages"], int(place[1])
    turn = turns[index]
    cut, longer = cut_content(turn, int(place[3]) if len(place) > 2 else None)
    if len(place) > 4:  # inside a tool's result
        *before, result = cut["content"]
        inner = result["content"][: int(place[5]) + 1]
        cut, longer = (
            turn | {"content": [*before, result | {"content": parts}]} for parts in (inner, [*inner, _PROBE_TEXT])
        )
    conversations = continued(turns, index, cut, longer)
    return [render_body(Api.MESSAGES, body, messages=each) for each in conversations]
