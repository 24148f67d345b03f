"""Small real tokenizers, trained on the manual of Python, with chat templates in the formats of model families.

The templates are written here: they have each family's special tokens in its order, and none of its texts.
"""

import functools
from pydoc_data.topics import topics
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"  # DeepSeek's, with fullwidth bars

_CHATML_TURNS = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
) + _CHATML_TURNS
QWEN = (
    "<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You help.{% endif %}"
    "{% if tools %}\n\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}<|im_end|>\n"
) + _CHATML_TURNS
LLAMA_3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutoff: December 2023\nToday: {{ strftime_now('%d %b %Y') }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>"
    "{% for m in messages if m.role != 'system' %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if tools and loop.first %}Answer with a call of {{ tools | tojson }}.\n\n{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL_TURNS = (
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] FOLDED{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_3 = "{{ bos_token }}" + _MISTRAL_TURNS.replace(
    "FOLDED", "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
)
MISTRAL_7 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "[SYSTEM_PROMPT] {{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}"
) + _MISTRAL_TURNS.replace("FOLDED", "")
GEMMA = (
    "{{ bos_token }}{% set ns = namespace(head='') %}"
    "{% if messages[0].role == 'system' %}{% set ns.head = messages[0].content + '\n\n' %}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<start_of_turn>{{ 'user' if m.role == 'user' else 'model' }}\n"
    "{{ ns.head if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    f"{{{{ '{USER}' if m.role == 'user' else '{ASSISTANT}' }}}}{{{{ m.content }}}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)
GRANITE = (
    "<|start_of_role|>system<|end_of_role|>"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% else %}Cutoff: April 2024.\nToday: {{ strftime_now('%B %d, %Y') }}.{% endif %}<|end_of_text|>\n"
    "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>A model.\nCurrent date: {{ strftime_now('%Y-%m-%d') }}\n\nReasoning: low<|end|>"
    "{% if tools or messages[0].role == 'system' %}<|start|>developer<|message|># Instructions\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% if tools %}\n\n# Tools\n\n{{ tools | tojson }}{% endif %}<|end|>{% endif %}"
    "{% for m in messages if m.role != 'system' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PLAIN_TEXT = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}### {{ m.role }} says:\n{{ m.content }}\n\n{% endfor %}"
)

_SPECIAL_TOKENS = [
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("<start_of_turn>", "<end_of_turn>", USER, ASSISTANT),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|start|>", "<|message|>", "<|end|>"),
]


def tokenizer_of(template: str | dict[str, str] | None, *, with_blanks: bool = False) -> Any:
    """Return a tokenizer of some 1,500 tokens.

    Args:
        template: Its chat template, or several by name.
        with_blanks: Blanks are a part of words, as SentencePiece has it; else bytes are merged, as GPT-2 has it.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(with_blanks)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def _trained(with_blanks: bool) -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    special = [AddedToken(text, special=True, normalized=False) for text in _SPECIAL_TOKENS]
    if with_blanks:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
        trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, max_token_length=12)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, initial_alphabet=alphabet)
    texts = (line for name in sorted(topics) for line in topics[name].splitlines(True))
    tokenizer.train_from_iterator([*texts, "\n\n", "\n\n\n", "user\n", "system\n\n"], trainer)
    return str(tokenizer.to_str())
