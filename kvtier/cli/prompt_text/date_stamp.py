"""Finds today's date in text: if a chat template prints it, the pin is useless tomorrow."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

# strftime's names follow the locale, and templates are written in English.
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July",
    "August", "September", "October", "November", "December",
)  # fmt: skip


def find_date_stamp(text: str, source: str, now: datetime | None = None) -> str | None:
    """Return a spelling of today's date that is in `text` and not in `source`, None when there is none.

    Covers the date in every time zone, because the machine of vLLM may be in another one.

    Args:
        text: The rendered prompt.
        source: The source; a date in it is intended.
        now: Overrides the clock.
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
