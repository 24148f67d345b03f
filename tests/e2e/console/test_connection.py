"""Connections that carry nothing, answers that fail, clocks that are off: what is shown is marked, and asked again."""

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from kvtier.library.values.public_values import Prompt
from tests.e2e.console.conftest import OpenPage, ask_again, shown, until
from tests.e2e.console.stub_api import StubDaemon, full_daemon

QUIET = "Nothing has happened since this page was opened"
GAP = "Events may be missing here"
PANEL = "prompts/support-bot?tab=events"

# Connections that carry nothing.


def test_a_stream_without_a_byte_is_opened_again(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("events")
    page.get_by_text("live", exact=True).wait_for()
    page.clock.install()
    page.wait_for_timeout(400)  # a comment, from which on the time is measured by that clock
    daemon.is_silent = True
    page.wait_for_timeout(300)
    page.clock.fast_forward(40_000)
    page.wait_for_timeout(300)
    assert daemon.num_streams == 1

    page.clock.fast_forward(6_000)
    page.get_by_text(GAP).wait_for()
    until(page, lambda: bool(page.clock.fast_forward(1_000) or daemon.num_streams == 2))
    page.get_by_text("live", exact=True).wait_for()


def test_an_answer_that_never_comes_is_a_daemon_that_does_not_answer(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("disk")
    shown(page)
    page.clock.install()
    daemon.asked.clear()
    daemon.holds = lambda *_: True
    ask_again(page)
    until(page, lambda: {"status", "remote"} <= {*daemon.asked})
    page.clock.fast_forward(31_000)
    page.get_by_text("The daemon does not answer. What is shown is from before").wait_for()
    page.get_by_role("alert").get_by_text("No answer came within 30 s").first.wait_for()

    daemon.holds = lambda *_: False
    ask_again(page)
    until(page, lambda: page.get_by_role("alert").count() == 0)
    page.locator(".offline").wait_for(state="hidden")


# Events that may be missing.


def test_where_the_stream_was_away_is_marked(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page(PANEL)
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_text(QUIET).wait_for()
    daemon.cut_streams()
    page.get_by_text(GAP).wait_for()
    page.get_by_text("live", exact=True).wait_for()
    assert not page.get_by_text(QUIET).is_visible()

    daemon.emit("pin_changed", name="support-bot")
    page.get_by_text("pin_changed").wait_for()
    daemon.cut_streams()
    page.get_by_text(GAP).nth(1).wait_for()
    assert [text.split(" ")[0] for text in page.locator(".event-name").all_inner_texts()] == [
        "Events", "pin_changed", "Events",
    ]  # fmt: skip


def test_a_view_that_is_opened_later_has_the_gap_before_it(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page(PANEL)
    page.get_by_text("live", exact=True).wait_for()
    daemon.emit("pin_changed", name="support-bot")
    page.get_by_text("pin_changed").wait_for()
    for view in ("disk", "events"):
        page.evaluate("(view) => { location.hash = `#/${view}`; }", view)
        page.get_by_role("heading", name=view.capitalize(), level=1).wait_for()
    page.get_by_text(GAP).wait_for()
    page.get_by_text("1 event", exact=True).wait_for()

    # A prompt without events of before has nothing that a gap would be in.
    page.evaluate("() => { location.hash = '#/prompts/triage?tab=events'; }")
    page.get_by_text(QUIET).wait_for()
    assert page.get_by_text(GAP).count() == 0


def test_a_prompt_s_events_say_how_many_were_lost(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page(PANEL)
    page.get_by_text("live", exact=True).wait_for()
    daemon.emit("dropped", "warning", events="12")

    page.get_by_text("events=12").wait_for()


@pytest.mark.parametrize(("view", "claim"), [(PANEL, QUIET), ("events", "Quiet so far")])
def test_without_a_stream_nothing_is_claimed(open_page: OpenPage, daemon: StubDaemon, view: str, claim: str) -> None:
    daemon.broken.add("events")
    page = open_page(view)
    page.get_by_text(GAP).wait_for()
    assert not page.get_by_text(claim).is_visible()


@pytest.mark.parametrize(("view", "claim"), [(PANEL, QUIET), ("events", "Quiet so far")])
def test_before_the_stream_is_open_nothing_is_claimed(
    open_page: OpenPage, daemon: StubDaemon, view: str, claim: str
) -> None:
    page = open_page(view, prepare=lambda page: page.route("**/api/v1/events", lambda _: None))
    page.get_by_text("Not connected yet").wait_for()
    assert not page.get_by_text(claim).is_visible()
    page.unroute_all(behavior="ignoreErrors")


def test_a_burst_of_events_is_drawn_with_the_next_frame(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("events")
    page.get_by_text("live", exact=True).wait_for()
    page.evaluate("""() => {
      const replace = Element.prototype.replaceChildren;
      window.drawn = 0;
      Element.prototype.replaceChildren = function (...children) {
        if (this.matches(".event-list")) window.drawn += 1;
        return replace.apply(this, children);
      };
      window.frames = 0;
      const frame = () => { window.frames += 1; requestAnimationFrame(frame); };
      requestAnimationFrame(frame);
    }""")
    for index in range(400):
        daemon.emit("pack_written", pack=f"p{index}")
    page.get_by_text("400 events").wait_for()

    drawn, frames = page.evaluate("() => [window.drawn, window.frames]")
    assert 0 < drawn <= frames + 1
    assert drawn < 200


# Answers that fail.


def test_versions_that_failed_are_asked_again(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.broken.add("prompts/support-bot/versions")
    page = open_page("prompts/support-bot?tab=versions")
    page.get_by_role("alert").get_by_text("start kvtier-daemon").wait_for()
    daemon.broken = {"prompts/support-bot%401"}
    page.get_by_role("button", name="Roll back to support-bot@1").wait_for()
    page.get_by_role("alert").get_by_text("start kvtier-daemon").wait_for()
    daemon.broken.clear()

    page.locator(".diff ins").first.wait_for()
    assert page.get_by_role("alert").count() == 0


def test_a_chart_that_is_not_up_to_date_says_so(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.broken.add("history")
    page = open_page()
    page.get_by_text("Not up to date").wait_for()
    assert page.get_by_text("No requests in this time").count() == 0
    daemon.broken.clear()
    ask_again(page)
    page.locator(".chart-plot path").first.wait_for()
    for is_broken in (True, False):
        daemon.broken = {"history"} if is_broken else set()
        ask_again(page)
        page.get_by_text("Not up to date").wait_for(state="visible" if is_broken else "detached")
        assert page.locator(".chart-plot path").count() == 4


# Clocks.


@pytest.mark.parametrize("ahead_s", [7200, -7200])
def test_times_are_the_daemon_s(open_page: OpenPage, daemon: StubDaemon, ahead_s: int) -> None:
    def set_clock(page: Any) -> None:
        page.clock.install(time=time.time() + ahead_s)

    page = open_page("requests", prepare=set_clock)
    page.locator("tbody time").first.wait_for()
    said = page.locator("tbody time").all_inner_texts()
    assert all(re.fullmatch(r"now|\d+ (s|min) ago", each) for each in said), said

    page.evaluate("() => { location.hash = '#/'; }")
    page.locator(".chart-plot path").first.wait_for()
    page.evaluate("() => { location.hash = '#/prompts/billing-agent'; }")
    page.get_by_text(re.compile("^in 7 d")).wait_for()


# Numbers, and squares.


def test_less_than_all_is_no_hundred_percent(open_page: OpenPage) -> None:
    page = open_page()
    said = """async () => {
      const { percent } = await import("/static/js/core/format.js");
      return [[1, 1], [999, 1000], [9999.9, 10000], [995, 1000], [994, 1000], [7, 7], [0.07, 0.07], [0, 7]]
        .map(([part, whole]) => percent(part, whole));
    }"""

    assert page.evaluate(said) == ["100 %", "99 %", "99 %", "99 %", "99 %", "100 %", "100 %", "0 %"]


def test_a_map_that_changes_leaves_no_observer_behind(open_page: OpenPage, daemon: StubDaemon) -> None:
    counting = """
      window.observing = new Set();
      const { observe, disconnect } = ResizeObserver.prototype;
      ResizeObserver.prototype.observe = function (...given) {
        window.observing.add(this);
        return observe.apply(this, given);
      };
      ResizeObserver.prototype.disconnect = function () {
        window.observing.delete(this);
        return disconnect.apply(this);
      };
    """
    page = open_page("prompts/support-bot", prepare=lambda page: page.add_init_script(counting))
    page.locator(".chunk-map").wait_for()
    for missing in range(1, 4):
        daemon.prompts["support-bot"] = _with_missing(daemon.prompts["support-bot"], missing)
        ask_again(page)
        page.get_by_role("img", name=re.compile(f"{missing} not stored")).wait_for()

    assert page.evaluate("() => window.observing.size") == 1
    page.evaluate("() => { location.hash = '#/disk'; }")
    shown(page)
    assert page.evaluate("() => window.observing.size") == 0


def _with_missing(prompt: Prompt, missing: int) -> Prompt:
    (binding,) = prompt.bindings
    there = binding.num_chunks - missing
    return replace(prompt, bindings=(replace(binding, num_durable_chunks=there, num_host_chunks=there),))


# Many prompts.


def test_a_state_is_chosen_among_the_rows_at_hand_and_asked_at_once(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.prompts = full_daemon(1200).prompts
    page = open_page("prompts")
    page.get_by_text(re.compile(r"of 1,201 prompts$")).wait_for()
    daemon.holds = lambda _, path, __: path == "prompts"
    ask_again(page)
    until(page, lambda: daemon.asked[-1] == "prompts")

    with page.expect_request(lambda sent: "state=STALE" in sent.url):
        page.get_by_label("State").select_option("STALE")
    assert page.locator("tbody tr").count() == 1
    page.get_by_role("status").get_by_text("1 of 1,201 prompts …").wait_for()
    with page.expect_request(lambda sent: "state=REFUSED" in sent.url):
        page.get_by_label("State").select_option("REFUSED")
    with page.expect_request(lambda sent: "state=" not in sent.url and "api/v1/prompts" in sent.url):
        page.get_by_label("State").select_option("")
    daemon.holds = lambda *_: False
    page.get_by_text(re.compile(r"of 1,201 prompts$")).wait_for()


def test_a_state_of_which_no_row_is_at_hand_is_waited_for(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts?state=STALE")
    page.get_by_role("status").get_by_text("1 prompt", exact=True).wait_for()
    daemon.holds = lambda _, path, __: path == "prompts"
    page.get_by_label("State").select_option("WAITING")
    page.get_by_role("status").get_by_text("0 of 1 prompt …").wait_for()
    assert page.get_by_text("No prompt matches").count() == 0

    daemon.holds = lambda *_: False
    page.get_by_role("status").get_by_text("1 prompt", exact=True).wait_for()
