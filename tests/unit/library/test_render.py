"""Rendering: what every request with the prompt starts with, and no token more."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from kvtier.errors import InvalidArgumentError, RenderError
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.library.rendering.render import UNSTABLE, Rendering, find_date_stamp, render
from kvtier.library.rendering.vllm_client import VllmClient
from tests.unit.cli.fake_vllm import (
    FakeVllm,
    decode,
    encode,
    folding_template,
    plain_template,
    strict_template,
    thinking_template,
)

SYSTEM = Recipe(kind=SourceKind.SYSTEM, content="You are a parrot.")


@pytest.fixture
def client(vllm: FakeVllm) -> Iterator[VllmClient]:
    with VllmClient(vllm.url) as opened:
        yield opened


def messages(*turns: tuple[str, str]) -> Recipe:
    return Recipe(kind=SourceKind.MESSAGES, content=[{"role": role, "content": content} for role, content in turns])


def text_of(rendering: Rendering) -> str:
    return decode(list(rendering.tokens))


def test_system_prompt_ends_before_what_merges_with_the_user_turn(client: VllmClient, vllm: FakeVllm) -> None:
    rendering = render(SYSTEM, client, "toy")
    assert text_of(rendering) == "[system]\nYou are a parrot.\n[user]"
    assert rendering.warnings == ()
    for question in ("Are you?", "7 times?", "why"):
        request = encode(plain_template([*SYSTEM.messages(), {"role": "user", "content": question}], []))
        assert tuple(request[: len(rendering.tokens)]) == rendering.tokens


def test_system_prompt_in_a_template_that_folds_it_into_the_user_turn(client: VllmClient, vllm: FakeVllm) -> None:
    vllm.template = folding_template
    # "\n\n" is a token of its own there, so nothing merges with what follows.
    assert text_of(render(SYSTEM, client, "toy")) == "[user]\nYou are a parrot.\n\n"


def test_tools_are_passed_through(client: VllmClient, vllm: FakeVllm) -> None:
    tools = [{"type": "function", "function": {"name": "fly"}}]
    recipe = Recipe(kind=SourceKind.SYSTEM, content="You are a parrot.", tools=tools)
    assert '"name": "fly"' in text_of(render(recipe, client, "toy"))
    assert all(body["tools"] == tools for path, body in vllm.requests if path == "/tokenize")


def test_template_kwargs_are_passed_through(client: VllmClient, vllm: FakeVllm) -> None:
    """A chat with other kwargs begins with other tokens, and no pin could say them."""
    vllm.template = thinking_template
    kwargs = {"enable_thinking": False}
    recipe = Recipe(kind=SourceKind.SYSTEM, content="You are a parrot.", chat_template_kwargs=kwargs)
    assert text_of(render(recipe, client, "toy")) == "/no_think\n[system]\nYou are a parrot.\n[user]"
    assert text_of(render(SYSTEM, client, "toy")).startswith("[system]")
    sent = [body.get("chat_template_kwargs") for path, body in vllm.requests if path == "/tokenize"]
    assert sent == 3 * [kwargs] + 3 * [None], "every rendering has them, or none"


def test_a_date_in_the_template_kwargs_is_meant(client: VllmClient, vllm: FakeVllm) -> None:
    """Llama's template takes `date_string`: who fixes the date so is not to be warned of it."""
    today = datetime.now(tz=UTC).strftime("%d %b %Y")
    vllm.template = lambda m, tools, date_string: f"Today: {date_string}\n" + plain_template(m, tools)
    recipe = Recipe(kind=SourceKind.SYSTEM, content="Be brief.", chat_template_kwargs={"date_string": today})
    assert render(recipe, client, "toy").warnings == ()


