"""`kvtier pin` from the command line to the end, against fakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb.cache_pb2 import PromptStatus
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.fake_vllm import FakeVllm, decode, thinking_template

UNUSED_URL = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("You are a parrot. " * 20)
    (tmp_path / "t.json").write_text(json.dumps(list(range(100))))
    (tmp_path / "short.json").write_text("[1, 2, 3]")


@pytest.fixture
def attached(daemon: FakeCacheService, vllm: FakeVllm) -> FakeCacheService:
    """Attach the engine: a completion makes every chunk durable."""
    daemon.num_engines = 1
    vllm.on_completion = lambda body: daemon.capture()
    return daemon


def completions(vllm: FakeVllm) -> list[dict[str, Any]]:
    return [body for path, body in vllm.requests if path == "/v1/completions"]


def test_system_prompt_all_the_way(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    result = kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url, "--ttl", "7d", "--cache-salt", "pepper")
    assert result.exit_code == 0, result.output
    for said in ("registered: bot (the pin is saved)", "confirmed by 1 of 1", "on disk (1.50x smaller)", "23/23"):
        assert said in result.output
    (pinned,) = attached.pins
    (warmed,) = completions(vllm)
    assert list(pinned.tokens) == warmed["prompt"]
    assert (warmed["model"], warmed["max_tokens"], warmed["cache_salt"]) == ("toy", 1, "pepper")
    assert (pinned.model, pinned.ttl_s, pinned.cache_salt, pinned.replace) == ("toy", 7 * 86400, "pepper", False)
    assert json.loads(pinned.recipe_json)["content"] == "You are a parrot. " * 20


def test_template_kwargs_are_kept_and_used_again(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    """Pinned before vLLM runs, rendered when it does, and once more with no new options: the same tokens."""
    vllm.template = thinking_template
    kwargs = '{"enable_thinking": false}'
    assert (
        kvtier("pin", "bot", "--system", "s.txt", "--chat-template-kwargs", kwargs, "--url", UNUSED_URL).exit_code == 1
    )
    for _ in range(2):
        assert kvtier("pin", "bot", "--url", vllm.url).exit_code == 0
        assert decode(list(attached.pins[-1].tokens)).startswith("/no_think\n[system]")
        assert json.loads(attached.pins[-1].recipe_json)["chat_template_kwargs"] == {"enable_thinking": False}
    shown = " ".join(kvtier("show", "bot").output.split())
    assert 'source system with chat_template_kwargs {"enable_thinking": false}' in shown


def test_json_is_the_only_thing_on_stdout(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    result = kvtier("pin", "bot", "--system", "-", "--url", vllm.url, "--json", stdin="You are a parrot, long enough.")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["state"] == "DURABLE"
    assert answer["bindings"][0]["num_durable_chunks"] == answer["bindings"][0]["num_chunks"] > 0
    assert isinstance(answer["bindings"][0]["disk_bytes"], int)
    assert "registered: bot" in result.stderr


def test_a_lora_is_pinned_under_its_base(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    vllm.models.append({"id": "tuned", "root": "/loras/tuned", "parent": "toy"})
    assert kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url, "--model", "tuned").exit_code == 0
    (pinned,) = attached.pins
    assert (pinned.model, pinned.lora_name, pinned.lora_path) == ("toy", "tuned", "/loras/tuned")
    assert completions(vllm)[0]["model"] == "tuned"


def test_tokens_without_vllm_wait_for_it(daemon: FakeCacheService, kvtier: Kvtier) -> None:
    result = kvtier("pin", "bot", "--tokens", "t.json", "--url", UNUSED_URL)
    assert result.exit_code == 0
    assert "captured when" in result.output
    assert list(daemon.pins[0].tokens) == list(range(100))
    assert daemon.pins[0].model == "", "token ids without --model apply to every engine, with vLLM or without"


def test_tokens_with_vllm_are_warmed(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    result = kvtier("pin", "bot", "--tokens", "t.json", "--url", vllm.url)
    assert result.exit_code == 0, result.output
    assert completions(vllm)[0]["prompt"] == list(range(100))
    assert attached.pins[0].model == ""


def test_a_source_without_vllm_is_kept_and_rendered_later(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier
) -> None:
    result = kvtier("pin", "bot", "--system", "s.txt", "--url", UNUSED_URL, "--ttl", "1d", "--priority", "7")
    assert result.exit_code == 1
    assert f"kvtier pin bot --url {UNUSED_URL}" in result.output
    assert attached.prompts["bot"].state == PromptStatus.UNRENDERED
    result = kvtier("pin", "bot", "--url", vllm.url)
    assert result.exit_code == 0, result.output
    assert attached.prompts["bot"].state == PromptStatus.DURABLE
    assert attached.pins[-1].ttl_s == pytest.approx(86400, abs=60), "a ttl that is not given again stays"
    assert attached.pins[-1].priority == 7, "nor does a priority change"
    assert kvtier("pin", "bot", "--url", vllm.url, "--priority", "-3").exit_code == 0
    assert attached.pins[-1].priority == -3
    assert kvtier("pin", "bot", "--url", vllm.url, "--priority", "101").exit_code == 2


def test_a_public_prompt_stays_public_until_it_is_said_otherwise(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier
) -> None:
    result = kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url, "--public")
    assert "cache salt any: the prompt is public" in " ".join(result.output.split())
    for arguments, is_public in (([], True), (["--no-public"], False), ([], False), (["--public"], True)):
        assert kvtier("pin", "bot", "--url", vllm.url, *arguments).exit_code == 0
        assert attached.pins[-1].public is is_public


def test_a_ttl_slides_until_it_is_said_otherwise(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    result = kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url, "--ttl", "1h", "--sliding")
    assert result.exit_code == 0, result.output
    assert attached.prompts["bot"].sliding
    for arguments, is_sliding in (([], True), (["--no-sliding"], False), ([], False), (["--sliding"], True)):
        assert kvtier("pin", "bot", "--url", vllm.url, *arguments).exit_code == 0
        assert attached.pins[-1].sliding is is_sliding


def test_a_prompt_with_a_salt_is_not_public(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    result = kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url, "--public", "--cache-salt", "pepper")
    assert result.exit_code != 0
    assert "a public prompt has no salt; leave out --cache-salt" in " ".join(result.stderr.split())
    assert not attached.pins


@pytest.mark.parametrize("arguments", [[], ["--system", "s.txt"], ["--system", "s.txt", "--replace"]])
def test_a_rendered_prompt_is_never_replaced_by_an_unrendered_one(
    attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, arguments: list[str]
) -> None:
    assert kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url).exit_code == 0
    result = kvtier("pin", "bot", *arguments, "--url", UNUSED_URL)
    assert result.exit_code == 1
    assert "no vLLM answers" in result.stderr
    assert attached.prompts["bot"].state == PromptStatus.DURABLE


def test_no_engine_attached(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    result = kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url)
    assert result.exit_code == 1
    assert "no vLLM with the kvtier connector is attached" in result.stderr
    assert "--kv-transfer-config" in result.output
    assert completions(vllm) == []
    assert kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url, "--no-warm").exit_code == 0


def test_no_warm_sends_nothing(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    assert kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url, "--no-warm").exit_code == 0
    assert completions(vllm) == []


def test_over_quota_says_what_to_do(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    attached.over_quota = True
    result = kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url)
    assert result.exit_code == 1
    assert "unpin and evict" in result.stderr


def test_less_than_a_chunk(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    result = kvtier("pin", "bot", "--tokens", "short.json", "--url", vllm.url)
    assert result.exit_code == 1
    assert "less than one chunk" in result.stderr


def test_a_failing_warm_request_leaves_the_pin(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    vllm.statuses["/v1/completions"] = 500
    result = kvtier("pin", "bot", "--system", "s.txt", "--url", vllm.url)
    assert result.exit_code == 1
    assert "registered: bot" in result.stdout
    assert "asked to fail" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--system", "s.txt", "--text", "s.txt"], "give one source"),
        (["--text", "s.txt", "--tools", "t.json"], "goes with --system or --messages only"),
        (["--text", "s.txt", "--chat-template-kwargs", "{}"], "goes with --system or --messages only"),
        (["--chat-template-kwargs", "{}"], "goes with --system or --messages only"),
        (["--system", "s.txt", "--chat-template-kwargs", "{no"], "is not valid JSON"),
        (["--system", "s.txt", "--chat-template-kwargs", "1"], "is a number"),
        (["--system", "-", "--tools", "-"], "stdin can be read once"),
        (["--messages", "t.json"], "must be an object"),
        (["--system", "s.txt", "--ttl", "soon"], "7d"),
        (["--system", "s.txt", "--url", "localhost"], "http://"),
        (["--system", "s.txt", "--timeout", "0"], "--timeout"),
    ],
)
def test_wrong_usage(daemon: FakeCacheService, kvtier: Kvtier, arguments: list[str], said: str) -> None:
    result = kvtier("pin", "bot", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert daemon.pins == []


def test_usage_errors_that_others_find(attached: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    wrong_name = kvtier("pin", "my bot", "--tokens", "t.json", "--url", vllm.url)
    assert (wrong_name.exit_code, "no spaces" in wrong_name.stderr) == (2, True)
    kvtier("pin", "ids", "--tokens", "t.json", "--url", vllm.url)
    no_recipe = kvtier("pin", "ids", "--url", vllm.url)
    assert (no_recipe.exit_code, "--tokens FILE" in no_recipe.stderr) == (2, True)


def test_without_a_source_an_unknown_name_is_wrong_usage(daemon: FakeCacheService, kvtier: Kvtier) -> None:
    """It said "no prompt named 'bot'": what is missing is what to pin."""
    result = kvtier("pin", "bot")
    assert result.exit_code == 2
    assert "say what to pin: --system, --messages, --text or --tokens FILE" in " ".join(result.stderr.split())
