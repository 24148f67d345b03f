"""What people do with the console, from the first click to what the daemon is asked to do."""

import json
import re
from dataclasses import replace

import pytest

from tests.e2e.console.conftest import OpenPage, shown
from tests.e2e.console.stub_api import TOKEN, StubDaemon

REQUEST = json.dumps({"model": "m", "messages": [{"role": "system", "content": "Today is 2026-07-02."}]})


def test_sign_in_keeps_the_token_in_the_tab_and_sign_out_forgets_it(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.token = TOKEN
    page = open_page("prompts")
    page.get_by_label("Token").fill("kvt_wrong")
    page.keyboard.press("Enter")
    page.get_by_role("alert").get_by_text("not valid").wait_for()
    assert page.evaluate("() => sessionStorage.length") == 0

    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Prompts", level=1).wait_for()
    page.reload()
    page.get_by_text("ada").wait_for()
    assert page.evaluate("() => localStorage.length") == 0
    assert page.context.cookies() == []

    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").wait_for()
    assert page.evaluate("() => sessionStorage.length") == 0


def test_a_token_that_is_revoked_ends_what_is_shown(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.token = TOKEN
    page = open_page("prompts/support-bot")
    page.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="support-bot").wait_for()
    page.get_by_role("button", name="Change").click()
    page.get_by_role("dialog").get_by_text("Change support-bot").wait_for()

    daemon.token = "kvt_another"

    page.get_by_text("not valid, or it was revoked").wait_for()
    assert page.get_by_text("support-bot").count() == 0
    page.get_by_label("Token").fill(TOKEN)


def test_the_sign_in_comes_when_a_daemon_that_did_not_answer_asks_for_a_token(
    open_page: OpenPage, daemon: StubDaemon
) -> None:
    daemon.broken.add("whoami")
    page = open_page("prompts")
    page.get_by_role("button", name="Try again").wait_for()
    daemon.token = TOKEN
    daemon.broken.clear()

    page.get_by_label("Token").wait_for()
    assert page.get_by_role("button", name="Try again").count() == 0


def test_without_access_control_there_is_no_sign_in(open_page: OpenPage) -> None:
    page = open_page()
    shown(page)

    assert page.get_by_label("Token", exact=True).count() == 0
    assert page.get_by_role("button", name="Sign out").count() == 0


def test_filters_sort_and_stay_in_the_address(open_page: OpenPage) -> None:
    page = open_page("prompts")
    page.get_by_role("link", name="triage").wait_for()
    page.get_by_label("Name, owner or label").fill("translator")
    page.get_by_role("status").get_by_text(re.compile("^2 of")).wait_for()
    page.get_by_role("button", name="Name", exact=True).click()
    names = page.locator("tbody th a")
    assert names.all_inner_texts() == ["translator-fr", "translator-ja"]
    page.get_by_role("button", name="Name", exact=True).click()
    assert names.all_inner_texts() == ["translator-ja", "translator-fr"]

    page.reload()
    page.get_by_role("status").get_by_text(re.compile("^2 of")).wait_for()
    assert names.all_inner_texts() == ["translator-ja", "translator-fr"]

    page.get_by_label("Name, owner or label").fill("nothing like this")
    page.get_by_text("No prompt matches").wait_for()


def test_states_and_labels_are_filtered_by_the_daemon(open_page: OpenPage) -> None:
    page = open_page("prompts")
    page.get_by_role("link", name="triage").wait_for()
    page.get_by_label("State").select_option("STALE")
    page.get_by_role("status").get_by_text(re.compile("^1 prompt$")).wait_for()
    page.get_by_label("State").select_option("")
    page.get_by_label("Labels", exact=True).fill("team=sales,tier!=gold")
    page.wait_for_function("() => !document.body.innerText.includes('team=support')")

    page.get_by_label("Labels", exact=True).fill("=broken")
    page.get_by_role("alert").get_by_text("write label selectors like").wait_for()


def test_what_was_typed_counts_though_another_filter_is_chosen_at_once(open_page: OpenPage) -> None:
    page = open_page("prompts")
    page.get_by_role("link", name="triage").wait_for()
    page.get_by_label("Name, owner or label").fill("translator")
    page.get_by_label("Show", exact=True).select_option("")

    page.get_by_role("status").get_by_text(re.compile("^2 of")).wait_for()
    assert "q=translator" in page.url
    page.get_by_label("Name, owner or label").fill("triage")
    page.goto(page.url.partition("#")[0] + "#/disk")
    page.wait_for_timeout(500)
    assert page.url.endswith("#/disk")


def test_a_prompt_is_pinned(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts")
    page.get_by_role("button", name="Pin a prompt").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Pin", exact=True).click()
    dialog.get_by_role("alert").get_by_text("a name has 1 to 128").wait_for()
    dialog.get_by_label("Name", exact=True).fill("support-bot")
    dialog.get_by_label("Source").fill("You are kind.")
    dialog.get_by_label("Time to live", exact=True).fill("7d")
    dialog.get_by_label("Labels", exact=True).fill("team=a")
    dialog.get_by_role("button", name="Pin", exact=True).click()
    dialog.get_by_role("alert").get_by_text("other content").wait_for()
    dialog.get_by_label("Name", exact=True).fill("sales/kind")
    dialog.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_role("heading", name="sales/kind", level=1).wait_for()

    body = next(body for method, path, body in daemon.calls if (method, path) == ("PUT", "prompts/sales%2Fkind"))
    assert (body["system"], body["ttl_s"], body["labels"]) == ("You are kind.", 604_800, {"team": "a"})
    page.get_by_text("capturing").first.wait_for()


def test_the_priority_is_changed(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts")
    page.get_by_role("link", name="support-bot").click()
    page.get_by_role("button", name="Change", exact=True).click()
    page.get_by_role("dialog").get_by_label("Priority").fill("42")
    page.keyboard.press("Enter")
    page.get_by_text("support-bot is changed.").wait_for()

    assert daemon.calls == [("PATCH", "prompts/support-bot", {"priority": 42})]
    page.locator(".tile").get_by_text("42").wait_for()


def test_evict_asks_first(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot")
    page.get_by_role("button", name="Evict", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Cancel").click()
    assert daemon.calls == []

    page.get_by_role("button", name="Evict", exact=True).click()
    dialog.get_by_label("From").select_option("host")
    dialog.get_by_role("button", name="Evict", exact=True).click()
    page.get_by_text("47 chunks dropped").wait_for()

    assert daemon.calls == [("POST", "prompts/support-bot/evict", {"force": True, "tier": "host"})]


def test_unpin_asks_first_and_then_the_prompt_can_be_pinned_again(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot")
    page.get_by_role("button", name="Unpin", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Unpin").click()
    page.get_by_role("button", name="Pin again").wait_for()

    assert [path for _, path, _ in daemon.calls] == ["prompts/support-bot/unpin"]


def test_rename_goes_to_the_new_name(open_page: OpenPage) -> None:
    page = open_page("prompts/support-bot")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("New name").fill("help/desk")
    page.keyboard.press("Enter")

    page.get_by_role("heading", name="help/desk", level=1).wait_for()


def test_versions_are_compared_and_rolled_back(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot?tab=versions")
    page.locator(".diff ins").first.wait_for()
    assert page.locator(".diff-added ins").first.inner_text() == ", in at most five sentences"
    page.get_by_role("button", name="Roll back to support-bot@1").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    page.get_by_text("is rolled back").wait_for()

    assert daemon.calls == [("POST", "prompts/support-bot/rollback", {"version": 1})]


def test_a_request_is_explained_with_the_token_that_differs(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot?tab=explain")
    page.get_by_label("Request", exact=True).fill("{")
    page.get_by_role("button", name="Explain", exact=True).click()
    page.get_by_text("request is no JSON").wait_for()
    page.get_by_label("Request", exact=True).fill(REQUEST)
    page.get_by_role("button", name="Explain", exact=True).click()
    page.get_by_text("token 220").first.wait_for()

    assert page.locator(".difference mark").all_inner_texts() == ["2", "1"]
    page.get_by_text("This looks like a date.").wait_for()
    assert daemon.calls == [("POST", "explain", {"request": json.loads(REQUEST)})]


def test_of_another_prompt_the_token_at_which_it_differs_is_shown(open_page: OpenPage, daemon: StubDaemon) -> None:
    nearest, other = list(daemon.prompts)[:2]
    page = open_page(f"prompts/{other}?tab=explain")
    page.get_by_label("Request", exact=True).fill(REQUEST)
    page.get_by_role("button", name="Explain", exact=True).click()

    page.get_by_role("heading", name=f"Where it differs from {nearest}: token 220").wait_for()
    page.get_by_text("17 of").wait_for()


def test_differences_are_of_whole_characters(open_page: OpenPage) -> None:
    page = open_page()
    compared = r"""async () => {
      const { diffView } = await import("/static/js/ui/diff.js");
      const { explained } = await import("/static/js/views/prompt/explain.js");
      const difference = { name: "x", before: "", in_request: "be \u{1F600} nice", in_prompt: "be \u{1F601} nice" };
      const place = document.createElement("div");
      place.append(diffView(difference.in_request, difference.in_prompt, "x"));
      place.append(...explained({ difference, explanation: { prompts: [] } }).flat().filter(Boolean));
      return [...place.querySelectorAll("del, ins, mark")].map((each) => each.textContent);
    }"""

    assert page.evaluate(compared) == ["\U0001f600", "\U0001f601"] * 2


def test_events_of_a_prompt_appear_as_they_happen(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot?tab=events")
    page.get_by_text("live", exact=True).wait_for()
    daemon.emit("pin_changed", name="support-bot", priority="3")
    daemon.emit("pin_changed", name="triage", priority="4")
    page.get_by_text("pin_changed").wait_for()

    assert page.locator(".event").count() == 1


def test_events_are_followed_paused_and_filtered(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("events")
    page.get_by_text("live", exact=True).wait_for()
    daemon.emit("pack_written", pack="p1")
    daemon.emit("chunks_damaged", "warning", chunks="2")
    page.get_by_text("2 events").wait_for()
    page.get_by_label("Level").select_option("warning")
    page.get_by_text("1 event", exact=True).wait_for()
    page.get_by_role("button", name="Pause").click()
    daemon.emit("chunks_damaged", "warning", chunks="3")
    page.get_by_text("paused").wait_for()
    page.get_by_role("button", name="Resume").click()

    page.get_by_text("2 events").wait_for()


def test_advice_is_accepted_with_one_click(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("advise")
    page.get_by_role("button", name="Accept auto-3f9a1c2b", exact=True).click()
    page.get_by_role("link", name="prompt-3f9a1c2b").wait_for()

    assert daemon.calls == [("POST", "prompts/prompt-3f9a1c2b/adopt", {"automatic": "auto-3f9a1c2b"})]


@pytest.mark.parametrize("mode", ["pin", "observe"])
def test_what_is_worth_a_pin_is_pinned_by_itself_in_one_mode_only(
    open_page: OpenPage, daemon: StubDaemon, mode: str
) -> None:
    assert daemon.advice is not None
    (found,) = daemon.advice.namespaces
    prefixes = tuple(replace(each, pin_name="") for each in found.prefixes)
    daemon.advice = replace(daemon.advice, mode=mode, namespaces=(replace(found, prefixes=prefixes),))
    page = open_page("advise")
    page.get_by_text("worth a pin").first.wait_for()

    assert page.get_by_text("Pinned with the next such request").count() == (1 if mode == "pin" else 0)


def test_a_file_is_shown_first_and_applied_when_confirmed(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("apply")
    page.get_by_label("File", exact=True).fill("prompts:\n  - name: x\n    sytem: y")
    page.get_by_role("button", name="Show what would change").click()
    page.get_by_role("alert").get_by_text("did you mean system?").wait_for()

    page.get_by_label("File", exact=True).fill("prompts:\n  - name: translator\n    system: y")
    page.get_by_role("button", name="Show what would change").click()
    page.get_by_text("priority: 0 → 10").wait_for()
    page.get_by_role("button", name="Apply 2 changes").click()
    page.get_by_text("Applied: 2 changes").wait_for()
    page.get_by_role("heading", name="Applied").wait_for()
    assert page.locator(".notice-bad").count() == 0

    page.get_by_label("File", exact=True).fill("prompts:\n  - name: translator\n    system: slow")
    page.get_by_role("button", name="Show what would change").click()
    page.get_by_role("button", name="Apply 2 changes").click()
    page.get_by_text("1 prompt not durable yet: translator").wait_for()

    assert {path for _, path, _ in daemon.calls} == {"apply"}


def test_misses_are_counted_by_reason_and_explained(open_page: OpenPage) -> None:
    page = open_page("requests")
    page.get_by_role("button", name="diverged").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('tbody td:first-child')].every((each) => each.innerText === 'diverged')"
    )
    page.get_by_role("button", name="Misses").click()
    page.get_by_role("button", name=re.compile("^Explain request chatcmpl")).first.click()
    page.get_by_role("dialog").get_by_text("differs from token 220").wait_for()
    page.keyboard.press("Escape")


def test_a_viewer_is_offered_nothing_that_changes(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.role = "viewer"
    page = open_page("prompts/support-bot")
    page.get_by_role("tab", name="Versions").click()
    page.locator(".diff ins").first.wait_for()

    for name in ("Change", "Evict", "Unpin", "Roll back to support-bot@1"):
        assert page.get_by_role("button", name=name, exact=True).count() == 0


def test_a_daemon_that_is_gone_is_said_and_asked_again(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page()
    shown(page)
    page.context.set_offline(True)
    page.get_by_text("The daemon does not answer. What is shown is from before").wait_for()
    page.context.set_offline(False)
    page.locator(".offline").wait_for(state="hidden")
    daemon.broken.add("status")
    page.get_by_role("alert").get_by_text("start kvtier-daemon").wait_for()
    daemon.broken.clear()

    page.get_by_role("alert").wait_for(state="detached")


def test_a_problem_goes_when_the_same_as_before_is_answered_again(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.has_store = False
    page = open_page("disk")
    alone = page.get_by_text("This host shares no store")
    alone.wait_for()
    for is_broken in (True, False):
        daemon.broken = {"remote"} if is_broken else set()
        page.evaluate("() => document.dispatchEvent(new Event('visibilitychange'))")  # asked again at once
        alone.wait_for(state="detached" if is_broken else "visible")

    assert page.get_by_role("alert").count() == 0


def test_a_prompt_that_is_not_there_says_so_until_it_is(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/gone")
    page.get_by_text("There is no prompt gone").wait_for()
    assert page.locator(".tiles").is_hidden()
    daemon.prompts["gone"] = replace(daemon.prompts["support-bot"], name="gone")

    page.locator(".tiles").wait_for()
    page.get_by_text("There is no prompt gone").wait_for(state="detached")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_is_chosen_and_kept(open_page: OpenPage, theme: str) -> None:
    page = open_page(theme="dark" if theme == "light" else "light")
    background = "() => getComputedStyle(document.documentElement).backgroundColor"
    before = page.evaluate(background)
    page.get_by_role("button", name=theme.capitalize()).click()
    after = page.evaluate(background)
    page.reload()
    shown(page)

    assert before != after
    assert page.evaluate(background) == after