def test_messages_up_to_an_answer_get_another_user_turn(client: VllmClient, vllm: FakeVllm) -> None:
    vllm.template = strict_template
    recipe = messages(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"))
    assert text_of(render(recipe, client, "toy")).endswith("[assistant]\nYes?\n[user]")


def test_messages_up_to_a_user_turn_are_kept_as_they_are(client: VllmClient, vllm: FakeVllm) -> None:
    """A second user turn would be refused by a template that demands alternation."""
    vllm.template = strict_template
    recipe = messages(("system", "Be brief."), ("user", "Here is the manual: ..."))
    rendering = render(recipe, client, "toy")
    assert text_of(rendering) == "[system]\nBe brief.\n[user]\nHere is the manual: ...\n[assistant]"
    repeated = encode(plain_template(recipe.messages(), []))
    assert tuple(repeated[: len(rendering.tokens)]) == rendering.tokens


def test_text_ends_before_what_merges(client: VllmClient) -> None:
    assert text_of(render(Recipe(kind=SourceKind.TEXT, content="Once upon"), client, "toy")) == "Once upon"
    # A final newline merges with what a request may continue with.
    assert text_of(render(Recipe(kind=SourceKind.TEXT, content="Once\n"), client, "toy")) == "Once"


def test_a_template_that_prints_today_is_warned_about(client: VllmClient, vllm: FakeVllm) -> None:
    today = datetime.now(tz=UTC).strftime("%d %b %Y")
    vllm.template = lambda m, tools: f"Today: {today}\n" + plain_template(m, tools)
    (warning,) = render(SYSTEM, client, "toy").warnings
    assert today in warning


def test_a_date_that_the_operator_wrote_is_meant(client: VllmClient, vllm: FakeVllm) -> None:
    today = datetime.now(tz=UTC).strftime("%Y-%m-%d")
    recipe = Recipe(kind=SourceKind.SYSTEM, content=f"Knowledge cutoff {today}.")
    assert render(recipe, client, "toy").warnings == ()


def test_without_detokenize_there_is_no_date_warning_and_no_failure(client: VllmClient, vllm: FakeVllm) -> None:
    vllm.statuses["/detokenize"] = 404
    assert render(SYSTEM, client, "toy").warnings == ()


def test_a_template_that_changes_every_time_is_warned_about(client: VllmClient, vllm: FakeVllm) -> None:
    def counting(turns: list[dict[str, Any]], tools: list[Any]) -> str:
        return f"Hello. Call {len(vllm.requests)}.\n" + plain_template(turns, tools)

    vllm.template = counting
    rendering = render(SYSTEM, client, "toy")
    assert UNSTABLE in rendering.warnings
    assert text_of(rendering) == "Hello. Call "


def test_what_vllm_refuses_is_said_as_vllm_says_it(client: VllmClient, vllm: FakeVllm) -> None:
    vllm.template = strict_template
    with pytest.raises(RenderError, match="roles must alternate"):
        render(messages(("user", "Hi"), ("user", "Hi"), ("assistant", "?")), client, "toy")


def test_nothing_in_common_is_an_error(client: VllmClient, vllm: FakeVllm) -> None:
    vllm.template = lambda turns, tools: turns[-1]["content"]
    with pytest.raises(RenderError, match="nothing to pin"):
        render(SYSTEM, client, "toy")


def test_lora_entries_name_their_base(client: VllmClient, vllm: FakeVllm) -> None:
    vllm.models.append({"id": "tuned", "root": "/loras/tuned", "parent": "toy"})
    base, lora = client.models()
    assert (base.base, base.lora_name, base.lora_path) == ("toy", "", "")
    assert (lora.base, lora.lora_name, lora.lora_path) == ("toy", "tuned", "/loras/tuned")


@pytest.mark.parametrize(
    ("status", "said"),
    [(401, "pass api_key"), (404, "base URL of a vLLM server"), (500, "answered 500: asked to fail")],
)
def test_http_errors_name_the_remedy(client: VllmClient, vllm: FakeVllm, status: int, said: str) -> None:
    vllm.statuses["/v1/models"] = status
    with pytest.raises(RenderError, match=said):
        client.models()


def test_the_api_key_is_sent_and_v1_is_cut(vllm: FakeVllm) -> None:
    vllm.api_key = "k"
    with VllmClient(vllm.url + "/v1/", "k") as client:
        assert client.models()[0].name == "toy"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="http://127"):
        VllmClient(url)


@pytest.mark.parametrize(
    "spelling",
    ["2026-11-05", "2026/11/05", "05.11.2026", "11/05/2026", "05 Nov 2026", "5 November 2026", "November 5, 2026",
     "Nov 05, 2026", "05-Nov-2026", "20261105"],
)  # fmt: skip
def test_spellings_of_a_date(spelling: str) -> None:
    now = datetime(2026, 11, 5, 12, tzinfo=UTC)
    found = find_date_stamp(f"Today is {spelling}.", "", now)
    assert found is not None
    assert found in spelling
    assert find_date_stamp(f"Today is {spelling}.", f"since {spelling}", now) is None


def test_other_days_are_no_stamp() -> None:
    now = datetime(2026, 11, 5, 12, tzinfo=UTC)
    assert find_date_stamp("Cutoff: December 2023. On 2026-10-05 and 15 Oct 2026.", "", now) is None
