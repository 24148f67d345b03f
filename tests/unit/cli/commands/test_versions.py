"""`kvtier pin --replace`, `history` and `rollback`, against fakes."""

import json
from pathlib import Path

import pytest

from kvtier.library.flows import prompt_history
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.fake_vllm import FakeVllm


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_history, "BIND_TIMEOUT_S", 0.0)


@pytest.fixture
def twice(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path) -> str:
    """Pin `bot`, and replace it; returns what the second said. A completion makes every chunk durable."""
    daemon.num_engines = 1
    vllm.on_completion = lambda body: daemon.capture()
    (tmp_path / "1.txt").write_text("You are a parrot. " * 20)
    (tmp_path / "2.txt").write_text("You are a raven. " * 30)
    assert kvtier("pin", "bot", "--system", "1.txt", "--url", vllm.url).exit_code == 0
    result = kvtier("pin", "bot", "--system", "2.txt", "--url", vllm.url, "--replace")
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_a_replacement_says_what_serves(twice: str, daemon: FakeCacheService) -> None:
    assert "the pin that stands serves until bot@2 is durable" in twice
    assert "replaced: bot; the version before is bot@1, and stays as cache" in twice
    assert sorted(daemon.prompts) == ["bot", "bot@1"]


@pytest.mark.usefixtures("twice")
def test_history_lists_the_versions(kvtier: Kvtier) -> None:
    listed = json.loads(kvtier("history", "bot", "--json").output)
    assert [(each["name"], each["pinned"]) for each in listed] == [("bot@1", False), ("bot", True)]
    assert "bot@1" in kvtier("history", "bot").output
    assert kvtier("history", "unknown").exit_code == 1


@pytest.mark.usefixtures("twice")
def test_old_versions_outlive_the_prompt(kvtier: Kvtier) -> None:
    kvtier("unpin", "bot")
    kvtier("evict", "bot")
    assert [each["name"] for each in json.loads(kvtier("history", "bot", "--json").output)] == ["bot@1"]
    assert kvtier("rollback", "bot").exit_code == 0
    assert json.loads(kvtier("show", "bot", "--json").output)["pinned"]


@pytest.mark.usefixtures("twice")
def test_a_rollback_replaces_with_the_last_version(daemon: FakeCacheService, kvtier: Kvtier) -> None:
    first = daemon.tokens[daemon.prompts["bot@1"].pin_id]
    result = kvtier("rollback", "bot")
    assert result.exit_code == 0, result.output
    assert "kvtier warm bot@3" in result.output, "the fake has to compute it again"
    assert daemon.tokens[daemon.prompts["bot@3"].pin_id] == first
    daemon.capture()
    assert daemon.tokens[daemon.prompts["bot"].pin_id] == first
    assert kvtier("rollback", "bot", "@2").exit_code == 0
    for wrong in ("@9", "two", "@0"):
        assert kvtier("rollback", "bot", wrong).exit_code != 0
    assert "no prompt named 'bot@9'; there are bot@1, bot@2" in kvtier("rollback", "bot", "@9").stderr


@pytest.mark.usefixtures("twice")
def test_a_rollback_drops_the_version_that_waits(
    daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    """It went back to the version before the one that served."""
    serving = daemon.prompts["bot"].pin_id
    (tmp_path / "3.txt").write_text("You are a third parrot. " * 9)
    kvtier("pin", "bot", "--system", "3.txt", "--url", vllm.url, "--replace", "--no-warm")
    assert daemon.prompts["bot"].replacement == "bot@3"
    result = kvtier("rollback", "bot")
    assert result.output == "bot@3 no longer waits to replace bot, which stays as it is\n"
    assert (set(daemon.prompts), daemon.prompts["bot"].pin_id) == ({"bot", "bot@1"}, serving)
    assert daemon.prompts["bot"].pinned


def test_without_an_old_version_there_is_nothing_to_go_back_to(
    daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    (tmp_path / "t.json").write_text("[1, 2, 3]")
    kvtier("pin", "bot", "--tokens", "t.json", "--url", vllm.url)
    result = kvtier("rollback", "bot")
    assert result.exit_code == 2
    assert "has no old version" in " ".join(result.output.split())


@pytest.mark.usefixtures("twice")
def test_one_that_vllm_cannot_use_is_said_to_leave_the_pin_alone(
    daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    daemon.bind_error = "the prompt has 9 tokens, less than one chunk of 16"
    (tmp_path / "3.txt").write_text("Short.")
    result = kvtier("pin", "bot", "--system", "3.txt", "--url", vllm.url, "--replace")
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "less than one chunk of 16. The pin 'bot' that stands was not changed" in said
