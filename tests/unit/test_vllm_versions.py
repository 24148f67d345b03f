"""The supported range of vLLM: stated once, and the same in every place that repeats it."""

import tomllib
from pathlib import Path

import pytest

from kvtier.vllm_versions import TESTED_SERIES, TESTED_VERSIONS, VLLM_SERIES, is_tested, supports

ROOT = Path(__file__).parents[2]
FIRST, LAST, TESTED = *VLLM_SERIES, TESTED_VERSIONS


def test_the_package_asks_for_the_supported_range() -> None:
    major, minor = map(int, LAST.split("."))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={FIRST},<{major}.{minor + 1}"]


@pytest.mark.parametrize(
    ("page", "phrases"),
    [
        ("docs/compatibility.md", (f"The connector accepts {FIRST} to {LAST}.", f"**Only {TESTED} were run.**")),
        ("docs/quickstart.md", (f"from {FIRST} to {LAST} and CUDA are accepted", f"**vLLM {TESTED} on the CPU")),
        ("README.md", (f"The connector accepts {FIRST} to {LAST}:", f"**Only vLLM {TESTED} on its CPU")),
    ],
)
def test_each_page_names_the_same_range(page: str, phrases: tuple[str, ...]) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert [phrase for phrase in phrases if phrase not in text] == []


def test_versions_are_compared_by_series() -> None:
    for version in ("0.32.0+cpu", "0.32.1rc2", "0.32.0.dev1+g1"):
        assert supports(version, ["0.32"]), version
        assert is_tested(version), version
    assert [is_tested(f"{series}.1") for series in TESTED_SERIES] == [True] * len(TESTED_SERIES)
    assert not any(is_tested(version) for version in ("0.30.9", "0.34.0", "0.3.2", "nightly"))
    assert not any(supports(version, ["0.32"]) for version in ("0.320.1", "0.33.0", "0.3.2"))
    assert all(supports(version, ("0.9", "0.33")) for version in ("0.9.1", "0.26.0", "0.33.7"))
    strange = ("0.8.9", "0.34.0", "1.0.0", "nightly", "", "0.\N{SUPERSCRIPT TWO}", f"0.{'9' * 5000}")
    assert not any(supports(version, ("0.9", "0.33")) for version in strange)
    assert supports(f"{FIRST}.0")
    assert supports(f"{LAST}.9")
