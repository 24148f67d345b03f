"""How it looks: every view in both themes from a telephone to a wall, nothing cut, nothing that jumps.

`make test-browser SHOTS=folder` keeps the pictures.
"""

import os
import re
from pathlib import Path

import pytest

from tests.e2e.console.conftest import THEMES, VIEWS, OpenPage, shown
from tests.e2e.console.stub_api import TOKEN, StubDaemon, full_daemon

WIDTHS = (360, 1280, 2560)
TABS = ("prompts/support-bot?tab=versions", "prompts/support-bot?tab=source")


def keep(page: object, name: str) -> None:
    """Write a picture of the whole page, if someone wants it."""
    if folder := os.environ.get("KVTIER_SHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_view_is_wider_than_its_window(open_page: OpenPage, width: int, theme: str) -> None:
    page = open_page(theme=theme, width=width, height=1400 if width > 2000 else 800)
    for view in (*VIEWS, *TABS):
        page.evaluate("(view) => { location.hash = `#/${view}`; }", view)
        page.wait_for_timeout(100)
        shown(page)
        keep(page, f"{view.replace('/', '-').replace('?tab=', '-')}-{width}-{theme}")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), view


@pytest.mark.parametrize("width", WIDTHS)
def test_the_menu_of_a_narrow_window_opens_and_closes(open_page: OpenPage, width: int) -> None:
    page = open_page(width=width)
    shown(page)
    menu, link = page.get_by_role("button", name="Menu"), page.get_by_role("link", name="Requests", exact=True)
    assert menu.is_visible() == (width == 360)
    if width == 360:
        assert not link.is_visible()
        menu.click()
        keep(page, "menu-360")
        page.keyboard.press("Escape")
        assert not link.is_visible()
        menu.click()
    link.click()
    page.get_by_role("heading", name="Requests", level=1).wait_for()


@pytest.mark.parametrize("theme", THEMES)
def test_the_sign_in_and_the_dialogs(open_page: OpenPage, daemon: StubDaemon, theme: str) -> None:
    page = open_page("prompts", theme=theme)
    page.get_by_role("button", name="Pin a prompt").click()
    keep(page, f"pin-form-{theme}")
    page.keyboard.press("Escape")
    daemon.token = TOKEN
    page.get_by_label("Token", exact=True).wait_for()
    keep(page, f"sign-in-{theme}")


def test_what_is_empty_says_what_to_do(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.prompts, daemon.requests, daemon.advice = {}, [], None
    daemon.engines, daemon.with_history = False, False
    for view, text in {
        "overview": "Nothing is pinned yet",
        "prompts": "kvtier pin support",
        "requests": "No requests yet",
        "advise": "No advice yet",
        "events": "Quiet so far",
    }.items():
        page = open_page(view)
        page.get_by_text(text).first.wait_for()
        keep(page, f"empty-{view}")


@pytest.mark.parametrize("view", ["overview", "prompts", "prompts/support-bot", "requests", "disk"])
def test_nothing_jumps_when_numbers_change(open_page: OpenPage, daemon: StubDaemon, view: str) -> None:
    page = open_page(view)
    shown(page)
    page.wait_for_timeout(300)
    page.evaluate("""() => {
      window.shifts = 0;
      new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) window.shifts += entry.value;
      }).observe({ type: "layout-shift" });
    }""")
    asked = len(daemon.asked)
    while len(daemon.asked) < asked + 6:
        page.wait_for_timeout(100)

    assert page.evaluate("() => window.shifts") < 0.01


def test_a_hidden_tab_asks_nothing_and_one_that_is_seen_again_asks_at_once(
    open_page: OpenPage, daemon: StubDaemon
) -> None:
    page = open_page("prompts/support-bot")
    shown(page)
    hide = "(hidden) => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => hidden }); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    page.wait_for_timeout(500)
    before = len(daemon.asked)
    page.wait_for_timeout(4000)
    assert len(daemon.asked) == before

    page.evaluate(hide, False)
    page.wait_for_timeout(500)
    assert len(daemon.asked) > before


def test_ten_thousand_prompts_are_a_page_of_fifty(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.prompts = full_daemon(10_000).prompts
    page = open_page("prompts")
    page.get_by_text("9,091 of 10,001 prompts").wait_for(timeout=60_000)

    assert page.locator("tbody tr").count() == 50
    page.get_by_role("button", name="Next").click()
    page.get_by_text(re.compile("^51.100 of 9,091")).wait_for()
    page.get_by_label("Name, owner or label").fill("tenant-09999")
    page.get_by_text(re.compile("^1 of 10,001 prompts")).wait_for()
    assert page.locator("tbody tr").count() == 1
    assert page.evaluate("() => document.querySelectorAll('*').length") < 3000
