"""A small tokenizer with a chat template, trained on Python's manual and on our system prompts."""

import json
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.harness.prompts import ASSISTANTS, QUESTIONS, system_prompt

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT)

# With `enable_thinking` false a chat begins with other tokens, as those of many models do.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if enable_thinking is defined and not enable_thinking %}/no_think\n{% endif %}"
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% if system or tools %}<|system|>\n{{ system }}"
    "{% for tool in tools or [] %}\n[tool] {{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for message in turns %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@cache
def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer; the same Python gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [topics[name] for name in sorted(topics)]
    corpus += [*QUESTIONS, *map(system_prompt, range(len(ASSISTANTS)))]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as Hugging Face transformers reads them."""
    train_tokenizer(vocab_size).save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
