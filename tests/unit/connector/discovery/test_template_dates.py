"""Today's date in what a template renders: how many tokens reach up to its end."""

import datetime

import pytest

from kvtier_connector.discovery.template_dates import date_end

DAY = datetime.date(2026, 3, 7)


def end_in(words: list[str], template: str = "", day: datetime.date = DAY) -> int | None:
    """Return the end of the date in a prompt whose tokens are these words."""
    return date_end(range(len(words)), lambda tokens: "".join(words[token] for token in tokens), template, day)


@pytest.mark.parametrize(
    "written",
    [
        "2026-03-07",
        "2026/03/07",
        "07 Mar 2026",
        "07 March 2026",
        "Mar 07, 2026",
        "March 07, 2026",
        "03/07/2026",
        "07/03/2026",
        "07.03.2026",
    ],
)
def test_dates_are_known_as_templates_write_them(written: str) -> None:
    assert end_in(["Today is ", written, ". Be brief."]) == 2
    assert end_in(["Today is ", *written, ". Be brief."]) == 1 + len(written)
    assert end_in(["Today is ", written], day=DAY + datetime.timedelta(1)) is None


@pytest.mark.parametrize("num_behind", range(4))
@pytest.mark.parametrize("num_before", range(4))
def test_the_fewest_tokens_that_hold_the_date(num_before: int, num_behind: int) -> None:
    words = [*["so "] * num_before, "2026-", "03-", "07", *[" and"] * num_behind]
    assert end_in(words) == num_before + 3
    assert end_in([*words, "2026-03-07"]) == num_before + 3, "the first one"
    assert end_in([*["so "] * num_before, "2026-03-07", *[" and"] * num_behind]) == num_before + 1


@pytest.mark.parametrize(
    ("call", "is_known"),
    [
        ("strftime_now('%d. %m')", True),
        ('strftime_now( "%d. %m" )', True),
        ("strftime_now('%m')", False),
        ("strftime('%d. %m')", False),
    ],
)
def test_a_template_may_have_a_format_of_its_own(call: str, is_known: bool) -> None:
    assert end_in(["Today: ", "07. 03", "."], "{{ " + call + " }}") == (2 if is_known else None)


def test_a_format_without_the_day_does_not_change_each_day() -> None:
    template = "{{ strftime_now('%B %Y') }} {{ strftime_now('%-d %b') }}"
    assert end_in(["March 2026", " is", " long"], template) is None
    assert end_in(["March 2026", ", the ", "7 Mar"], template) == 3
