"""Dialogs and buttons: what they send, what they say afterwards, and what happens where the answer is late."""

import re
from dataclasses import replace
from typing import Any

import pytest

from kvtier.library.values.public_values import NamespaceAdvice, PromptState
from tests.e2e.console.conftest import OpenPage, ask_again, shown, until
from tests.e2e.console.stub_api import StubDaemon

REPLACING = "support-bot@3"
FILE = "prompts:\n  - name: translator\n    system: y"


def visit(page: Any, view: str) -> None:
    """Change the address, as a link or the browser's buttons do."""
    page.evaluate("(view) => { location.hash = `#/${view}`; }", view)


def focused(page: Any) -> str:
    """Return tag and text of what has the focus."""
    return str(page.evaluate("() => `${document.activeElement.tagName} ${document.activeElement.innerText}`"))


def press(page: Any, name: str) -> Any:
    """Press a button of a prompt, and return the dialog that opens."""
    page.get_by_role("button", name=name, exact=True).click()
    return page.get_by_role("dialog")


def pin(page: Any, name: str, text: str, *, replaces: bool = False) -> None:
    """Fill the form of the list, and send it."""
    dialog = press(page, "Pin a prompt")
    dialog.get_by_label("Name", exact=True).fill(name)
    dialog.get_by_label("Source").fill(text)
    if replaces:
        dialog.get_by_role("checkbox", name="Replace").check()
    dialog.get_by_role("button", name="Pin", exact=True).click()


# What is said of a verification.


