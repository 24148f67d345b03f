"""README, docs/ and results: their links lead somewhere, and the command that they all name is one."""

import json
import re
from pathlib import Path

import pytest

from tests.unit.deployment.shipped import README_TRANSFER_CONFIG, ROOT

_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = [
    *(ROOT / name for name in _PAGES),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to a document's headings."""
    headings = _HEADING.findall(path.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in _LINK.findall(document.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{target.name} has no heading for #{anchor}"


def test_the_quickstart_starts_vllm_as_the_readme_does() -> None:
    given = re.search(r"--kv-transfer-config '(\{.*?\})'", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)
    assert given is not None
    assert README_TRANSFER_CONFIG is not None
    assert json.loads(given[1]) == json.loads(README_TRANSFER_CONFIG[1])


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/concepts.md", "kvtier/cli/output/tables.py"])
def test_the_command_has_vllm_say_what_came_from_a_cache(name: str) -> None:
    """The README's lacked it, and what `kvtier status` prints, so answers did not show that anything hits."""
    commands = re.findall(r"vllm serve MODEL (.*)--kv-transfer-config '\{", (ROOT / name).read_text())
    assert commands
    assert all("--enable-prompt-tokens-details" in options for options in commands)
