"""Everyone can use it: axe finds nothing, in both themes, on every view and in dialogs."""

from typing import Any

import pytest

from tests.e2e.console.conftest import THEMES, VIEWS, OpenPage, shown
from tests.e2e.console.stub_api import TOKEN, StubDaemon

TABS = tuple(f"prompts/support-bot?tab={tab}" for tab in ("source", "versions", "explain", "events"))


def violations(page: Any) -> list[str]:
    """Return what axe finds, in a line each."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['target']} {node.get('failureSummary', '')[:200]}"
        for each in found
        for node in each["nodes"]
    ]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("view", [*VIEWS, *TABS])
def test_axe_finds_nothing(open_page: OpenPage, view: str, theme: str, width: int) -> None:
    page = open_page(view, theme=theme, width=width)
    shown(page)

    assert violations(page) == []


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_where_nothing_is(open_page: OpenPage, daemon: StubDaemon, view: str, theme: str) -> None:
    daemon.prompts, daemon.requests, daemon.advice = {}, [], None
    daemon.engines, daemon.with_history = False, False

    page = open_page(view, theme=theme)
    shown(page) if not view.startswith("prompts/") else page.get_by_text("There is no prompt").wait_for()

    assert violations(page) == []


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("button", ["Change", "Rename", "Verify", "Unpin", "Evict"])
def test_axe_finds_nothing_in_dialogs(open_page: OpenPage, button: str, theme: str) -> None:
    page = open_page("prompts/support-bot", theme=theme)
    page.get_by_role("button", name=button, exact=True).click()

    assert violations(page) == []


@pytest.mark.parametrize("theme", THEMES)
def test_axe_finds_nothing_at_the_sign_in(open_page: OpenPage, daemon: StubDaemon, theme: str) -> None:
    daemon.token = TOKEN
    page = open_page(theme=theme)
    page.get_by_label("Token").wait_for()

    assert violations(page) == []


@pytest.mark.parametrize("theme", THEMES)
def test_axe_finds_nothing_in_problems_and_answers(open_page: OpenPage, daemon: StubDaemon, theme: str) -> None:
    page = open_page("prompts/support-bot?tab=explain", theme=theme)
    page.get_by_label("Request", exact=True).fill('{"messages": []}')
    page.get_by_role("button", name="Explain", exact=True).click()
    page.get_by_text("Where it differs").wait_for()
    daemon.broken.add("prompts/support-bot")
    page.get_by_role("alert").wait_for()

    assert violations(page) == []


def test_everything_is_reached_by_the_keyboard_alone(open_page: OpenPage) -> None:
    page = open_page("prompts")
    shown(page)
    page.get_by_role("link", name="release-notes").wait_for()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("() => document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        )
        outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", reached[-1]

    assert reached[0] == "Skip to the content"
    for name in ("Overview", "Apply", "Dark", "Pin a prompt", "Tokens", "release-notes"):
        assert any(name in (each or "") for each in reached), reached


def test_the_skip_link_goes_to_the_title(open_page: OpenPage) -> None:
    page = open_page("disk")
    shown(page)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")

    assert page.evaluate("() => document.activeElement.innerText") == "Disk"


def test_a_dialog_keeps_the_focus_and_gives_it_back(open_page: OpenPage) -> None:
    page = open_page("prompts/support-bot")
    page.get_by_role("button", name="Evict", exact=True).focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    dialog.wait_for()

    for key in ("Tab",) * 5 + ("Shift+Tab",) * 7:
        page.keyboard.press(key)
        assert page.evaluate("() => document.querySelector('dialog').contains(document.activeElement)")
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert page.evaluate("() => document.activeElement.innerText") == "Evict"


def test_tabs_move_with_arrows(open_page: OpenPage) -> None:
    page = open_page("prompts/support-bot")
    page.get_by_role("tab", name="Chunks").focus()

    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Source").get_attribute("aria-selected") == "true"
    page.keyboard.press("End")
    assert page.get_by_role("tab", name="Events").get_attribute("aria-selected") == "true"


def test_a_new_view_tells_itself_to_screen_readers(open_page: OpenPage) -> None:
    page = open_page()
    shown(page)
    page.get_by_role("link", name="Requests").click()
    page.get_by_role("heading", name="Requests", level=1).wait_for()

    assert page.evaluate("() => document.activeElement.tagName") == "H1"
    assert page.title() == "Requests · kvtier"


def test_the_chart_is_a_table_too(open_page: OpenPage) -> None:
    page = open_page()
    shown(page)
    page.get_by_text("Show as a table").click()

    table = page.get_by_role("table", name="Prompt tokens by where they came from")
    table.wait_for()  # the "toggle" event comes in a task of its own
    assert table.get_by_role("row").count() == 61


def test_new_numbers_leave_the_focus_on_the_chart_s_table(open_page: OpenPage) -> None:
    page = open_page()
    shown(page)
    summary = page.get_by_text("Show as a table")
    summary.focus()
    page.keyboard.press("Enter")
    page.get_by_role("table", name="Prompt tokens by where they came from").wait_for()
    page.evaluate("() => { window.firstTable = document.querySelector('.as-table table'); }")
    page.wait_for_function("() => !window.firstTable.isConnected")

    assert summary.evaluate("(element) => element === document.activeElement")
