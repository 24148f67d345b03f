"""Today's date in what a chat template renders."""

import datetime
import re
from collections.abc import Callable, Sequence

_FORMATS = (
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%d %b %Y",
    "%d %B %Y",
    "%b %d, %Y",
    "%B %d, %Y",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%d.%m.%Y",
)
_STRFTIME = re.compile(r"strftime_now\(\s*['\"]([^'\"]{1,64})['\"]")
"""Transformers gives templates this function; its argument is a format of `datetime.strftime`."""


def date_end(
    tokens: Sequence[int], decode: Callable[[Sequence[int]], str], template: str, today: datetime.date
) -> int | None:
    """Return how many tokens reach up to the end of today's date; None where it does not stand in them.

    Args:
        tokens: A rendered prompt, or the beginning of one.
        decode: The tokenizer's.
        template: The text of the chat template, which may have formats of its own; empty when there is none.
        today: The day on which it was rendered.
    """
    formats = {*_FORMATS, *(each for each in _STRFTIME.findall(template) if "%d" in each or "%-d" in each)}
    text = decode(tokens)
    dates = [date for each in sorted(formats) if (date := today.strftime(each)) in text]
    if not dates:
        return None
    low, high = 1, len(tokens)
    while low < high:  # the fewest tokens whose text has one of them
        middle = (low + high) // 2
        beginning = decode(tokens[:middle])
        if any(date in beginning for date in dates):
            high = middle
        else:
            low = middle + 1
    return low
