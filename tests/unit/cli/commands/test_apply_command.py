"""`kvtier apply` from the command line to the end, against fakes: what it says, and its exit code."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvtier.client.admin import AdminClient
from kvtier.client.remote_errors import remote_error
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.fake_vllm import FakeVllm, HangUpError, plain_template

PAGE = Path(__file__).parents[4] / "docs" / "apply.md"
LONG = "You are a parrot. " * 20


@pytest.fixture
def attached(daemon: FakeCacheService, vllm: FakeVllm) -> FakeCacheService:
    """Attach the engine: a completion makes every chunk durable."""
    daemon.num_engines = 1
    vllm.on_completion = lambda body: daemon.capture()
    return daemon


def write(folder: Path, *prompts: dict[str, object], name: str = "prompts.yaml", **file: object) -> None:
    (folder / name).write_text(json.dumps({**file, "prompts": prompts}))


def many(number: int, **how: object) -> list[dict[str, object]]:
    return [{"name": f"p{index:02}", "system": f"{LONG}{index}", **how} for index in range(number)]


def test_a_model_that_is_not_served_is_one_warning(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    write(tmp_path, *many(30, model="elsewhere"))
    result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert said.count("elsewhere") == said.count("warning") == 1
    assert f"30 prompts for model elsewhere, which {vllm.url} does not serve" in said
    assert "30 are not turned into tokens yet" in " ".join(result.stdout.split())


def test_a_model_without_an_engine_is_one_warning_and_one_wait(
    daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    """Each prompt waited for an engine on its own: 3 s, for each of thousands."""
    write(tmp_path, *many(30))
    result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url)
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "warning: 30 prompts for model toy, of which no vLLM with the kvtier connector is attached" in said
    assert "not durable yet: p00, p01" in said
    assert "and 10 more" in said
    assert not [path for path, _ in vllm.requests if path == "/v1/completions"]


def test_a_warning_about_many_prompts_is_said_once(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    def dated(messages: list[dict[str, Any]], tools: list[Any]) -> str:
        return f"[today is {datetime.now(tz=UTC):%Y-%m-%d}]" + plain_template(messages, tools)

    vllm.template = dated
    write(tmp_path, *many(25))
    result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url)
    assert result.stderr.count("prints today's date") == 1
    assert "and 5 more: the chat template" in " ".join(result.stderr.split())


def test_what_vllm_cannot_use_is_said_by_each_apply_and_the_rest_is_applied(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    """The first ended with a traceback of a kind in the middle of its work, the second with success."""
    write(tmp_path, {"name": "good", "system": LONG})
    assert kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url).exit_code == 0
    attached.bind_error = "the prompt has 3 tokens, less than one chunk of 16"
    write(tmp_path, {"name": "good", "system": LONG}, {"name": "bad", "text": "Hi!"}, {"name": "worse", "text": "Ho"})
    for _ in range(2):
        result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url)
        assert result.exit_code == 1
        said = " ".join(result.stderr.split())
        assert "error: refused: bad: the prompt has 3 tokens, less than one chunk of 16" in said
        assert "error: refused: worse: the prompt" in said
        assert "error: refused: 2 prompts; pinned, but not durable. All others are applied" in said
        assert "not durable yet" not in said
    result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert [each["name"] for each in answer["refused"]] == ["bad", "worse"]
    assert answer["refused"][0]["why"] == attached.bind_error
    assert (answer["changes"], answer["num_unchanged"]) == ([], 3)


def test_a_version_that_vllm_cannot_use_is_refused_and_the_pin_stays(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    write(tmp_path, {"name": "bot", "system": LONG})
    assert kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url).exit_code == 0
    attached.bind_error = "too long"
    write(tmp_path, {"name": "bot", "system": f"{LONG} Longer."})
    for _ in range(2):
        result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url)
        assert result.exit_code == 1
        assert "refused: bot: too long" in " ".join(result.stderr.split())
    assert kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url, "--dry-run").exit_code == 1


def test_what_the_disk_quota_stops_is_refused(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    attached.over_quota = True
    write(tmp_path, {"name": "bot", "system": LONG})
    for _ in range(2):
        result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url)
        assert result.exit_code == 1
        assert "refused: bot: the disk quota keeps it from becoming durable" in " ".join(result.stderr.split())


def test_the_mistakes_in_the_documentation_are_printed_like_that(
    daemon: FakeCacheService, kvtier: Kvtier, tmp_path: Path
) -> None:
    page = PAGE.read_text()
    (example,) = re.findall(r"^```yaml\n(# prompts.yaml\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(
        r"^\$ kvtier apply -f prompts.yaml\n(error: .*?mistakes: 2\n)", page, re.MULTILINE | re.DOTALL
    )
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "tools.json").write_text('[{"type": "function"}]')
    (tmp_path / "prompts" / "support.txt").write_text(LONG)
    (tmp_path / "prompts.yaml").write_text(example)
    result = kvtier("apply", "-f", "prompts.yaml", "--dry-run")
    assert result.stdout.endswith("+ support-bot: create\n+ translator: create\nwould be: 2 new\n")
    (tmp_path / "prompts.yaml").write_text(example.replace("priority", "prioity").replace("support.txt", "suport.txt"))
    result = kvtier("apply", "-f", "prompts.yaml")
    assert result.stderr == printed
    assert result.exit_code == 1


def test_paths_without_the_option_that_they_belong_to(daemon: FakeCacheService, kvtier: Kvtier, tmp_path: Path) -> None:
    (tmp_path / "prompts of us").mkdir()
    result = kvtier("apply", "prompts of us", "a.yaml")
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert "name files and folders with -f: kvtier apply -f 'prompts of us' -f a.yaml" in said


def test_an_empty_path_is_not_the_current_folder(daemon: FakeCacheService, kvtier: Kvtier, tmp_path: Path) -> None:
    """`-f "$PROMPTS"`, with the variable unset, applied the files of the folder that one was in."""
    write(tmp_path, *many(2))
    result = kvtier("apply", "--prune", "-f", "")
    assert result.exit_code == 1
    assert "is empty; name a file or a folder" in " ".join(result.output.split())
    assert not daemon.prompts


def test_an_empty_file_is_a_warning(daemon: FakeCacheService, kvtier: Kvtier, tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    result = kvtier("apply", "-f", "empty.yaml")
    assert result.exit_code == 0
    assert "warning: empty.yaml is empty: it declares no prompt, and --prune ends none for it" in result.stderr
    assert result.stdout == "applied: no prompts\n"


def test_pins_of_the_set_that_are_in_no_file(daemon: FakeCacheService, kvtier: Kvtier, tmp_path: Path) -> None:
    write(tmp_path, *many(3))
    kvtier("apply", "-f", "prompts.yaml", "--url", "http://127.0.0.1:9")
    write(tmp_path, *many(1))
    result = kvtier("apply", "-f", "prompts.yaml", "--url", "http://127.0.0.1:9")
    assert "2 pins of this set are in no file (p01, p02): --prune removes them" in result.stdout
    assert json.loads(kvtier("apply", "-f", "prompts.yaml", "--json").stdout)["not_in_files"] == ["p01", "p02"]
    assert "in no file" not in kvtier("apply", "-f", "prompts.yaml", "--prune").stdout
    write(tmp_path, *many(1), set="other")
    result = kvtier("apply", "-f", "prompts.yaml")
    assert result.exit_code == 1
    assert "p00: belongs to the set 'default', and this file is of the set 'other'" in " ".join(result.stderr.split())
    assert kvtier("apply", "-f", "prompts.yaml", "--take-over").exit_code == 0


def test_a_label_of_kvtier_is_refused(daemon: FakeCacheService, kvtier: Kvtier, tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text(LONG)
    for command in (("pin", "bot", "--system", "s.txt"), ("set", "bot")):
        result = kvtier(*command, "--label", "kvtier/set=x")
        assert result.exit_code == 2, result.output
        assert "labels that begin with kvtier/ are kvtier's own" in " ".join(result.stderr.split())
        kvtier("pin", "bot", "--system", "s.txt")


def test_an_export_overwrites_only_when_that_is_asked_for(
    daemon: FakeCacheService, kvtier: Kvtier, tmp_path: Path
) -> None:
    """It replaced the file that it was to be compared with."""
    write(tmp_path, *many(1))
    kvtier("apply", "-f", "prompts.yaml")
    before = (tmp_path / "prompts.yaml").read_text()
    result = kvtier("export-config", "-o", "prompts.yaml")
    assert result.exit_code == 2
    assert "exists; pass --force to overwrite it" in result.stderr
    assert (tmp_path / "prompts.yaml").read_text() == before
    assert kvtier("export-config", "-o", "prompts.yaml", "--force").exit_code == 0
    assert kvtier("export-config", "-o", "new.yaml").exit_code == 0
    assert (tmp_path / "prompts.yaml").read_text() == (tmp_path / "new.yaml").read_text() != before
    assert kvtier("export-config", "-o", "/dev/null").exit_code == 0
    (tmp_path / "circle").symlink_to("circle")
    for impossible in ("circle", "x" * 300):  # both were a traceback
        result = kvtier("export-config", "-o", impossible)
        assert (result.exit_code, "--output" in result.stderr, "cannot be written" in result.stderr) == (2, True, True)


def test_what_differs_is_said_as_files_write_it(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    """A time to live was printed in seconds, and a version that is waited for by a name that no file has."""
    (tmp_path / "s.txt").write_text(LONG)
    kvtier("pin", "bot", "--system", "s.txt", "--ttl", "3d", "--label", "team=a", "--url", vllm.url)
    bot: dict[str, object] = {"name": "bot", "ttl": "7d", "labels": {"team": "a", "tier": "1"}}
    write(tmp_path, bot | {"system": LONG}, set="ours")
    result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url)
    says = "~ bot: update (ttl 3d → 7d; labels team=a → team=a,tier=1; set none → ours)"
    assert says in result.stdout
    write(tmp_path, {"name": "bot", "system": LONG + "!", "labels": bot["labels"]}, set="ours")
    result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url)
    assert "~ bot: replace (ttl 7d → never)" in result.stdout
    assert "durable: bot\n" in result.stdout


def test_what_vllm_does_not_compute_is_refused_and_the_next_is_computed(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    """The first that vLLM refused ended the apply."""
    answer = vllm.answer

    def refuse_the_first(path: str, body: dict[str, Any], authorization: str) -> tuple[int, dict[str, Any] | str]:
        if path == "/v1/completions" and "salt" in body.get("cache_salt", ""):
            return 400, {"error": {"message": "no salts here", "code": 400}}
        return answer(path, body, authorization)

    vllm.answer = refuse_the_first  # type: ignore[method-assign]
    vllm.on_completion = lambda body: None
    write(tmp_path, {"name": "a", "system": LONG, "cache_salt": "salt", "priority": 1}, {"name": "b", "text": LONG})
    result = kvtier("apply", "-f", "prompts.yaml", "--url", vllm.url)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "warning: not durable yet: b; see" in said
    assert "refused: a: " in said
    assert "no salts here" in said


def test_mistakes_as_json(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path) -> None:
    """Those of a file, and what vLLM refuses."""
    write(tmp_path, {"name": "a", "system": LONG, "priority": 101})
    result = kvtier("apply", "-f", "prompts.yaml", "--json")
    assert result.exit_code == 1
    (error,) = json.loads(result.stdout)["errors"]
    assert (error["file"], error["line"], error["field"]) == ("prompts.yaml", 1, "prompts[0].priority")
    assert error["message"].endswith("prompts[0].priority = '101': must be at most 100")
    vllm.models[0]["max_model_len"] = 100
    write(tmp_path, {"name": "a", "system": LONG})
    result = kvtier("apply", "-f", "prompts.yaml", "--json", "--url", vllm.url)
    (error,) = json.loads(result.stdout)["errors"]
    assert (error["field"], error["line"]) == ("a", 1)
    assert daemon.pins == []


def test_what_stops_an_apply_is_answered_as_json(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path
) -> None:
    """A vLLM that ended while it computed left stdout empty."""

    def end(body: dict[str, Any]) -> None:
        raise HangUpError

    vllm.on_completion = end
    write(tmp_path, *many(2))
    result = kvtier("apply", "-f", "prompts.yaml", "--json", "--url", vllm.url)
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    (error,) = answer["errors"]
    assert (error["file"], error["line"], error["column"], error["field"]) == ("", 0, 0, "")
    assert error["message"].startswith(f"no vLLM answers at {vllm.url}")
    assert answer.keys() == json.loads(kvtier("apply", "-f", "prompts.yaml", "--json", "--dry-run").stdout).keys()
    assert len(attached.prompts) == 2, "what was recorded stays"
    result = kvtier("--socket", tmp_path / "none", "apply", "-f", "prompts.yaml", "--json")
    assert result.exit_code == 3
    assert "no kvtier-daemon answers" in json.loads(result.stdout)["errors"][0]["message"]


def test_a_quota_is_answered_as_json(
    attached: FakeCacheService, kvtier: Kvtier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise remote_error("RESOURCE_EXHAUSTED", "OwnerQuotaError", "owner 'team' has 2 of 2 pins")

    monkeypatch.setattr(AdminClient, "apply", refuse)
    write(tmp_path, *many(1))
    result = kvtier("apply", "-f", "prompts.yaml", "--json")
    assert result.exit_code == 1
    assert [each["message"] for each in json.loads(result.stdout)["errors"]] == ["owner 'team' has 2 of 2 pins"]
    assert "nothing was applied: the daemon refuses all of it" in result.stderr
