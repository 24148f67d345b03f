"""A model folder of Llama-3-8B's shape without weights, to be served with `--load-format dummy`: no download.

Dummy weights serve timings only: what they answer does not depend on the KV cache.
"""

import json
from collections.abc import Iterable
from pathlib import Path

VOCAB_SIZE = 128_256
SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2},
}
KV_HEADS = {"8b": 8, "tiny": 2}
HEAD_DIM = 128


def kv_bytes_per_token(shape: str) -> int:
    """Return what a token takes in bfloat16."""
    return 2 * 2 * SHAPES[shape]["num_hidden_layers"] * KV_HEADS[shape] * HEAD_DIM


def host_bytes(shape: str, prompt_lengths: Iterable[int], num_prompts: int) -> int:
    """Return the bytes of all prompts, and a quarter more."""
    return 5 * sum(prompt_lengths) * num_prompts * kv_bytes_per_token(shape) // 4 + 2**30


def write_model(folder: Path, shape: str) -> None:
    """Write config.json and a tokenizer of one word per id."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "num_key_value_heads": KV_HEADS[shape],
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        **SHAPES[shape],
    }
    words = {("<s>", "</s>")[number] if number < 2 else f"w{number}": number for number in range(VOCAB_SIZE)}
    special = [
        {"id": number, "content": word, "special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}
        | {"normalized": False}
        for number, word in enumerate(("<s>", "</s>"))
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "</s>"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }
    files = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": 131_072,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
