"""Waiting on conditions, with a deadline."""

import time
from collections.abc import Callable

_POLL_S = 0.005


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Return when the condition holds; fail when it does not within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"condition not met within {timeout_s} s")
        time.sleep(_POLL_S)
