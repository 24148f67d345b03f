"""Durations and points in time, as operators read them."""

import time

from kvtier.core.ttl import SECONDS

# For values out of range, which no clock of kvtier writes.
UNKNOWN = "?"
_MAX_SECONDS = 1e11


_UNITS = "dhms"


def format_duration(seconds: float) -> str:
    """Return the two largest units, rounded to the second of them: "3d 4h", "5m", "12s"."""
    return _rounded(seconds, num_units=2)


def format_age(unix_s: float) -> str:
    """Return how long ago a point in time was, in whole numbers of the largest unit."""
    if not unix_s:
        return "-"
    age_s = time.time() - unix_s
    unit_s = SECONDS[_largest_unit(age_s)]
    return _rounded(age_s // unit_s * unit_s, num_units=1)


def format_expiry(expires_unix_s: float) -> str:
    """Return the time until a pin ends, so that of a TTL given just now it is the TTL: "never", "1h 30m", "30d".

    The second of two units is left out from 10 of the first on.
    """
    if not expires_unix_s:
        return "never"
    left_s = expires_unix_s - time.time()
    if left_s <= 0:
        return "expired"
    return _rounded(left_s, num_units=2 if left_s < 10 * SECONDS[_largest_unit(left_s)] else 1)


def _largest_unit(seconds: float) -> str:
    return next((unit for unit in _UNITS if seconds >= SECONDS[unit]), _UNITS[-1])


def _rounded(seconds: float, num_units: int) -> str:
    if not abs(seconds) < _MAX_SECONDS:
        return UNKNOWN
    smallest = _UNITS[_UNITS.index(_largest_unit(seconds)) :][:num_units][-1]
    left = int(max(0.0, seconds) / SECONDS[smallest] + 0.5) * SECONDS[smallest]
    parts = []
    for unit in _UNITS:  # rounding may have given one of a larger unit: 59.7 s are 1m
        number, left = divmod(left, SECONDS[unit])
        if number:
            parts.append(f"{number}{unit}")
    return " ".join(parts[:num_units]) or "0s"


def format_moment(unix_s: float) -> str:
    if not abs(unix_s) < _MAX_SECONDS:
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s else "-"
