"""Markers of OpenAI's chat and Responses APIs.

`prompt_cache_breakpoint` on a part is an explicit breakpoint. Any `prompt_cache_*` field of the request adds an
implicit one at the end of the newest message, unless `prompt_cache_options.mode` is `explicit`. `cache_control` in chat
messages and tools means what it means in Anthropic's API: LiteLLM and OpenRouter send it. All of these count; of
OpenAI's own the latest, as many as are left.

Source: `PromptCacheOptions` and `PromptCacheBreakpoint` of the SDK (openai 3.52).
"""

import math
from collections.abc import Sequence
from typing import Any

from kvtier.gateway.markers.cache_control import (
    CACHE_CONTROL,
    Found,
    check_together,
    read_cache_control,
    take_cache_control,
)
from kvtier.gateway.markers.conversations import SYSTEM_ROLES, continued, cut_content, role_of, user_turn
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

_BREAKPOINT, _OPTIONS, _RETENTION, _KEY = (
    "prompt_cache_breakpoint", "prompt_cache_options", "prompt_cache_retention", "prompt_cache_key",
)  # fmt: skip
_TTL_S = {"30m": 1800, "12h": 12 * 3600}
_RETENTION_S = {"in_memory": 600, "24h": 24 * 3600}
"""`in_memory`: the hosted API drops what was unused for 5 to 10 minutes."""
_DEFAULT_TTL_S = _TTL_S["30m"]
_TURNS_FIELD = {Api.CHAT: "messages", Api.RESPONSES: "input"}
_PROBE_TOOL = {"type": "function", "function": {"name": "apricots", "description": PROBES[0], "parameters": {}}}


def read_chat_request(body: Json) -> MarkedRequest | None:
    """Return the markers of a chat request; None when it has none. MarkerError: the hosted API refuses one."""
    return _read(Api.CHAT, body)


def read_responses_request(body: Json) -> MarkedRequest | None:
    """Return the markers of a Responses request; None when it has none. MarkerError: the hosted API refuses one."""
    return _read(Api.RESPONSES, body)


def _read(api: Api, body: Json) -> MarkedRequest | None:
    options, ttl_s = _read_options(body)
    anthropic: list[Found] = []
    explicit: list[Found] = []
    # Without the options: vLLM does not act on them, and from 0.33 on refuses any TTL but 30m.
    plain = {name: value for name, value in body.items() if name not in (CACHE_CONTROL, _OPTIONS)}
    plain = _plain_tools(_plain_turns(api, plain, anthropic, explicit, ttl_s), anthropic)
    automatic = read_cache_control(body.get(CACHE_CONTROL), (CACHE_CONTROL,))
    newest = _newest_turn(api, plain)
    if automatic is not None and newest is not None:
        anthropic.append(Found(newest, automatic))
    check_together(anthropic)
    is_implicit = any(body.get(name) is not None for name in (_KEY, _OPTIONS, _RETENTION)) or bool(explicit)
    is_prewarm = api is Api.RESPONSES and bool(options.get("prewarm"))
    own = explicit
    if is_implicit and options.get("mode") != "explicit" and newest is not None:
        own = [*explicit, Found(newest, ttl_s)]
    num_dropped = max(0, len(anthropic) + len(own) - MAX_BREAKPOINTS)
    found = sorted([*anthropic, *own[num_dropped:]], key=_order)
    if not found and not is_prewarm and _OPTIONS not in body:
        return None
    if is_prewarm:
        _check_prewarm(body)
        plain["max_output_tokens"] = 1
    return MarkedRequest(
        api=api,
        body=plain,
        markers=tuple(_marker(api, plain, each) for each in found),
        has_cache_control=bool(anthropic),
        is_prewarm=is_prewarm,
    )


def _read_options(body: Json) -> tuple[Json, int]:
    """Return `prompt_cache_options` and the TTL in seconds that breakpoints inherit."""
    if not isinstance(body.get(_KEY), str | None):
        raise MarkerError((_KEY,), "Invalid type: expected a string or null.")
    retention = _choice(body.get(_RETENTION), _RETENTION_S, (_RETENTION,))
    options = body.get(_OPTIONS)
    if options is None:
        return {}, retention or _DEFAULT_TTL_S
    if not isinstance(options, dict):
        raise MarkerError((_OPTIONS,), "Invalid type: expected an object.")
    _choice(options.get("mode"), {"implicit": 1, "explicit": 1}, (_OPTIONS, "mode"))
    if not isinstance(options.get("prewarm"), bool | None):
        raise MarkerError((_OPTIONS, "prewarm"), "Invalid type: expected a boolean.")
    # The TTL is the shortest lifetime and the retention the longest, so the TTL is what is promised.
    return options, _choice(options.get("ttl"), _TTL_S, (_OPTIONS, "ttl")) or retention or _DEFAULT_TTL_S


