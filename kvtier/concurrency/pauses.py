"""How long those wait that can only look again: four pauses for every poll and retry, so that none is tuned alone."""

import asyncio

POLL_S = 0.1
"""Between two looks at something that reports no change (a kernel lock, a table), while a caller waits."""
LOOK_S = 0.25
"""Between two looks at what is to be noticed soon, when no caller waits."""
SLOW_POLL_S = 1.0
"""Between two looks when no caller waits: a look at a million arena rows takes some 10 ms, 1 % of a core."""
RETRY_S = 10.0
"""After an error that an operator mends, or time: soon enough for who mends it, too rare to fill a log."""


def until_next(period_s: float) -> float:
    """Return the seconds until the loop's clock shows the next multiple of a period.

    For those who look again and again: many who are due at once wake the process once, which takes longer than most of
    their looks.
    """
    return period_s - asyncio.get_running_loop().time() % period_s