def test_verify_of_what_is_not_stored_says_that_nothing_was_compared(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.num_verified = 0
    page = open_page("prompts/support-bot")
    dialog = press(page, "Verify")
    dialog.get_by_role("button", name="Verify").click()
    dialog.get_by_role("alert").get_by_text("Nothing was compared").wait_for()

    assert page.get_by_text("is intact").count() == 0


def test_verify_says_what_is_damaged_and_what_is_not_stored(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.num_verified, daemon.num_damaged = 40, 2
    page = open_page("prompts/support-bot")
    dialog = press(page, "Verify")
    dialog.get_by_role("button", name="Verify").click()
    dialog.get_by_role("alert").get_by_text("Damaged", exact=True).wait_for()

    daemon.num_damaged = 0
    dialog.get_by_role("button", name="Verify").click()
    page.get_by_text("What is stored of support-bot is intact: 80 chunks compared; 7 chunks not stored.").wait_for()


# What is sent.


def test_saving_begins_the_time_to_live_again(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/billing-agent")
    press(page, "Change").get_by_role("button", name="Save").click()
    page.get_by_text("billing-agent is changed.").wait_for()

    assert daemon.calls == [("PATCH", "prompts/billing-agent", {"ttl_s": 7 * 86_400})]


def test_saving_does_not_undo_a_time_to_live_that_another_has_changed(open_page: OpenPage, daemon: StubDaemon) -> None:
    """A pin that another had made to stay for good ended in a week again, because someone edited its priority."""
    page = open_page("prompts/billing-agent")
    dialog = press(page, "Change")
    daemon.prompts["billing-agent"] = replace(daemon.prompts["billing-agent"], ttl_s=0)
    dialog.get_by_label("Priority").fill("7")
    dialog.get_by_role("button", name="Save").click()
    dialog.get_by_role("alert").get_by_text("was changed meanwhile, and has no end now").wait_for()
    assert daemon.calls == []

    dialog.get_by_label("Time to live").fill("2d")
    dialog.get_by_role("button", name="Save").click()
    page.get_by_text("billing-agent is changed.").wait_for()
    assert daemon.calls == [("PATCH", "prompts/billing-agent", {"priority": 7, "ttl_s": 2 * 86_400})]


def test_saving_what_is_the_same_says_so(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot")
    press(page, "Change").get_by_role("button", name="Save").click()
    page.get_by_text("Nothing differs").wait_for()

    assert daemon.calls == []


# A replacement, and what is gone.


def test_a_replacement_leads_to_the_page_that_stays(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts")
    pin(page, "support-bot", "You are kind.", replaces=True)
    page.get_by_role("heading", name="support-bot", exact=True, level=1).wait_for()
    page.get_by_text(f"{REPLACING} takes the place of support-bot when it is durable.").wait_for()
    page.get_by_role("link", name=REPLACING).wait_for()
    daemon.finish_replacement("support-bot")
    page.get_by_role("link", name=REPLACING).wait_for(state="detached")

    assert page.get_by_text("There is no prompt").count() == 0


def test_of_a_prompt_that_is_gone_nothing_stays_on_its_page(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot")
    page.locator(".chunk-map").wait_for()
    page.get_by_role("button", name="Evict", exact=True).focus()
    prompt = daemon.prompts.pop("support-bot")
    page.get_by_text("There is no prompt support-bot").wait_for()
    assert page.get_by_role("button", name="Evict", exact=True).count() == 0
    assert not page.locator(".chunk-map, .facts, .source, .badge").filter(visible=True).count()
    assert focused(page) == "H1 support-bot"

    daemon.prompts["support-bot"] = prompt
    page.locator(".chunk-map").wait_for()
    page.get_by_role("button", name="Evict", exact=True).wait_for()


# Dialogs whose answer is late.


def test_a_dialog_stays_while_it_sends(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot")
    daemon.holds = lambda method, *_: method == "POST"
    dialog = press(page, "Unpin")
    dialog.get_by_role("button", name="Unpin").click()
    for _ in range(3):
        page.keyboard.press("Escape")
    assert dialog.is_visible()
    assert dialog.get_by_role("button", name="Cancel").is_disabled()

    daemon.broken.add("prompts/support-bot/unpin")
    daemon.holds = lambda *_: False
    dialog.get_by_role("alert").wait_for()
    assert focused(page) == "BUTTON Unpin"
    daemon.broken.clear()
    dialog.get_by_role("button", name="Unpin").click()
    page.get_by_text("support-bot is unpinned.").wait_for()
    page.get_by_role("button", name="Pin again").wait_for()


def test_what_fails_after_its_view_was_left_is_said(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot")
    daemon.holds = lambda method, *_: method == "POST"
    press(page, "Unpin").get_by_role("button", name="Unpin").click()
    visit(page, "disk")
    page.get_by_role("heading", name="Disk", level=1).wait_for()
    assert focused(page) == "H1 Disk"
    daemon.broken.add("prompts/support-bot/unpin")
    daemon.holds = lambda *_: False

    page.locator(".notice-bad").get_by_text("start kvtier-daemon").wait_for()


def test_what_is_done_after_its_view_was_left_is_said_and_leads_nowhere(
    open_page: OpenPage, daemon: StubDaemon
) -> None:
    page = open_page("prompts")
    daemon.holds = lambda method, *_: method == "PUT"
    pin(page, "kind", "You are kind.")
    visit(page, "disk")
    page.get_by_role("heading", name="Disk", level=1).wait_for()
    daemon.holds = lambda *_: False
    page.get_by_text("kind is pinned.").wait_for()

    assert page.url.endswith("#/disk")


# Apply.


@pytest.mark.parametrize("edit", ["text", "checkbox"])
def test_what_would_change_is_dropped_when_the_file_was_edited_meanwhile(
    open_page: OpenPage, daemon: StubDaemon, edit: str
) -> None:
    page = open_page("apply")
    daemon.holds = lambda method, *_: method == "POST"
    page.get_by_label("File", exact=True).fill(FILE)
    page.get_by_role("button", name="Show what would change").click()
    if edit == "text":
        page.get_by_label("File", exact=True).fill(FILE + "z")
    else:
        page.get_by_role("checkbox", name="Prune").check()
    daemon.holds = lambda *_: False
    page.get_by_text("The file was edited meanwhile").wait_for()
    assert page.get_by_role("button", name="Apply 2 changes").count() == 0

    page.get_by_role("button", name="Show what would change").click()
    page.get_by_role("button", name="Apply 2 changes").wait_for()


def test_an_apply_that_fails_after_its_view_was_left_is_said(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("apply")
    page.get_by_label("File", exact=True).fill(FILE)
    page.get_by_role("button", name="Show what would change").click()
    page.get_by_role("button", name="Apply 2 changes").wait_for()
    daemon.holds = lambda method, *_: method == "POST"
    page.get_by_role("button", name="Apply 2 changes").click()
    visit(page, "disk")
    page.get_by_role("heading", name="Disk", level=1).wait_for()
    daemon.broken.add("apply")
    daemon.holds = lambda *_: False

    page.locator(".notice-bad").get_by_text("start kvtier-daemon").wait_for()


# Buttons that would fail.


@pytest.mark.parametrize(
    ("origin", "gone"),
    [("request", {"Change", "Rename"}), ("replacement", {"Rename"}), ("named", set())],
)
def test_of_a_prompt_only_that_is_offered_which_its_origin_allows(
    open_page: OpenPage, daemon: StubDaemon, origin: Any, gone: set[str]
) -> None:
    daemon.prompts["support-bot"] = replace(daemon.prompts["support-bot"], origin=origin)
    page = open_page("prompts/support-bot")
    page.get_by_role("button", name="Unpin", exact=True).wait_for()

    shown_names = page.locator(".page-head button").all_inner_texts()
    assert shown_names == [name for name in ("Change", "Rename", "Verify", "Unpin", "Evict") if name not in gone]


@pytest.mark.parametrize("kind", ["tokens", "system"])
def test_token_ids_are_not_pinned_again_without_being_given(open_page: OpenPage, daemon: StubDaemon, kind: str) -> None:
    recipe = {"version": 1, "kind": kind} | ({"content": "You are kind."} if kind == "system" else {})
    daemon.prompts["support-bot"] = replace(daemon.prompts["support-bot"], pinned=False, recipe=recipe)
    page = open_page("prompts/support-bot")
    page.get_by_role("button", name="Evict", exact=True).wait_for()

    assert page.get_by_role("button", name="Pin again").count() == (1 if kind == "system" else 0)


def test_a_viewer_is_offered_no_pin(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.role, daemon.prompts = "viewer", {}
    page = open_page()
    page.get_by_text("Nothing is pinned yet").wait_for()
    assert page.get_by_role("link", name="Pin a prompt").count() == 0

    visit(page, "prompts?pin=1")
    page.get_by_text("No prompts yet").wait_for()
    assert page.get_by_role("dialog").count() == 0


# Advice.


def advised(daemon: StubDaemon, **changes: Any) -> NamespaceAdvice:
    """Change the only namespace of the advice, and return it."""
    assert daemon.advice is not None
    (found,) = daemon.advice.namespaces
    daemon.advice = replace(daemon.advice, namespaces=(replace(found, **changes),))
    return daemon.advice.namespaces[0]


def with_new_rates(daemon: StubDaemon, rate: float) -> None:
    """Have every row of the advice say other numbers."""
    found = advised(daemon, requests_per_hour=rate)
    advised(daemon, prefixes=tuple(replace(each, requests_per_hour=rate) for each in found.prefixes))


def test_new_rates_leave_buttons_and_focus_where_they_are(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("advise")
    accept = page.get_by_role("button", name="Accept auto-3f9a1c2b", exact=True)
    accept.focus()
    with_new_rates(daemon, 777.0)
    ask_again(page)
    page.get_by_text("777 requests an hour").first.wait_for()
    assert focused(page) == "BUTTON Accept"

    daemon.holds = lambda method, *_: method == "POST"
    page.keyboard.press("Enter")
    with_new_rates(daemon, 555.0)
    ask_again(page)
    page.get_by_text("555 requests an hour").first.wait_for()
    assert page.get_by_role("button", name=re.compile("^Accept auto")).count() == 2
    assert page.locator(".advice button:enabled").count() == 0
    daemon.holds = lambda *_: False
    page.get_by_role("link", name="prompt-3f9a1c2b").wait_for()
    assert focused(page) == "H3 prompt-3f9a1c2b"


def test_an_acceptance_that_fails_can_be_tried_again(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("advise")
    daemon.broken.add("prompts/prompt-3f9a1c2b/adopt")
    accept = page.get_by_role("button", name="Accept auto-3f9a1c2b", exact=True)
    accept.focus()
    page.keyboard.press("Enter")
    page.locator(".notice-bad").wait_for()

    assert accept.is_enabled()
    assert focused(page) == "BUTTON Accept"


def test_rows_keep_their_places_under_the_mouse(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("advise")
    headings = page.locator(".advice h3")
    page.get_by_role("button", name="Accept auto-3f9a1c2b", exact=True).hover()
    before = headings.all_inner_texts()
    found = advised(daemon, requests_per_hour=777.0)
    advised(daemon, prefixes=tuple(reversed(found.prefixes)))
    ask_again(page)
    page.get_by_text("777 requests and").wait_for()
    assert headings.all_inner_texts() == before

    page.mouse.move(0, 0)
    ask_again(page)
    page.wait_for_function("() => !document.querySelector('.advice h3').innerText.startsWith('auto-')")
    assert headings.all_inner_texts()[:5] == before[4::-1]


# What vLLM computes after a pin.


def background(page: Any) -> list[Any]:
    """Return the bodies of the pins that wait until vLLM has computed them, as they are sent."""
    sent: list[Any] = []

    def keep(request: Any) -> None:
        if request.method == "PUT" and "warm" not in (body := request.post_data_json):
            sent.append(body)

    page.on("request", keep)
    return sent


def test_vllm_computes_one_pin_at_a_time(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.holds = lambda method, _, body: method == "PUT" and "warm" not in body
    page = open_page("prompts")
    sent = background(page)
    for name in ("one", "two"):
        pin(page, name, f"You are {name}.")
        page.get_by_role("heading", name=name, level=1).wait_for()
        page.get_by_role("link", name="Prompts", exact=True).first.click()
    until(page, lambda: bool(sent))
    page.wait_for_timeout(500)
    assert sent == [{"system": "You are one.", "replace": True, "timeout_s": 60}]

    daemon.holds = lambda *_: False
    until(page, lambda: len(sent) == 2)
    assert sent[1] == {"system": "You are two.", "replace": True, "timeout_s": 60}


def test_what_was_unpinned_before_vllm_computed_it_is_not_pinned_again(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.holds = lambda method, _, body: method == "PUT" and "warm" not in body
    page = open_page("prompts")
    sent = background(page)
    for name in ("one", "two", "three"):
        pin(page, name, f"You are {name}.")
        page.get_by_role("heading", name=name, level=1).wait_for()
        page.get_by_role("link", name="Prompts", exact=True).first.click()
    daemon.prompts["two"] = replace(daemon.prompts["two"], pinned=False)
    daemon.holds = lambda *_: False
    until(page, lambda: len(sent) == 2)

    assert [each["system"] for each in sent] == ["You are one.", "You are three."]
    assert not daemon.prompts["two"].pinned


def test_what_was_applied_is_not_applied_over_what_was_applied_since(open_page: OpenPage, daemon: StubDaemon) -> None:
    daemon.holds = lambda method, _, body: method == "PUT" and "warm" not in body
    page = open_page("prompts")
    computed: list[str] = []
    page.on("request", lambda sent: computed.append(sent.post_data) if "timeout_s" in sent.url else None)
    pin(page, "first", "You are first.")
    page.get_by_role("heading", name="first", level=1).wait_for()
    visit(page, "apply")
    for text in ("one", "two"):
        page.get_by_label("File", exact=True).fill(text)
        page.get_by_role("button", name="Show what would change").click()
        page.get_by_role("button", name="Apply 2 changes").click()
        page.get_by_role("heading", name="Applied").wait_for()
    daemon.holds = lambda *_: False
    until(page, lambda: bool(computed))

    assert computed == ["two"]
    assert daemon.applied == "two"


# Where the focus is.


@pytest.mark.parametrize("view", ["prompts/support-bot", "advise"])
def test_the_first_answer_leaves_the_focus_on_the_title(open_page: OpenPage, daemon: StubDaemon, view: str) -> None:
    page = open_page()
    shown(page)
    daemon.holds = lambda *_: True
    visit(page, view)
    title = "Advice" if view == "advise" else "support-bot"
    page.get_by_role("heading", name=title, level=1).wait_for()
    daemon.holds = lambda *_: False
    page.get_by_text("The budget is" if view == "advise" else "durable").first.wait_for()

    assert focused(page) == f"H1 {title}"


def test_a_dialog_returns_the_focus_though_the_state_has_changed(open_page: OpenPage, daemon: StubDaemon) -> None:
    page = open_page("prompts/support-bot")
    page.get_by_role("button", name="Change", exact=True).focus()
    page.keyboard.press("Enter")
    daemon.prompts["support-bot"] = replace(daemon.prompts["support-bot"], state=PromptState.STALE)
    page.get_by_text("stale", exact=True).wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert focused(page) == "BUTTON Change"

    page.keyboard.press("Enter")
    daemon.prompts["support-bot"] = replace(daemon.prompts["support-bot"], pinned=False)
    page.get_by_text("not pinned", exact=True).first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert focused(page) == "H1 support-bot"
