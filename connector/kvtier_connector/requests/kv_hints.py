"""vLLM's KV hints as kvtier reads them: which of an envelope's actions are carried out, and why others are not.

The envelope is vLLM's (`vllm/v1/kv_hints/protocol.py` of 0.32): typed actions whose payloads the one who carries them
out defines. kvtier takes `kv.pin`, `kv.retain`, `kv.prefetch` and `kv.demote` of major versions 0 and 1, each about the
prompt of the request that carries the envelope; docs/requests.md has their payloads.
Source: vllm#51428 (the actions and outcomes), vllm#53421 (the envelope), vllm#57103 (pins have bounded TTLs).
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtier.core import limits
from kvtier.core.requests.request_instructions import DEFAULT_TTL_S
from kvtier.errors import InvalidArgumentError

MAX_ACTIONS = 16
MAX_RANGES = limits.NUM_REQUESTED_PREFIXES.most
_PREFIX = "kv."
_MAJORS = ("0", "1")
_RANGE_KEYS = frozenset({"start", "end", "priority", "duration", "covers_output"})
_MAX_TEXT = 64


class Action(StrEnum):
    """What a hint asks for; `other` is what kvtier does not know."""

    PIN = "pin"
    RETAIN = "retain"
    PREFETCH = "prefetch"
    DEMOTE = "demote"
    OTHER = "other"


class Outcome(StrEnum):
    """What became of it, in the words of vllm#51428."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    MISSING = "missing"


@dataclass(frozen=True, kw_only=True)
class HintedPrefix:
    """What one action, or one range of a retain action, is about.

    Attributes:
        end: Where the prefix ends, in tokens; None: with the prompt.
        ttl_s: How long it is kept.
        priority: How important it is.
    """

    end: int | None = None
    ttl_s: int = DEFAULT_TTL_S
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Hint:
    """One action that can be tried, or `problem`: why not.

    Attributes:
        action: What is asked for.
        prefixes: Of the prompt; in no order.
        is_clipped: It asks for more than can be promised: no end, or the output.
    """

    action: Action
    prefixes: tuple[HintedPrefix, ...] = ()
    is_clipped: bool = False
    problem: str = ""


def read_hints(envelope: Any) -> Iterator[Hint]:
    """Yield what an envelope asks for. Whatever is in it: one hint for each action, and no exception."""
    actions = envelope.actions
    for action in actions[:MAX_ACTIONS]:
        yield _read(action, envelope.protocol_version)
    if len(actions) > MAX_ACTIONS:
        problem = f"has {len(actions)} actions, and at most {MAX_ACTIONS} of an envelope are read"
        yield Hint(action=Action.OTHER, problem=problem)


def _read(action: Any, protocol_version: object) -> Hint:
    kind = _action(action.action_type)
    if kind is Action.OTHER:
        known = ", ".join(f"{_PREFIX}{each}" for each in Action if each is not Action.OTHER)
        return Hint(action=kind, problem=f"kvtier carries out {known}")
    try:
        _check_version("protocol_version", protocol_version)
        _check_version("action_version", action.action_version)
        return _hint(kind, action.payload)
    except InvalidArgumentError as error:
        return Hint(action=kind, problem=str(error))


def _action(name: object) -> Action:
    text = name if isinstance(name, str) and len(name) <= _MAX_TEXT else ""
    try:
        return Action(text.removeprefix(_PREFIX)) if text.startswith(_PREFIX) else Action.OTHER
    except ValueError:
        return Action.OTHER


def _check_version(field: str, value: object) -> None:
    if not isinstance(value, str) or value.split(".", 1)[0] not in _MAJORS:
        raise InvalidArgumentError(field, value, f"kvtier knows major versions {' and '.join(_MAJORS)}")


def _hint(action: Action, payload: object) -> Hint:
    if not isinstance(payload, dict):
        raise InvalidArgumentError("payload", payload, "must be an object")
    if action is Action.RETAIN and "directives" in payload:
        return _retained_ranges(payload)
    expects_ttl = action in (Action.PIN, Action.RETAIN)
    known = {"end", "duration", "priority"} if expects_ttl else {"end"}
    _check_keys("payload", payload, known)
    prefix = _prefix("payload", payload)
    is_clipped = expects_ttl and payload.get("duration") is None  # every pin of a hint has an end
    return Hint(action=action, prefixes=(prefix,), is_clipped=is_clipped)


def _retained_ranges(payload: Mapping[str, Any]) -> Hint:
    """Read token ranges with priorities: of each, all before it is retained too, or it could not be hit."""
    _check_keys("payload", payload, {"scope", "directives"})
    ranges = payload["directives"]
    if not isinstance(ranges, list) or not 1 <= len(ranges) <= MAX_RANGES:
        raise InvalidArgumentError("payload.directives", ranges, f"must be a list of 1 to {MAX_RANGES} ranges")
    prefixes, is_clipped = list[HintedPrefix](), False
    for number, each in enumerate(ranges):
        field = f"payload.directives[{number}]"
        if not isinstance(each, dict):
            raise InvalidArgumentError(field, each, "must be an object")
        _check_keys(field, each, _RANGE_KEYS)
        limits.Whole(0, limits.MAX_TOKENS).check(f"{field}.start", each.get("start", 0))
        if each.get("covers_output", False):  # what is generated is not kept
            is_clipped = True
            continue
        prefixes.append(_prefix(field, each))
        is_clipped |= each.get("duration") is None
    if not prefixes:
        raise InvalidArgumentError("payload.directives", ranges, "kvtier keeps prompts, no output; name a range of it")
    return Hint(action=Action.RETAIN, prefixes=tuple(prefixes), is_clipped=is_clipped)


def _check_keys(field: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    if (unknown := next((key for key in value if key not in known), None)) is not None:
        problem = f"kvtier knows {', '.join(sorted(known))} here, about the prompt of the request itself"
        raise InvalidArgumentError(field, unknown, problem)


def _prefix(field: str, value: Mapping[str, Any]) -> HintedPrefix:
    end, duration_s = value.get("end"), value.get("duration")
    return HintedPrefix(
        end=end if end is None else limits.PREFIX_TOKENS.check(f"{field}.end", end),
        ttl_s=DEFAULT_TTL_S if duration_s is None else _seconds(f"{field}.duration", duration_s),
        priority=limits.PRIORITY.check(f"{field}.priority", value.get("priority", 0)),
    )


def _seconds(field: str, value: object) -> int:
    most = limits.TTL_S.most
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:  # no NaN passes
        raise InvalidArgumentError(field, value, f"must be a number of seconds, more than 0, at most {most}")
    return math.ceil(value)
