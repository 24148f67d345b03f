"""A browser, pages in it, and what must hold for each of them: no error, nothing from elsewhere."""

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.console.stub_api import StubDaemon, full_daemon, served

HERE = Path(__file__).parent
VIEWS = ("overview", "prompts", "prompts/support-bot", "advise", "requests", "disk", "events", "apply")
THEMES = ("light", "dark")
DEADLINE_MS = 15_000

OpenPage = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a browser, and skip it with a hint where there is none."""
    why = ""
    if importlib.util.find_spec("playwright") is None:
        why = "no playwright here; make test-browser has it"
    elif chromium() is None:
        why = "no chromium here: apt-get install --no-install-recommends chromium"
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.browser)
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


def chromium() -> str | None:
    """Return the browser that the operating system has."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Run one browser for all tests."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Root has no sandbox; the pages are ours.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = driver.chromium.launch(executable_path=chromium(), args=arguments)
        yield running
        running.close()


@pytest.fixture
def daemon() -> Iterator[StubDaemon]:
    """An API with much to show."""
    with served(full_daemon()) as running:
        yield running


@pytest.fixture
def open_page(browser: Any, daemon: StubDaemon) -> Iterator[OpenPage]:
    """Open views; at the end no page has had an error, and none has loaded anything from elsewhere.

    What `prepare` does to a page comes before its first address.
    """
    wrong: list[str] = []
    with ExitStack() as stack:

        def opened(
            view: str = "overview",
            *,
            theme: str = "light",
            width: int = 1280,
            height: int = 900,
            prepare: Callable[[Any], None] = lambda _: None,
        ) -> Any:
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
            )
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(DEADLINE_MS)
            prepare(page)
            url = daemon.url
            page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on("request", lambda sent: None if sent.url.startswith(url) else wrong.append(sent.url))
            page.goto(f"{url}/#/{view}")
            return page

        yield opened
    # The browser itself reports each answer that is no success; tests look at what the page makes of those.
    assert [text for text in wrong if "Failed to load resource" not in text] == []


def shown(page: Any) -> None:
    """Wait until a view has its first answers."""
    page.wait_for_selector("h1")
    page.wait_for_function("() => ![...document.querySelectorAll('main .waiting')].some((each) => each.offsetParent)")


def ask_again(page: Any) -> None:
    """Have the polls of a page ask now."""
    page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")


def until(page: Any, condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Return when a condition holds; the page goes on meanwhile, and its events reach their listeners."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s
        page.wait_for_timeout(20)
