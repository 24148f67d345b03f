"""Reading what an operator pins: each mistake names field, value and remedy."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.cli import source_files as sources
from kvtier.errors import InvalidArgumentError, RenderError
from kvtier.library.rendering.recipe import Recipe, SourceKind


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "file"
    path.write_text(text)
    return str(path)


def test_recipe_survives_storage() -> None:
    recipe = Recipe(kind=SourceKind.SYSTEM, content="Grüezi", tools=[{"type": "function"}])
    assert Recipe.from_json(recipe.to_json()) == recipe
    with_kwargs = replace(recipe, chat_template_kwargs={"enable_thinking": False})
    assert Recipe.from_json(with_kwargs.to_json()) == with_kwargs


def test_only_a_recipe_with_template_kwargs_has_the_new_version() -> None:
    """An older kvtier refuses what it would render wrong, and reads everything else."""
    recipe = Recipe(kind=SourceKind.SYSTEM, content="Hi")
    assert json.loads(recipe.to_json())["version"] == 1
    assert json.loads(replace(recipe, chat_template_kwargs={"a": 1}).to_json())["version"] == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 1, "kind": "poem"}',
        '{"version": 99, "kind": "text"}',
        '{"version": 2, "kind": "text", "chat_template_kwargs": "no"}',
    ],
)
def test_a_recipe_of_another_kvtier(text: str) -> None:
    with pytest.raises(RenderError):
        Recipe.from_json(text)


def test_system_text_is_taken_as_it_is(tmp_path: Path) -> None:
    assert sources.read_system(file(tmp_path, " You are\n"), None).content == " You are\n"


def test_a_chat_request_brings_its_tools_and_template_kwargs(tmp_path: Path) -> None:
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    path = file(tmp_path, json.dumps(request))
    recipe = sources.read_messages(path, None)
    assert (recipe.content, recipe.tools) == (request["messages"], request["tools"])
    assert recipe.chat_template_kwargs == {"enable_thinking": False}
    assert sources.read_messages(path, None, {"other": 1}).chat_template_kwargs == {"other": 1}, "the option wins"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{enable_thinking: false}", "is not valid JSON: .* at line 1, column 2; it must be a JSON object"),
        ("", "is not valid JSON"),
        ("false", "is a boolean; it must be a JSON object like '{\"enable_thinking\": false}'"),
        ("[]", "is a list"),
        ("null", "is null"),
    ],
)
def test_bad_template_kwargs(text: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        sources.parse_template_kwargs(text)
    assert caught.value.field == "--chat-template-kwargs"


def test_template_kwargs_of_a_request_that_are_no_object(tmp_path: Path) -> None:
    request = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": 3}
    with pytest.raises(InvalidArgumentError, match=r"--messages.chat_template_kwargs = 3: is a number"):
        sources.read_messages(file(tmp_path, json.dumps(request)), None)


@pytest.mark.parametrize("text", ["[1, 2]", '{"count": 2, "tokens": [1, 2]}'])
def test_tokens(tmp_path: Path, text: str) -> None:
    assert sources.read_tokens(file(tmp_path, text)) == [1, 2]


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("", "--messages", "is empty"),
        ("[{", "--messages", "not valid JSON"),
        ('"Hi"', "--messages", "holds a string"),
        ("{}", "--messages", "holds an object"),
        ("[]", "--messages", "empty list"),
        ('["Hi"]', "--messages[0]", "must be an object"),
        ('[{"role": "robot", "content": ""}]', "--messages[0].role", "one of system, developer, user"),
        ('[{"role": "user", "content": 3}]', "--messages[0].content", "must be text"),
    ],
)
def test_bad_messages(tmp_path: Path, text: str, field: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        sources.read_messages(file(tmp_path, text), None)
    assert caught.value.field == field


@pytest.mark.parametrize(("text", "field"), [("[1, -2]", "--tokens[1]"), ("[true]", "--tokens[0]"), ("{}", "--tokens")])
def test_bad_tokens(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        sources.read_tokens(file(tmp_path, text))
    assert caught.value.field == field


def test_bad_tools(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="OpenAI API's tools"):
        sources.read_tools(file(tmp_path, '["fly"]'))
