"""Model families: what each one's config.json says, and its seeded weights under the names that vLLM loads."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.harness.model_specs import ModelSpec
from benchmarks.harness.tokenizer import SPECIAL_TOKENS

# Gains over 1/sqrt(fan-in), so that attention is sharp, activations stay bounded and logits are several nats apart.
QUERY_KEY_GAIN = 1.7
ATTENTION_OUT_GAIN = 2.0
LOGITS_GAIN = 3.0

NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2
CONV_TAPS = 3
# vLLM's kernels for MLA on CPUs know these sizes only.
LATENT_DIM, NOPE_DIM, ROPE_DIM, VALUE_DIM = 512, 128, 64, 128

Config = dict[str, object]
Weights = dict[str, torch.Tensor]
MakeWeight = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Family:
    """How to make one family's models.

    Attributes:
        config: What config.json has beside `common_config`.
        weights: All tensors by name; takes the spec and a maker of random matrices (rows, cols, gain).
    """

    config: Callable[[ModelSpec], Config]
    weights: Callable[[ModelSpec, MakeWeight], Weights]


def common_config(spec: ModelSpec) -> Config:
    """Return what the config.json of every family says."""
    return {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
        "bos_token_id": SPECIAL_TOKENS.index("<|begin|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
        "torch_dtype": "bfloat16",
    }


def weight_maker(seed: int) -> MakeWeight:
    """Return a maker of random matrices that gives the same sequence for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, cols: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator).mul_(gain / cols**0.5).bfloat16()

    return weight


def _llama_config(spec: ModelSpec) -> Config:
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}


def _mistral_config(spec: ModelSpec) -> Config:
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "sliding_window": spec.sliding_window,
    }


def _mixtral_config(spec: ModelSpec) -> Config:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "sliding_window": None,
    }


def _gemma3_config(spec: ModelSpec) -> Config:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": spec.head_dim,
        "sliding_window": spec.sliding_window,
        "layer_types": _layer_types(spec, "sliding_attention"),
        "rope_local_base_freq": 10_000.0,
    }


def _lfm2_config(spec: ModelSpec) -> Config:
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": _layer_types(spec, "conv"),
        "conv_L_cache": CONV_TAPS,
        "conv_dim": spec.hidden,
        "block_dim": spec.hidden,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
    }


def _deepseek_config(spec: ModelSpec) -> Config:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "num_key_value_heads": spec.num_heads,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT_DIM,
        "qk_nope_head_dim": NOPE_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "v_head_dim": VALUE_DIM,
        "n_routed_experts": NUM_EXPERTS,
        "first_k_dense_replace": spec.num_layers,
    }


def _layer_types(spec: ModelSpec, other: str) -> list[str]:
    is_full = [(layer + 1) % spec.full_every == 0 for layer in range(spec.num_layers)]
    return ["full_attention" if full else other for full in is_full]


def _attention(spec: ModelSpec, weight: MakeWeight, prefix: str, out: str = "o_proj") -> Weights:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        f"{prefix}.self_attn.q_proj.weight": weight(q_rows, spec.hidden, QUERY_KEY_GAIN),
        f"{prefix}.self_attn.k_proj.weight": weight(kv_rows, spec.hidden, QUERY_KEY_GAIN),
        f"{prefix}.self_attn.v_proj.weight": weight(kv_rows, spec.hidden),
        f"{prefix}.self_attn.{out}.weight": weight(spec.hidden, q_rows, ATTENTION_OUT_GAIN),
    }


