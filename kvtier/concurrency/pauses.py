"""How long those wait that can only look again: three pauses for every poll and retry, so that none is tuned alone."""

POLL_S = 0.1
"""Between two looks at something that reports no change (a kernel lock, a table), while a caller waits."""
SLOW_POLL_S = 1.0
"""Between two looks when no caller waits: a look at a million arena rows takes some 10 ms, 1 % of a core."""
RETRY_S = 10.0
"""After an error that an operator mends, or time: soon enough for who mends it, too rare to fill a log."""
