"""`kvtier warm`: in which order, how much, and not while users wait."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.client.admin import AdminClient
from kvtier.client.warm_requests import by_importance
from kvtier.library.flows.warm_flow import WarmFlow, model_of
from kvtier.library.progress_events import WarmResult
from kvtier.library.rendering.vllm_client import ServedModel, VllmClient
from kvtier.library.values.conversion import prompt_of
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.fake_vllm import FakeVllm

UNUSED_URL = "http://127.0.0.1:9"
CAPACITY = 'vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="1024",num_gpu_blocks="64"} 1.0\n'
WAITING = """\
vllm:num_requests_waiting{engine="0",model_name="toy"} %d.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="toy",reason="capacity"} 9.0
"""
QUIET = CAPACITY + WAITING % 0


@pytest.fixture
def pinned(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, tmp_path: Path) -> FakeCacheService:
    """Pin `old`, `new` and `late` of 100 tokens; `late` has a low priority."""
    daemon.num_engines = 1
    for number, (name, priority) in enumerate([("old", 0), ("new", 0), ("late", -5)]):
        (tmp_path / "t.json").write_text(json.dumps(list(range(number, number + 100))))
        arguments = ("--tokens", "t.json", "--url", vllm.url, "--no-warm", "--priority", priority)
        assert kvtier("pin", name, *arguments).exit_code == 0
        daemon.prompts[name].created_unix_s = number
    vllm.requests.clear()
    vllm.metrics = QUIET
    return daemon


def completions(vllm: FakeVllm) -> list[dict[str, Any]]:
    return [body for path, body in vllm.requests if path == "/v1/completions"]


def test_all_pinned_prompts_by_priority_then_the_newest_first(
    pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier
) -> None:
    vllm.cached_tokens = 96
    result = kvtier("warm", "--url", vllm.url)
    assert result.exit_code == 0, result.output
    assert [body["prompt"][0] for body in completions(vllm)] == [1, 0, 2]
    assert all(body["max_tokens"] == 1 and body["request_id"].startswith("kvtier-warm-") for body in completions(vllm))
    assert result.output.splitlines()[0].startswith("new: 100 tokens, 96 from a cache, ")
    assert "warmed: 3 of 3 prompts, 300 tokens in " in result.output


def test_a_prompt_by_name_as_its_requests_are(pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    vllm.models.append({"id": "tuned", "root": "/loras/tuned", "parent": "toy"})
    pinned.prompts["old"].lora_name, pinned.prompts["old"].model = "tuned", "toy"
    pinned.prompts["old"].cache_salt = "pepper"
    result = kvtier("warm", "old", "old", "--url", vllm.url, "--json")
    assert result.exit_code == 0, result.output
    (body,) = completions(vllm)
    assert (body["model"], body["cache_salt"], body["prompt"]) == ("tuned", "pepper", list(range(100)))
    answer = json.loads(result.stdout)
    assert answer["limit_tokens"] == 512
    assert (answer["prompts"][0]["result"], answer["prompts"][0]["cached_tokens"]) == ("warmed", None)


def test_what_does_not_fit_is_left_out_and_what_fits_after_it_is_not(
    pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier
) -> None:
    """Of 256 tokens `new` takes 128 in whole blocks, `old` would take 160, and then `late` fits."""
    pinned.prompts["old"].num_tokens = 130
    result = kvtier("warm", "--url", vllm.url, "--max-ratio", "0.25")
    assert result.exit_code == 0, "no name was given"
    assert [body["prompt"][0] for body in completions(vllm)] == [1, 2]
    assert "old: not warmed: needs 160 tokens of vLLM's cache, 128 are left for it" in result.output
    named = kvtier("warm", "old", "--url", vllm.url, "--max-ratio", "0.1")
    assert named.exit_code == 1
    assert kvtier("warm", "old", "--url", vllm.url, "--max-ratio", "0").exit_code == 0


def test_no_limit_where_vllm_does_not_say_how_large_its_cache_is(
    pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier
) -> None:
    vllm.metrics = ""
    result = kvtier("warm", "--url", vllm.url)
    assert result.exit_code == 0
    assert "--max-ratio has no effect" in result.stderr
    assert "--enable-prompt-tokens-details" in result.output


def test_nothing_is_sent_while_requests_wait(pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    vllm.metrics = CAPACITY + WAITING % 2
    result = kvtier("warm", "--url", vllm.url, "--wait", "0")
    assert result.exit_code == 1
    assert completions(vllm) == []
    assert result.stderr.count("requests waited in vLLM for 0 s") == 3


def test_it_waits_in_all_no_longer_than_allowed(pinned: FakeCacheService, vllm: FakeVllm, tmp_path: Path) -> None:
    """Each prompt meets requests that wait for 2 s; of 3 s the second prompt has one left."""
    now_s, quiet_at_s = 0.0, 2.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        vllm.metrics = CAPACITY + WAITING % (now_s < quiet_at_s)

    def busy_again(body: dict[str, Any]) -> None:
        nonlocal quiet_at_s
        quiet_at_s = now_s + 2.0
        vllm.metrics = CAPACITY + WAITING % 1

    vllm.metrics, vllm.on_completion = CAPACITY + WAITING % 1, busy_again
    with AdminClient(tmp_path / "s") as client, VllmClient(vllm.url) as http:
        flow = WarmFlow(client=client, vllm=http, wait_s=3.0, clock=lambda: now_s, sleep=sleep)
        flow.prepare()
        results = [done.result for done in flow.run(by_importance(map(prompt_of, client.list())))]
    assert results == [WarmResult.WARMED, WarmResult.BUSY, WarmResult.BUSY]
    assert now_s == pytest.approx(3.0, abs=0.3)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["nope"], 1, "no prompt named 'nope'"),
        (["old", "--all"], 2, "cannot go with --all"),
        (["--url", UNUSED_URL], 1, f"no vLLM answers at {UNUSED_URL}"),
        (["--max-ratio", "1.5"], 2, "--max-ratio"),
        (["source"], 1, "source: not warmed: prompt 'source' is not turned into tokens yet; run `kvtier pin source`"),
    ],
)
def test_mistakes_are_named(
    pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier, arguments: list[str], exit_code: int, said: str
) -> None:
    pinned.prompts["source"] = PromptStatus(name="source", pinned=True, state=PromptStatus.UNRENDERED)
    url = [] if "--url" in arguments else ["--url", vllm.url]
    result = kvtier("warm", *arguments, *url)
    assert result.exit_code == exit_code
    assert said in " ".join(result.stderr.split())


def test_a_refusal_of_one_prompt_does_not_keep_the_others_cold(
    pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier
) -> None:
    pinned.prompts["new"].model = "another"
    vllm.statuses["/v1/completions"] = 400
    result = kvtier("warm", "--url", vllm.url)
    assert result.exit_code == 1
    assert f"new: not warmed: {vllm.url} serves toy, not another" in " ".join(result.stderr.split())
    assert result.stderr.count("asked to fail") == 2


def test_ended_pins_come_last_and_only_when_asked_for(pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    pinned.prompts["new"].pinned = False
    assert kvtier("warm", "--url", vllm.url).exit_code == 0
    assert [body["prompt"][0] for body in completions(vllm)] == [0, 2]
    vllm.requests.clear()
    assert kvtier("warm", "--all", "--url", vllm.url).exit_code == 0
    assert [body["prompt"][0] for body in completions(vllm)] == [0, 2, 1]


def test_refused_prompts_and_further_names_of_one_are_not_sent(
    pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier
) -> None:
    """They were sent all the same, and it said "warmed: 5 of 5"."""
    for name in ("second_name", "long"):
        pinned.prompts[name] = PromptStatus.FromString(pinned.prompts["new"].SerializeToString())
        pinned.prompts[name].name = name
    refused = pinned.prompts["long"]
    refused.state, refused.error = PromptStatus.REFUSED, "the prompt has 9000 tokens, max_model_len is 8192"
    result = kvtier("warm", "--url", vllm.url)
    assert result.exit_code == 0, "no one named the refused one"
    assert [body["prompt"][0] for body in completions(vllm)] == [1, 0, 2]
    assert "the same prompt as" in result.output
    said = " ".join(result.output.split())
    assert "long: not warmed: vLLM cannot use it: the prompt has 9000 tokens, max_model_len is 8192" in said
    assert "warmed: 3 of 4 prompts (1 other name of one of them), 300 tokens in" in said
    answer = json.loads(kvtier("warm", "--url", vllm.url, "--json").stdout)
    assert sorted(prompt["result"] for prompt in answer["prompts"]) == ["refused", "same prompt", *["warmed"] * 3]
    assert kvtier("warm", "long", "--url", vllm.url).exit_code == 1


def test_a_further_name_is_sent_when_the_first_one_failed(
    pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier
) -> None:
    pinned.prompts["old"].tokens_digest = pinned.prompts["new"].tokens_digest
    vllm.statuses["/v1/completions"] = 400
    assert kvtier("warm", "--url", vllm.url).stderr.count("asked to fail") == 3


def test_nothing_to_warm(daemon: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    result = kvtier("warm", "--url", vllm.url)
    assert result.exit_code == 0
    assert "no prompts to warm" in result.output


def test_an_engine_that_is_not_attached_is_mentioned(pinned: FakeCacheService, vllm: FakeVllm, kvtier: Kvtier) -> None:
    for status in pinned.prompts.values():
        status.num_engines = 0
    assert "vLLM computes them" in " ".join(kvtier("warm", "--url", vllm.url).stderr.split())


def test_which_model_requests_name() -> None:
    served = [
        ServedModel(name="toy", base="toy"),
        ServedModel(name="alias", base="toy"),
        ServedModel(name="tuned", base="toy", lora_path="/l"),
    ]

    def name_of(**fields: str) -> str | None:
        model = model_of(prompt_of(PromptStatus(**fields)), served)  # type: ignore[arg-type]
        return None if model is None else model.name

    assert (name_of(), name_of(model="alias"), name_of(model="toy")) == ("toy", "alias", "toy")
    assert (name_of(model="toy", lora_name="tuned"), name_of(model="tuned"), name_of(lora_name="x")) == (
        "tuned",
        None,
        None,
    )
