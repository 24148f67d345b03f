"""Tokenizers and templates as vLLM loads them, and templates that mean harm."""

import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_connector.discovery.chat_rendering import (
    MAX_RENDERED_CHARS,
    ChatRenderer,
    NoUserTurnError,
    interrupted_after,
    load_chat_renderer,
)
from kvtier_connector.discovery.user_turn import learn_user_turn
from tests.unit.connector.discovery import families
from tests.unit.connector.discovery.families import tokenizer_of
from tests.unit.connector.discovery.test_user_turn import before_first_turn, messages_of, renderer_of


def model_config_of(folder: Path, template: str | dict[str, str] | None, **fields: Any) -> Any:
    """Return as much of vLLM's ModelConfig as loading a tokenizer takes; the tokenizer is saved in the folder."""
    tokenizer_of(template).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    known: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(folder),
        "runner_type": "generate",
        "tokenizer_mode": "auto",
        "tokenizer_revision": None,
        "revision": None,
        "code_revision": None,
        "trust_remote_code": False,
        "skip_tokenizer_init": False,
        "hf_config": SimpleNamespace(model_type="llama"),
    }
    return SimpleNamespace(**(known | fields))


def test_the_models_own_template_is_loaded_as_vllm_loads_it(tmp_path: Path) -> None:
    chat = load_chat_renderer(model_config_of(tmp_path, families.QWEN), None)
    opening = chat.decode(learn_user_turn(chat).opening)
    assert "<|im_start|>user" in opening


def test_a_model_may_have_a_template_for_tools(tmp_path: Path) -> None:
    templates = {"default": families.QWEN, "tool_use": families.GRANITE}
    chat = load_chat_renderer(model_config_of(tmp_path, templates), None)
    assert chat.template == families.QWEN
    plain, with_tools = (
        chat.decode(chat.render(messages_of("Be brief.", "Why?"), with_tools=each)) for each in (False, True)
    )
    assert plain.startswith("<|im_start|>system")
    assert with_tools.startswith("<|start_of_role|>system")
    assert "look_up" in with_tools


def test_a_template_given_to_vllm_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "given.jinja"
    path.write_text(families.DEEPSEEK)
    chat = load_chat_renderer(model_config_of(tmp_path, families.QWEN), path)
    assert chat.decode(learn_user_turn(chat).opening) == families.USER


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoUserTurnError, match="has no chat template"):
        load_chat_renderer(model_config_of(tmp_path, None), None)


def test_vllm_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoUserTurnError, match="--skip-tokenizer-init"):
        load_chat_renderer(model_config_of(tmp_path, None, skip_tokenizer_init=True), None)


def test_a_template_that_takes_parts_only_gets_parts() -> None:
    parts = families.CHATML.replace("messages[0].content }}", "messages[0].content[0]['text'] }}").replace(
        "m.content }}", "m.content[0]['text'] }}"
    )
    chat = renderer_of(parts)
    assert "shop" in chat.decode(chat.render(messages_of("The shop.", "Where?")))
    assert "<|im_start|>user" in chat.decode(learn_user_turn(chat).opening)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages.no.such.thing }}",
        "{% if %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for i in range(100000) %}{{ 'much text ' * 10 }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "",
    ],
    ids=["error", "undefined", "syntax", "recursion", "huge", "raised", "empty"],
)
def test_a_template_that_fails_ends_in_an_error(template: str) -> None:
    with pytest.raises(Exception, match=r"."):
        learn_user_turn(renderer_of(template))


