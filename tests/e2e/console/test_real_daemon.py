"""The console of a real daemon: signing in, every view, and a prompt from its pin to its end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.process import free_port
from kvtier import Client
from tests.e2e.console.conftest import VIEWS, OpenPage, shown
from tests.e2e.console.stub_api import StubDaemon
from tests.fakes.daemon_process import START_DEADLINE_S, daemon_command, daemon_process
from tests.fakes.scripted_engine import config_in
from tests.fakes.waiting import wait_for


@pytest.fixture(params=["token"])
def auth(request: pytest.FixtureRequest) -> str:
    """How the daemon lets callers in; tests choose another with `parametrize`."""
    return str(request.param)


@pytest.fixture
def daemon(auth: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDaemon]:
    """A daemon instead of the stub; only its address is of use."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("KVTIER_ACCESS_AUTH", auth)
    port, log = free_port(), tmp_path / "log"
    command = [*daemon_command(config_in(tmp_path)), f"--http-listen=127.0.0.1:{port}"]
    with daemon_process(command, log):
        wait_for(lambda: "http_served" in log.read_text(), START_DEADLINE_S)
        yield StubDaemon(url=f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("auth", ["none"], indirect=True)
def test_every_view_of_a_new_daemon_says_what_to_do(open_page: OpenPage) -> None:
    page = open_page()
    for view in VIEWS:
        page.evaluate("(view) => { location.hash = `#/${view}`; }", view)
        page.wait_for_timeout(300)
        if view.startswith("prompts/"):
            page.get_by_text("There is no prompt").wait_for()
            continue
        shown(page)
        assert page.get_by_role("alert").count() == 0, view


def test_grants_let_in_show_what_their_role_may_see_and_end(
    open_page: OpenPage, daemon: StubDaemon, tmp_path: Path
) -> None:
    with Client(socket=tmp_path / "d.sock") as client:
        client.pin("team/bot", tokens=range(1, 200), warm=False)
        token = client.create_grant("ada", role="viewer").token
        page = open_page("prompts")
        page.get_by_label("Token", exact=True).fill(token)
        page.keyboard.press("Enter")
        page.get_by_role("link", name="team/bot").click()
        page.get_by_role("heading", name="team/bot", level=1).wait_for()
        page.get_by_text("viewer").wait_for()
        assert page.get_by_role("button", name="Unpin").count() == 0
        for view in VIEWS:
            page.evaluate("(view) => { location.hash = `#/${view}`; }", view.replace("support-bot", "team%2Fbot"))
            page.wait_for_timeout(300)
            shown(page)
            assert page.get_by_role("alert").all_inner_texts() == [], view

        page.get_by_role("link", name="Overview").click()
        client.revoke_grant("ada")
        page.get_by_text("not valid, or it was revoked").wait_for()


@pytest.mark.parametrize("auth", ["none"], indirect=True)
def test_a_prompt_from_its_pin_to_its_end(open_page: OpenPage) -> None:
    page = open_page("events")
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("link", name="Prompts").click()
    page.get_by_role("button", name="Pin a prompt").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("team/bot")
    dialog.get_by_label("Kind").select_option("tokens")
    dialog.get_by_label("Source").fill(",".join(map(str, range(1, 200))))
    dialog.get_by_label("Labels", exact=True).fill("team=a")
    dialog.get_by_role("checkbox", name="Compute now").uncheck()
    dialog.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_role("heading", name="team/bot", level=1).wait_for()
    page.get_by_text("waiting").first.wait_for()

    page.get_by_role("button", name="Change", exact=True).click()
    dialog.get_by_label("Priority").fill("7")
    dialog.get_by_label("Labels", exact=True).fill("tier=gold")
    dialog.get_by_role("button", name="Save").click()
    page.locator(".labels").get_by_text("tier=gold").wait_for()
    assert page.locator(".labels").get_by_text("team=a").count() == 0

    page.get_by_role("button", name="Rename").click()
    dialog.get_by_label("New name").fill("team/desk")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="team/desk", level=1).wait_for()
    page.get_by_role("tab", name="Events").click()
    page.get_by_text("pin_renamed").wait_for()

    page.get_by_role("button", name="Unpin", exact=True).click()
    dialog.get_by_role("button", name="Unpin").click()
    page.get_by_text("not pinned", exact=True).first.wait_for()
    assert page.get_by_role("button", name="Pin again").count() == 0  # it has token ids, and no source
    page.get_by_role("button", name="Evict", exact=True).click()
    dialog.get_by_role("button", name="Evict", exact=True).click()
    page.get_by_role("heading", name="Prompts", level=1).wait_for()
    page.get_by_text("No prompts yet").wait_for()


@pytest.mark.parametrize("auth", ["none"], indirect=True)
def test_mistakes_of_a_file_are_shown_with_their_lines(open_page: OpenPage) -> None:
    page = open_page("apply")
    page.get_by_label("File", exact=True).fill("prompts:\n  - name: a\n    sytem: x\n")
    page.get_by_role("button", name="Show what would change").click()

    page.get_by_text("line 3").first.wait_for()
