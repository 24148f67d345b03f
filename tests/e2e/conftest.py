"""Marks everything here as e2e, and prints the numbers that the tests note."""

import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from benchmarks.harness.process import started
from tests.e2e.equality import Comparisons
from tests.e2e.harness import shown_log

Note = Callable[[str], None]

HERE = Path(__file__).parent


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
                item.add_marker(pytest.mark.timeout(420))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what daemon and engines, of this test or of its module, have logged last."""
    report = yield
    if report.failed:
        report.sections += [(f"log of {each.name}", shown_log(each)) for each in started()]
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
