"""Parts of lists, maps of chunks, and sets that are given as text."""

import json
from pathlib import Path

import pytest

from kvtier import Client, PromptState
from kvtier.errors import InvalidArgumentError, PromptNotBoundError
from kvtier.json_text import JsonError, read_json
from kvtier.library.declared import DeclaredErrors, read_declared_text
from tests.fakes.fake_cache_service import FakeCacheService


def test_a_list_comes_in_parts(kvtier: Client, daemon: FakeCacheService) -> None:
    for number in range(7):
        kvtier.pin(f"p{number}", tokens=range(number, 100), labels={"odd": str(number % 2)}, warm=False)
    token, sizes, names = "", [], []
    while True:
        page = kvtier.list_page(page_size=3, page_token=token)
        sizes.append(len(page.prompts))
        names += [prompt.name for prompt in page.prompts]
        if not (token := page.next_page_token):
            break
    assert (sizes, names) == ([3, 3, 1], [f"p{number}" for number in range(7)])
    page = kvtier.list_page(selector="odd=1", page_size=2)
    assert [prompt.name for prompt in page.prompts] == ["p1", "p3"]
    page = kvtier.list_page(selector="odd=1", page_size=2, page_token=page.next_page_token)
    assert ([prompt.name for prompt in page.prompts], page.next_page_token) == (["p5"], "")
    assert kvtier.list_page(states=[PromptState.DURABLE]).prompts == ()
    for size in (0, 1001):
        with pytest.raises(InvalidArgumentError, match="page_size"):
            kvtier.list_page(page_size=size)


def test_chunks_of_a_prompt(kvtier: Client, daemon: FakeCacheService) -> None:
    kvtier.pin("bot", system="You are a parrot. " * 20)
    binding = kvtier.get("bot").bindings[0]
    found = kvtier.chunks("bot")
    assert found.chunks == b"\3" * binding.num_chunks
    assert found == kvtier.chunks("bot", namespace_id=binding.namespace_id)
    with pytest.raises(PromptNotBoundError):
        kvtier.chunks("bot", namespace_id="none")


def test_a_set_is_applied_from_text(kvtier: Client, daemon: FakeCacheService, tmp_path: Path) -> None:
    assert kvtier.apply(text="set: s\nprompts:\n- {name: a, text: Hello parrot}\n").changed
    assert kvtier.get("a").labels["kvtier/set"] == "s"
    with pytest.raises(InvalidArgumentError, match="cannot go with paths"):
        kvtier.apply("p.yaml", text="prompts: []")
    (tmp_path / "x").write_text("secret")
    with pytest.raises(DeclaredErrors, match=r"text:2:\d+: prompts\[0\].text_file.*names a file, which no text may"):
        kvtier.apply(text=f"prompts:\n- {{name: a, text_file: {tmp_path}/x}}\n")
    with pytest.raises(DeclaredErrors, match="tools_file"):
        kvtier.apply(text=f"prompts:\n- {{name: a, system: x, tools_file: {tmp_path}/x}}\n")


@pytest.mark.parametrize("in_turns", [False, True])
def test_text_that_is_long_is_read_in_turns_as_at_once(in_turns: bool) -> None:
    entries = "".join(f"- name: p{number}\n  text: Hello {number}\n" for number in range(6000))
    found = read_declared_text(f"prompts:\n{entries}", in_turns=in_turns)
    assert found.prompts["p5999"].recipe.content == "Hello 5999"
    with pytest.raises(DeclaredErrors, match=":12003:1: is no YAML"):
        read_declared_text(f"prompts:\n{entries}- name: [\n", in_turns=in_turns)


@pytest.mark.parametrize(
    "value", [list(range(50_000)), {"a": [{"b": "é" * 50, "c": [1.5, True, None]}] * 3000}, "x" * 100_000]
)
def test_json_is_read_in_turns_as_at_once(value: object) -> None:
    text = json.dumps(value)
    assert read_json(text, in_turns=True) == read_json(text.encode(), in_turns=True) == value


@pytest.mark.parametrize("end", ["", "]", "NaN]", '"\\ud800"]', "1e999]", "[" * 2000, "9" * 5000 + "]"])
def test_json_that_is_none_is_refused_in_turns_as_at_once(end: str) -> None:
    text = "[" + "1," * 60_000 + end
    messages = []
    for in_turns in (False, True):
        with pytest.raises(JsonError) as refused:
            read_json(text, in_turns=in_turns)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