def _mlp(
    spec: ModelSpec,
    weight: MakeWeight,
    prefix: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Weights:
    gate, up, down = names
    return {
        f"{prefix}.{gate}.weight": weight(spec.intermediate, spec.hidden),
        f"{prefix}.{up}.weight": weight(spec.intermediate, spec.hidden),
        f"{prefix}.{down}.weight": weight(spec.hidden, spec.intermediate),
    }


def _outside_layers(spec: ModelSpec, weight: MakeWeight) -> Weights:
    return {
        "model.embed_tokens.weight": weight(spec.vocab_size, spec.hidden, spec.hidden**0.5),
        "model.norm.weight": _ones(spec.hidden),
        "lm_head.weight": weight(spec.vocab_size, spec.hidden, LOGITS_GAIN),
    }


def _ones(length: int) -> torch.Tensor:
    return torch.ones(length).bfloat16()


def _layer_norms(spec: ModelSpec, prefix: str) -> Weights:
    return {f"{prefix}.{norm}.weight": _ones(spec.hidden) for norm in ("input_layernorm", "post_attention_layernorm")}


def _llama_weights(spec: ModelSpec, weight: MakeWeight) -> Weights:
    weights = _outside_layers(spec, weight)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= _attention(spec, weight, prefix) | _mlp(spec, weight, f"{prefix}.mlp") | _layer_norms(spec, prefix)
    return weights


def _mixtral_weights(spec: ModelSpec, weight: MakeWeight) -> Weights:
    weights = _outside_layers(spec, weight)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= _attention(spec, weight, prefix) | _layer_norms(spec, prefix)
        weights[f"{prefix}.block_sparse_moe.gate.weight"] = weight(NUM_EXPERTS, spec.hidden)
        for expert in range(NUM_EXPERTS):
            weights |= _mlp(spec, weight, f"{prefix}.block_sparse_moe.experts.{expert}", ("w1", "w3", "w2"))
    return weights


def _gemma3_weights(spec: ModelSpec, weight: MakeWeight) -> Weights:
    # Gemma's norms scale by 1 + weight, and it multiplies embeddings by sqrt(hidden).
    zeros = torch.zeros(spec.hidden).bfloat16()
    weights = {
        "model.embed_tokens.weight": weight(spec.vocab_size, spec.hidden),
        "model.norm.weight": zeros.clone(),
        "lm_head.weight": weight(spec.vocab_size, spec.hidden, LOGITS_GAIN),
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= _attention(spec, weight, prefix) | _mlp(spec, weight, f"{prefix}.mlp")
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"{prefix}.{norm}_layernorm.weight"] = zeros.clone()
        # Queries and keys are normed per head, so the sharpness has to come from those norms.
        for norm in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{norm}.weight"] = torch.full((spec.head_dim,), QUERY_KEY_GAIN - 1).bfloat16()
    return weights


def _lfm2_weights(spec: ModelSpec, weight: MakeWeight) -> Weights:
    # One matrix embeds tokens and gives the logits.
    weights = {
        "model.embed_tokens.weight": weight(spec.vocab_size, spec.hidden, LOGITS_GAIN),
        "model.embedding_norm.weight": _ones(spec.hidden),
    }
    for layer, kind in enumerate(_layer_types(spec, "conv")):
        prefix = f"model.layers.{layer}"
        if kind == "conv":
            weights |= {
                f"{prefix}.conv.in_proj.weight": weight(3 * spec.hidden, spec.hidden),
                f"{prefix}.conv.conv.weight": weight(spec.hidden, CONV_TAPS).unsqueeze(1),
                f"{prefix}.conv.out_proj.weight": weight(spec.hidden, spec.hidden, ATTENTION_OUT_GAIN),
            }
        else:
            weights |= _attention(spec, weight, prefix, "out_proj")
            for norm in ("q_layernorm", "k_layernorm"):
                weights[f"{prefix}.self_attn.{norm}.weight"] = _ones(spec.head_dim) * QUERY_KEY_GAIN
        weights |= _mlp(spec, weight, f"{prefix}.feed_forward", ("w1", "w3", "w2"))
        for norm in ("operator_norm", "ffn_norm"):
            weights[f"{prefix}.{norm}.weight"] = _ones(spec.hidden)
    return weights


def _deepseek_weights(spec: ModelSpec, weight: MakeWeight) -> Weights:
    weights = _outside_layers(spec, weight)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        weights |= {
            f"{attention}.q_proj.weight": weight(spec.num_heads * (NOPE_DIM + ROPE_DIM), spec.hidden, QUERY_KEY_GAIN),
            f"{attention}.kv_a_proj_with_mqa.weight": weight(LATENT_DIM + ROPE_DIM, spec.hidden, QUERY_KEY_GAIN),
            f"{attention}.kv_a_layernorm.weight": _ones(LATENT_DIM),
            f"{attention}.kv_b_proj.weight": weight(spec.num_heads * (NOPE_DIM + VALUE_DIM), LATENT_DIM),
            f"{attention}.o_proj.weight": weight(spec.hidden, spec.num_heads * VALUE_DIM, ATTENTION_OUT_GAIN),
        }
        weights |= _mlp(spec, weight, f"{prefix}.mlp") | _layer_norms(spec, prefix)
    return weights


FAMILIES = {
    "llama": Family(_llama_config, _llama_weights),
    "mistral": Family(_mistral_config, _llama_weights),
    "mixtral": Family(_mixtral_config, _mixtral_weights),
    "gemma3": Family(_gemma3_config, _gemma3_weights),
    "lfm2": Family(_lfm2_config, _lfm2_weights),
    "deepseek": Family(_deepseek_config, _deepseek_weights),
}
