"""What a request may ask of kvtier in `kv_transfer_params`: read and checked, for the HTTP side and for the engine.

    {"kvtier": {"pin": "NAME" | true, "ttl": 300 | "5m" | "never", "priority": -1, "no_store": true, "report": true,
                "breakpoints": [{"num_tokens": 1200, "ttl_s": 300}], "owner": "0123456789abcdef"}}

docs/requests.md explains each. Values come from any client: every loop here is over a list whose length was checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from kvtier.core import limits
from kvtier.core.ttl import parse_duration
from kvtier.errors import InvalidArgumentError

PARAMETER = "kvtier"
"""The key in `kv_transfer_params`."""
DEFAULT_TTL_S = 3600
"""Of a request that says none: a conversation may pause for that long, and what is forgotten does not stay."""
_WHERE = f"kv_transfer_params.{PARAMETER}"
_KEYS = ("pin", "ttl", "priority", "no_store", "report", "breakpoints", "owner")
_BREAKPOINT_KEYS = ("num_tokens", "ttl_s")
_PRIORITY = limits.Whole(limits.PRIORITY.least, 0)
"""Any client may write it: no request ranks before the pins of operators, which have 0 unless they say otherwise."""


class InstructionEnd(StrEnum):
    """What became of what a request asked: a label of a metric, and `result` in its answer."""

    PINNED = "pinned"
    REFUSED = "refused"
    UNANSWERED = "unanswered"
    TOO_SHORT = "too_short"
    NO_STORE = "no_store"
    INVALID = "invalid"


@dataclass(frozen=True, kw_only=True)
class Breakpoint:
    """A prefix of the prompt that is to be pinned; `ttl_s` is 0 for no end."""

    num_tokens: int
    ttl_s: int


@dataclass(frozen=True, kw_only=True)
class RequestInstructions:
    """The checked instructions of one request.

    Attributes:
        pins: Something is to be pinned: the prefixes of `breakpoints`, without any the system prompt.
        name: Of the pin of the longest prefix; empty: one is made up.
        ttl_s: Of the pin, where no breakpoint has its own; 0: no end.
        priority: Of the pins.
        no_store: Nothing of the request is stored.
        report: The answer shall say what the request got, and why not more.
        breakpoints: In ascending order, each length once.
        owner: Whose limits count; empty: those that all requests without owner share.
    """

    pins: bool = False
    name: str = ""
    ttl_s: int = DEFAULT_TTL_S
    priority: int = 0
    no_store: bool = False
    report: bool = False
    breakpoints: tuple[Breakpoint, ...] = ()
    owner: str = ""


def read_instructions(value: object) -> RequestInstructions:
    """Check the value of `kv_transfer_params["kvtier"]`.

    Raises:
        InvalidArgumentError: It has an unknown key, or a value that cannot be used; `field` is its whole path.
    """
    given = _checked_keys(_WHERE, value, _KEYS)
    ttl_s = _read_ttl(given.get("ttl", DEFAULT_TTL_S))
    name = _read_pin(given["pin"]) if "pin" in given else ""
    breakpoints = _read_breakpoints(given["breakpoints"], ttl_s) if "breakpoints" in given else ()
    pins = bool("pin" in given or breakpoints)
    no_store, report = _read_flag(given, "no_store"), _read_flag(given, "report")
    if no_store and pins:
        raise InvalidArgumentError(f"{_WHERE}.no_store", no_store, "a pin stores the prompt; leave out one of the two")
    for key in ("ttl", "priority"):
        if key in given and not pins:
            raise InvalidArgumentError(f"{_WHERE}.{key}", given[key], 'says how to pin; add "pin": true')
    return RequestInstructions(
        pins=pins,
        name=name,
        ttl_s=ttl_s,
        priority=_PRIORITY.check(f"{_WHERE}.priority", given.get("priority", 0)),
        no_store=no_store,
        report=report,
        breakpoints=breakpoints,
        owner=limits.check_owner(f"{_WHERE}.owner", given.get("owner", "")),
    )


def _checked_keys(where: str, value: object, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        raise InvalidArgumentError(where, value, f"must be an object with some of {', '.join(known)}")
    if (unknown := next((key for key in value if key not in known), None)) is not None:  # at most len(known) are tried
        raise InvalidArgumentError(where, unknown, f"is no key that kvtier knows; use {', '.join(known)}")
    return cast(Mapping[str, Any], value)


def _read_flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{_WHERE}.{key}", value, "use true or false")
    return value


def _read_pin(value: object) -> str:
    if value is True:
        return ""
    if not limits.is_name(value):
        remedy = "use true, or a name of 1 to 128 letters, digits and . _ / @ -, beginning with a letter or digit"
        raise InvalidArgumentError(f"{_WHERE}.pin", value, remedy)
    name = cast(str, value)
    limits.check_chosen_name(f"{_WHERE}.pin", name)
    return name


def _read_ttl(value: object) -> int:
    field = f"{_WHERE}.ttl"
    if isinstance(value, str):
        return parse_duration(field, value)
    return limits.Whole(1, limits.TTL_S.most).check(field, value)


def _read_breakpoints(value: object, ttl_s: int) -> tuple[Breakpoint, ...]:
    field, most = f"{_WHERE}.breakpoints", limits.NUM_REQUESTED_PREFIXES.most
    if not isinstance(value, list) or not value:
        raise InvalidArgumentError(field, value, f"must be a list of 1 to {most} objects")
    limits.check_count(field, len(value), most)
    ttls: dict[int, int] = {}
    for number, item in enumerate(value):
        where = f"{field}[{number}]"
        given = _checked_keys(where, item, _BREAKPOINT_KEYS)
        num_tokens = limits.PREFIX_TOKENS.check(f"{where}.num_tokens", given.get("num_tokens"))
        own_ttl_s = limits.TTL_S.check(f"{where}.ttl_s", given.get("ttl_s", ttl_s))
        ttls[num_tokens] = longer_ttl(ttls.get(num_tokens, own_ttl_s), own_ttl_s)
    return tuple(Breakpoint(num_tokens=each, ttl_s=ttls[each]) for each in sorted(ttls))


def longer_ttl(one_s: int, other_s: int) -> int:
    """Return the longer of two TTLs, of which 0 has no end."""
    return max(one_s, other_s) if one_s and other_s else 0
