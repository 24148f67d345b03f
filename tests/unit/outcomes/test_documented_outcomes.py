"""docs/troubleshooting.md says of each outcome what it means and what to do."""

import re
from pathlib import Path

from kvtier.core.requests.request_outcomes import RequestOutcome

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"


def test_every_outcome_has_a_row() -> None:
    """In the order of the enum; a cell that is empty says nothing."""
    section = PAGE.read_text().partition("## Requests do not hit")[2].partition("\n## ")[0]
    table = section.partition("| outcome | what it means | what to do |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [re.fullmatch(r"\| `(\w+)` \| (.+?) \| (.+) \|", line) for line in table.splitlines()]
    assert [row and row[1] for row in rows] == [each.value for each in RequestOutcome]


def test_the_command_comes_first() -> None:
    section = PAGE.read_text().partition("## Requests do not hit")[2]
    first = section.partition("```console\n")[2].partition("```")[0]
    assert [line.split("  ")[0] for line in first.splitlines()] == [
        "$ kvtier explain request.json --url http://127.0.0.1:8000",
        "$ kvtier explain --recent --misses",
        "$ kvtier explain --id ID",
    ]