def test_loops_in_loops_are_interrupted() -> None:
    chat = renderer_of("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(TimeoutError), interrupted_after(0.2):
        learn_user_turn(chat)


def test_an_interruption_that_comes_late_is_none() -> None:
    with interrupted_after(60):
        before = threading.active_count()
    assert sum(range(1000)) == 499500
    assert threading.active_count() <= before


def test_an_interruption_that_was_not_needed_leaves_debuggers_alone() -> None:
    code = """
import sys
from kvtier_connector.discovery.chat_rendering import interrupted_after
with interrupted_after(60):
    pass
sys.settrace(lambda *_: None)
print(sum(map(int, "123")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "6\n"


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


class LetterTokenizer:
    """Tokens are letters; what it renders is the template, what it was given, and the messages."""

    all_special_ids: Sequence[int] = (1, 2)

    def get_added_vocab(self) -> dict[str, int]:
        return {"<added>": 7}

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: object,
        chat_template: str,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        assert not tokenize
        assert add_generation_prompt, "a conversation goes on with the model's turn"
        return chat_template + ("+tools " if tools else " ") + " ".join(map(text_of, messages))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens, "the template has written them"
        return [ord(letter) for letter in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, tokens))


def test_conversations_with_tools_have_a_template_of_their_own() -> None:
    chat = ChatRenderer(LetterTokenizer(), ("plain", "other"))
    assert chat.template == "plain"
    assert chat.decode(chat.render(messages_of(None, "Why?"))) == "plain Why?"
    assert chat.decode(chat.render(messages_of("Be brief.", "Why?"), with_tools=True)) == "other+tools Be brief. Why?"


def test_special_tokens_are_those_that_were_added_too() -> None:
    assert ChatRenderer(LetterTokenizer(), ("x", "x")).special_tokens == {1, 2, 7}
    tokenizer: Any = LetterTokenizer()
    tokenizer.get_added_vocab = None
    assert ChatRenderer(tokenizer, ("x", "x")).special_tokens == {1, 2}, "not every tokenizer knows them"


@pytest.mark.parametrize(("num_chars", "is_refused"), [(MAX_RENDERED_CHARS, False), (MAX_RENDERED_CHARS + 1, True)])
def test_a_template_renders_so_much_and_no_more(num_chars: int, is_refused: bool) -> None:
    chat = ChatRenderer(LetterTokenizer(), ("x" * (num_chars - len(" Hello")), "x"))
    if is_refused:
        with pytest.raises(NoUserTurnError, match=f"renders {num_chars} characters for a few words"):
            chat.render(messages_of(None, "Hello"))
    else:
        assert len(chat.render(messages_of(None, "Hello"))) == num_chars


def test_only_a_format_in_code_shows_the_blanks_of_its_pieces() -> None:
    tokens = [ord(letter) for letter in "\u2581a<0x0A>"]
    assert ChatRenderer(LetterTokenizer(), ("x", "x")).decode(tokens) == "\u2581a<0x0A>"
    in_code = ChatRenderer(LetterTokenizer(), None)
    assert in_code.decode(tokens) == " a\n"
    assert in_code.template == ""


def test_an_interruption_is_not_taken_for_a_template_that_takes_parts() -> None:
    tokenizer: Any = LetterTokenizer()
    tries: list[object] = []

    def late(messages: object, **_: object) -> str:
        tries.append(messages)
        raise TimeoutError("late")

    tokenizer.apply_chat_template = late
    with pytest.raises(TimeoutError):
        ChatRenderer(tokenizer, ("x", "x")).render(messages_of(None, "Why?"))
    assert len(tries) == 1


def test_the_timer_of_an_interruption_ends_with_it() -> None:
    with interrupted_after(3600):
        (timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        assert timer.daemon, "the process may end meanwhile"
    timer.join(10)
    assert not timer.is_alive()


def test_what_renders_no_text_is_refused() -> None:
    tokenizer = tokenizer_of(families.QWEN)
    tokenizer.apply_chat_template = lambda *_args, **_kwargs: 7
    with pytest.raises(NoUserTurnError, match="renders a int, not text"):
        learn_user_turn(ChatRenderer(tokenizer, ("x", "x")))


def test_a_tokenizer_of_vllm_with_a_format_in_code_needs_no_template(tmp_path: Path) -> None:
    config = model_config_of(tmp_path, None, tokenizer_mode="deepseek_v32")
    chat = load_chat_renderer(config, None)
    assert families.USER in chat.decode(learn_user_turn(chat).opening)


@pytest.mark.parametrize(
    ("file", "has_system_prompt"),
    [("mistral_instruct_tokenizer_240323.model.v3", False), ("mistral_instruct_tokenizer_241114.model.v7", True)],
    ids=["v3", "v7"],
)
def test_mistrals_own_tokenizers_render_in_code(tmp_path: Path, file: str, has_system_prompt: bool) -> None:
    """Those that its library brings along: from version 7 on the system prompt is before the first user turn."""
    package = importlib.util.find_spec("mistral_common")
    assert package is not None
    assert package.origin is not None
    config = model_config_of(tmp_path, None, tokenizer_mode="mistral")
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    shutil.copy(Path(package.origin).parent / "data" / file, tmp_path / f"tokenizer.model.{file[-2:]}")
    chat = load_chat_renderer(config, None)
    turn = learn_user_turn(chat)
    assert chat.decode(turn.opening) == "[INST]"
    assert ("so only tools are found" in turn.remarks[0]) is not has_system_prompt
    found = before_first_turn(chat, turn, messages_of("Name no prices.", "Where?"), with_tools=True)
    assert "look_up" in found
    assert ("Name no prices." in found) is has_system_prompt
