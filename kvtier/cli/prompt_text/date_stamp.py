"""Finds today's date in text: a chat template that prints it makes a pin useless tomorrow."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

# Not strftime's names, which follow the locale; templates are written in English.
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July",
    "August", "September", "October", "November", "December",
)  # fmt: skip


def find_date_stamp(text: str, source: str, now: datetime | None = None) -> str | None:
    """Return a spelling of today's date that is in `text` and not in `source`, None when there is none.

    Today is looked for in any time zone: vLLM's machine may be in another one.

    Args:
        text: What was rendered.
        source: What was given; a date that the operator wrote is meant.
        now: Instead of the clock.
    """
    today = (now or datetime.now(tz=UTC)).date()
    for days in (0, -1, 1):
        for spelling in _spellings(today + timedelta(days=days)):
            if spelling in text and spelling not in source:
                return spelling
    return None


def _spellings(day: date) -> Iterator[str]:
    """Yield the usual ways to write a day, longest first."""
    name = _MONTHS[day.month - 1]
    for month in dict.fromkeys((name, name[:3])):
        for number in dict.fromkeys((f"{day.day:02d}", f"{day.day}")):
            yield f"{number} {month} {day.year}"
            yield f"{month} {number}, {day.year}"
            yield f"{month} {number} {day.year}"
            yield f"{number}-{month}-{day.year}"
    for separator in "-/.":
        yield f"{day.year}{separator}{day.month:02d}{separator}{day.day:02d}"
        yield f"{day.day:02d}{separator}{day.month:02d}{separator}{day.year}"
        yield f"{day.month:02d}{separator}{day.day:02d}{separator}{day.year}"
    yield f"{day.year}{day.month:02d}{day.day:02d}"
