"""Durations as people write them: how long a pin lives."""

import re

from kvtier.core.limits import TTL_S
from kvtier.errors import InvalidArgumentError

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MAX_TEXT = 32
_DURATION = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([smhdw])\s*")


def seconds_of(text: str) -> int:
    """Return the seconds of "90s", "30m", "12h", "7d" or "2w"; 0 for "never". ValueError: how durations are written."""
    text = text[: _MAX_TEXT + 1].lower()
    if text.strip() == "never":
        return 0
    match = _DURATION.fullmatch(text) if len(text) <= _MAX_TEXT else None
    seconds = int(float(match[1]) * SECONDS[match[2]]) if match else 0
    if not 1 <= seconds <= TTL_S.most:
        raise ValueError('must be a duration like "90s", "30m", "12h", "7d" or "2w", at most 36500d, or "never"')
    return seconds


def duration_text(seconds: int) -> str:
    """Return "never" for 0, else the seconds in the largest unit up to days that says them exactly: "7d", "90m"."""
    exact = [f"{seconds // SECONDS[unit]}{unit}" for unit in "dhms" if seconds % SECONDS[unit] == 0]
    return exact[0] if seconds else "never"


def parse_duration(field: str, text: str) -> int:
    """Return the seconds of a duration, 0 for "never"; InvalidArgumentError names the field."""
    try:
        return seconds_of(text)
    except ValueError as exc:
        raise InvalidArgumentError(field, text, str(exc)) from exc