def _choice(value: Any, choices: dict[str, int], path: Path) -> int | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in choices:
        supported = " and ".join(f"'{choice}'" for choice in choices)
        raise MarkerError(path, f"Invalid value: {value!r:.100}. Supported values are: {supported}.")
    return choices[value]


def _plain_turns(api: Api, body: Json, anthropic: list[Found], explicit: list[Found], ttl_s: int) -> Json:
    name = _TURNS_FIELD[api]
    if not isinstance(turns := body.get(name), list):
        return body
    plain = []
    for index, turn in enumerate(turns):
        place: Path = (name, index)
        if isinstance(turn, dict) and isinstance(parts := turn.get("content"), list):
            plain_parts = []
            for k, part in enumerate(parts):
                here = (*place, "content", k)
                plain_parts.append(take_cache_control(_take_breakpoint(part, here, explicit, ttl_s), here, anthropic))
            turn = turn | {"content": plain_parts}
        plain.append(take_cache_control(turn, place, anthropic))
    return body | {name: plain}


def _take_breakpoint(part: Any, place: Path, found: list[Found], ttl_s: int) -> Any:
    if not isinstance(part, dict) or _BREAKPOINT not in part:
        return part
    value, path = part[_BREAKPOINT], (*place, _BREAKPOINT)
    if value is not None:
        if not isinstance(value, dict):
            raise MarkerError(path, "Invalid type: expected an object.")
        if value.get("mode") != "explicit":
            raise MarkerError((*path, "mode"), "Invalid value. Supported values are: 'explicit'.")
        found.append(Found(place, _choice(value.get("ttl"), _TTL_S, (*path, "ttl")) or ttl_s))
    return {name: each for name, each in part.items() if name != _BREAKPOINT}


def _plain_tools(body: Json, anthropic: list[Found]) -> Json:
    """Take markers off the tools; they come before those of messages, as in Anthropic's API."""
    if not isinstance(tools := body.get("tools"), list):
        return body
    found: list[Found] = []
    plain = []
    for index, tool in enumerate(tools):
        if isinstance(tool, dict) and isinstance(function := tool.get("function"), dict):
            tool = tool | {"function": take_cache_control(function, ("tools", index), found)}
        plain.append(take_cache_control(tool, ("tools", index), found))
    anthropic[:0] = found
    return body | {"tools": plain}


def _order(found: Found) -> tuple[bool, int, float]:
    """Return what orders markers as the prompt does: tools, then turns, each behind its parts."""
    field, *rest = found.place
    index = int(rest[0]) if rest else 0
    return field != "tools", index, int(rest[2]) if len(rest) > 1 else math.inf


def _newest_turn(api: Api, body: Json) -> Path | None:
    name = _TURNS_FIELD[api]
    turns = body.get(name)
    if isinstance(turns, str) and turns:
        return (name,)
    return (name, len(turns) - 1) if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else None


def _check_prewarm(body: Json) -> None:
    if body.get("stream") or body.get("background"):
        name = "stream" if body.get("stream") else "background"
        raise MarkerError((_OPTIONS, "prewarm"), f"Generates no output, so it cannot be combined with {name}.")


def _marker(api: Api, body: Json, found: Found) -> Marker:
    if found.place[0] == "tools":
        bodies = _tool_variants(api, body, int(found.place[1]))
    else:
        bodies = _turn_variants(api, body, found.place)
    return Marker(ttl_s=found.ttl_s, variants=tuple(bodies))


def _tool_variants(api: Api, body: Json, index: int) -> list[Json]:
    """Render the tools up to the marked one under what the system says: templates write either of them first."""
    name = _TURNS_FIELD[api]
    leading = _leading_system(as_dicts(body.get(name)))
    kept = body["tools"][: index + 1]
    changes: list[Json] = [
        {"tools": tools, name: [*leading, user_turn(probe)]}
        for tools, probe in zip((kept, [*kept, _PROBE_TOOL]), PROBES, strict=True)
    ]
    return [render_body(api, body, **change) for change in changes]


def _leading_system(turns: Sequence[Any]) -> list[Json]:
    leading = []
    for turn in turns:
        if not isinstance(turn, dict) or turn.get("role") not in SYSTEM_ROLES:
            break
        leading.append(turn)
    return leading


def _turn_variants(api: Api, body: Json, place: Path) -> list[Json]:
    name = _TURNS_FIELD[api]
    turns = [user_turn(body[name])] if len(place) == 1 else body[name]
    index = int(place[1]) if len(place) > 1 else 0
    turn = turns[index]
    part = int(place[3]) if len(place) > 2 else None
    cut, longer = cut_content(turn, part)
    is_last_system_part = (
        turn.get("role") in SYSTEM_ROLES
        and (part is None or part == len(turn["content"]) - 1)
        and all(role_of(following) not in SYSTEM_ROLES for following in turns[index + 1 : index + 2])
    )
    conversations = continued(turns, index, cut, longer, is_last_system_part=is_last_system_part)
    return [render_body(api, body, **{name: each}) for each in conversations]
