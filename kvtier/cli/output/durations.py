"""Durations and points in time, as operators read them."""

import time

from kvtier.core.ttl import SECONDS

# For values out of range, which no clock of kvtier writes.
UNKNOWN = "?"
_MAX_SECONDS = 1e11


def format_duration(seconds: float) -> str:
    """Return at most the two largest units: "3d 4h", "5m", "12s"."""
    if not abs(seconds) < _MAX_SECONDS:
        return UNKNOWN
    left = max(0, int(seconds))
    parts = []
    for unit in "dhms":
        number, left = divmod(left, SECONDS[unit])
        if number:
            parts.append(f"{number}{unit}")
        if len(parts) == 2:
            break
    return " ".join(parts) or "0s"


def format_age(unix_s: float) -> str:
    """Return how long ago a point in time was, in the largest unit."""
    return format_duration(time.time() - unix_s).split()[0] if unix_s else "-"


def format_expiry(expires_unix_s: float) -> str:
    """Return the time until a pin ends: "never", "3d", "expired"."""
    if not expires_unix_s:
        return "never"
    left = expires_unix_s - time.time()
    return "expired" if left <= 0 else format_duration(left).split()[0]


def format_moment(unix_s: float) -> str:
    if not abs(unix_s) < _MAX_SECONDS:
        return UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s else "-"
