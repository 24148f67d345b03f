"""Where the first user turn begins, learnt from templates in the formats of model families."""

import datetime
from typing import Any

import pytest

from kvtier_connector.discovery.chat_rendering import ChatRenderer, NoUserTurnError
from kvtier_connector.discovery.user_turn import UserTurn, find_run, learn_user_turn
from tests.unit.connector.discovery import families
from tests.unit.connector.discovery.families import tokenizer_of

SYSTEM = "You are the assistant of a shop.\nAnswer in two sentences; never name prices.\n"
QUESTION = "\n  What is the return policy? 日本"


def renderer_of(template: str, *, with_blanks: bool = False) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(template, with_blanks=with_blanks), (template, template))


def messages_of(system: str | None, *texts: str) -> list[Any]:
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def before_first_turn(chat: ChatRenderer, turn: UserTurn, messages: list[Any], *, with_tools: bool = False) -> str:
    """Return the text that is found to be the system prompt."""
    tokens = chat.render(messages, with_tools=with_tools)
    end = find_run(tokens, list(turn.opening))
    assert end < len(tokens), "it is found in texts that were not rendered to learn it"
    return chat.decode(tokens[:end])


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (families.CHATML, "<|im_start|>user"),
        (families.QWEN, "<|im_end|>\n<|im_start|>user"),
        (families.LLAMA_3, "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"),
        (families.MISTRAL_7, "[INST]"),
        (families.DEEPSEEK, families.USER),
        (families.GRANITE, "<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>"),
        (families.HARMONY, "<|end|><|start|>user<|message|>"),
        (families.PLAIN_TEXT, "### user says:"),
    ],
    ids=["chatml", "qwen", "llama3", "mistral7", "deepseek", "granite", "harmony", "plain"],
)
@pytest.mark.parametrize("with_blanks", [False, True], ids=["bytes", "blanks"])
def test_each_family_has_tokens_that_open_the_first_user_turn(template: str, opening: str, with_blanks: bool) -> None:
    chat = renderer_of(template, with_blanks=with_blanks)
    turn = learn_user_turn(chat)
    assert opening.strip() in chat.decode(turn.opening)
    for messages in (messages_of(SYSTEM, QUESTION), messages_of(SYSTEM, QUESTION, "Ask the shop.", "Where?")):
        found = before_first_turn(chat, turn, messages)
        assert SYSTEM.strip() in found.replace("  ", " ")
        assert "policy" not in found


@pytest.mark.parametrize(
    "template",
    [families.QWEN, families.GRANITE, families.HARMONY, families.MISTRAL_7],
    ids=["qwen", "granite", "harmony", "mistral7"],
)
def test_tools_before_the_first_user_turn_are_a_part_of_the_system_prompt(template: str) -> None:
    chat = renderer_of(template)
    found = before_first_turn(chat, learn_user_turn(chat), messages_of(SYSTEM, QUESTION), with_tools=True)
    assert "look_up" in found
    assert "policy" not in found


def test_a_conversation_without_a_system_message_has_no_more_than_the_template_before_it() -> None:
    for template in (families.CHATML, families.DEEPSEEK, families.MISTRAL_7):
        chat = renderer_of(template)
        found = before_first_turn(chat, learn_user_turn(chat), messages_of(None, QUESTION, "Yes.", "Where?"))
        assert found in ("", "<s>"), "the second turn must not be taken for the first"


def test_tools_that_llama_puts_into_the_user_turn_are_behind_what_is_found() -> None:
    chat = renderer_of(families.LLAMA_3)
    turn = learn_user_turn(chat)
    found = before_first_turn(chat, turn, messages_of(SYSTEM, QUESTION), with_tools=True)
    assert found.rstrip().endswith("never name prices.")
    assert any("tools into the user turn" in remark for remark in turn.remarks)


def test_tools_that_mistral_moves_with_the_last_user_turn_are_said_to_move() -> None:
    chat = renderer_of(families.MISTRAL_7, with_blanks=True)
    turn = learn_user_turn(chat)
    assert any("before the last user turn" in remark for remark in turn.remarks)
    longer = messages_of(SYSTEM, QUESTION, "Yes.", "Where?")
    found = before_first_turn(chat, turn, longer, with_tools=True)
    assert "look_up" not in found
    assert "never name prices" in found, "the system message is the same in every turn"


def test_a_system_text_within_the_user_turn_is_recognized() -> None:
    with pytest.raises(NoUserTurnError, match="puts the system text into the user turn"):
        learn_user_turn(renderer_of(families.GEMMA, with_blanks=True))


def test_where_only_tools_come_before_the_user_turn_these_are_found() -> None:
    chat = renderer_of(families.MISTRAL_3, with_blanks=True)
    turn = learn_user_turn(chat)
    assert chat.decode(turn.opening).strip() == "[INST]"
    assert "so only tools are found before it" in turn.remarks[0]
    assert "look_up" in before_first_turn(chat, turn, messages_of(SYSTEM, QUESTION), with_tools=True)


@pytest.mark.parametrize(
    ("template", "prompts"),
    [
        (families.LLAMA_3, "every prompt"),
        (families.HARMONY, "every prompt"),
        (families.GRANITE, "prompts without a system message"),
        (families.LLAMA_3.replace("%d %b %Y", "%d/%Y at %m"), "every prompt"),
    ],
    ids=["llama3", "harmony", "granite", "own format"],
)
def test_a_template_that_writes_the_date_is_recognized(template: str, prompts: str) -> None:
    chat = renderer_of(template)
    (remark,) = [remark for remark in learn_user_turn(chat).remarks if "date" in remark]
    assert f"writes today's date into {prompts}, up to token " in remark
    assert "changes each day" in remark
    end = int(remark.split("token ")[1].split(":")[0])
    system = None if prompts.endswith("message") else SYSTEM
    tokens = chat.render(messages_of(system, QUESTION))
    day = datetime.date.today()
    dates = [day.strftime(each) for each in ("%d %b %Y", "%Y-%m-%d", "%B %d, %Y", "%d/%Y at %m")]
    assert any(date in chat.decode(tokens[:end]) for date in dates)
    assert not any(date in chat.decode(tokens[: end - 1]) for date in dates)


def test_a_template_without_a_date_says_nothing_of_one() -> None:
    for template in (families.QWEN, families.MISTRAL_7, families.DEEPSEEK):
        assert not [remark for remark in learn_user_turn(renderer_of(template)).remarks if "date" in remark]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            families.GEMMA.replace("{% set ns", "{% if messages[0].role == 'system' %}{{ 1 / 0 }}{% endif %}{% set ns"),
            r"takes no system messages \(division by zero\)",
        ),
        ("{{ bos_token }}{{ messages[-1].content }}", "leaves system messages out"),
        ("{{ messages[0].content }}\n~\n{{ messages[-1].content }}", "may also stand in other text"),
    ],
    ids=["refused", "left out", "not distinct"],
)
def test_templates_without_a_place_to_find_say_why(template: str, reason: str) -> None:
    with pytest.raises(NoUserTurnError, match=reason):
        learn_user_turn(renderer_of(template))


def test_an_opening_that_also_stands_before_the_system_text_is_not_taken() -> None:
    twice = families.DEEPSEEK.replace(
        "{{ bos_token }}", f"{{{{ bos_token }}}}{families.USER}Hello{families.ASSISTANT}Hello", 1
    )
    with pytest.raises(NoUserTurnError, match="may also stand in other text"):
        learn_user_turn(renderer_of(twice))
