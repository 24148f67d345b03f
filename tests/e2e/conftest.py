"""Marks everything here as e2e, and prints the numbers that the tests note."""

import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.equality import Comparisons
from tests.e2e.harness import log_tails

Note = Callable[[str], None]

HERE = Path(__file__).parent
TIMEOUT_S = 900
"""For a few starts of a vLLM, which may take four minutes each, and what is waited for after them."""


def pytest_configure(config: pytest.Config) -> None:
    """Declare our markers; make SIGTERM end a run as Ctrl-C does, with every fixture's clean-up."""
    config.addinivalue_line("markers", "timed: measures time, so it must not run beside another engine")
    config.addinivalue_line("markers", "models: of a rare kind; `make test-models` runs it")
    config.addinivalue_line("markers", "restarts: starts a vLLM again and again; `make test-restarts` runs it")
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark, and give time for engines to start."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what daemon and vLLM have logged, as long as they are there."""
    report = yield
    if report.failed:
        report.sections += [(f"the end of {name}", tail) for name, tail in log_tails()]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was noted, per test; with pytest-xdist too, since properties travel with the reports."""
    lines = [
        f"{report.nodeid.partition('::')[2]}: {value}"
        for key in ("passed", "failed", "")
        for report in terminalreporter.stats.get(key, [])
        for name, value in getattr(report, "user_properties", [])
        if name == "note" and report.when == "teardown"
    ]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Keep a number for the end of the run."""
    return lambda text: record_property("note", text)


@pytest.fixture
def compare(note: Note) -> Iterator[Comparisons]:
    """Compare, count, and fail a test that took this and compared nothing."""
    comparisons = Comparisons(note)
    yield comparisons
    comparisons.report()
