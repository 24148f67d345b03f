"""A small Llama trained for minutes on text at hand, and the KV cache that it computes.

Codecs are measured on this and not on models with random weights, whose KV has no outliers and no quiet channels. It is
undertrained all the same: what a large model's KV gains may differ. Same torch, same machine: same weights.
"""

import math
import random
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.models import MODELS_DIR
from benchmarks.harness.prompts import ASSISTANTS, system_prompt
from benchmarks.harness.tokenizer import train_tokenizer

VOCAB_SIZE, LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 6, 256, 4, 4, 64
SEQUENCE_TOKENS, BATCH, PEAK_RATE = 256, 8, 1.5e-3
BLOCK_TOKENS = 32
NUM_FILES = 120


def trained_model(steps: int, seed: int = 0) -> tuple[Any, float]:
    """Return the model (float32, in evaluation mode) and its last training loss; trained once, then from `.models/`."""
    path = MODELS_DIR / f"codec-llama-{steps}-{seed}.pt"
    model = LlamaForCausalLM(_config())
    if not path.exists():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config())
        loss = _train(model, steps, seed)
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        torch.save({"weights": model.state_dict(), "loss": loss}, unfinished)
        unfinished.rename(path)
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["weights"])
    return model.eval(), float(saved["loss"])


def prompt_kv(model: Any, dtype: torch.dtype, num_prompts: int) -> list[torch.Tensor]:
    """Return the KV of system prompts, one tensor per block of 32 tokens, all prompts in a row.

    Args:
        model: From `trained_model`; converted to the dtype in place.
        dtype: What the model computes in, and its cache has.
        num_prompts: Prompts of about 3,000 tokens each.

    Returns:
        Tensors (layers, 2, block_tokens, num_kv_heads, head_dim): keys, then values, as vLLM pages lie.
    """
    model.to(dtype)
    tokenizer, blocks = train_tokenizer(VOCAB_SIZE), []
    for number in range(num_prompts):
        tokens = torch.tensor([tokenizer.encode(system_prompt(number % len(ASSISTANTS))).ids])
        with torch.inference_mode():
            cache = model.model(tokens, use_cache=True).past_key_values
        layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
        whole = torch.stack(layers).transpose(2, 3).contiguous()  # layers, 2, tokens, heads, dim
        num_blocks = whole.shape[2] // BLOCK_TOKENS
        blocks += [whole[:, :, i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS].contiguous() for i in range(num_blocks)]
    return blocks


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def _train(model: Any, steps: int, seed: int) -> float:
    tokens, order = _corpus(), random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses: list[float] = []
    for step in range(steps):
        rate = PEAK_RATE * min(1.0, (step + 1) / 30) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = [order.randrange(len(tokens) - SEQUENCE_TOKENS) for _ in range(BATCH)]
        batch = torch.stack([tokens[start : start + SEQUENCE_TOKENS] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            print(f"training: step {step + 1} of {steps}, loss {sum(losses[-50:]) / 50:.2f}", flush=True)
    return sum(losses[-50:]) / len(losses[-50:])


def _corpus() -> torch.Tensor:
    """Python's manual and the sources of its standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:NUM_FILES]
    texts = [topics[name] for name in sorted(topics)] + [path.read_text(errors="replace") for path in sources]
    encoded = train_tokenizer(VOCAB_SIZE).encode_batch(texts)
    return torch.tensor([token for text in encoded for token in text.ids])
