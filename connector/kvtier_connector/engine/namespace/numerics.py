"""What computes KV to other values than the model's files and configuration say: chosen by options and environment."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_TEST_FORCE_FP8_MARLIN",
)
"""Of vLLM 0.26 to 0.33 (`vllm/envs.py`): they quantize weights or activations, route tokens to other experts, or are
for answers equal to the last bit. Others choose between kernels whose results differ by rounding."""
_DEFAULTS = {"VLLM_CPU_INT4_W4A8": True, "VLLM_FLOAT32_MATMUL_PRECISION": "highest"}
"""Of the others what is false or empty is vLLM's default."""
_BACKENDS = ("moe_backend", "linear_backend", "linear_backend_per_quant")
"""Some quantize activations, or the weights once more. Source: `vllm/config/kernel.py` of vLLM 0.32."""


def numerics(vllm_config: "VllmConfig") -> dict[str, object]:
    """Return the fields of what was chosen; none by default, so that what was stored before is found."""
    return _options(vllm_config) | _kernel_blocks(vllm_config)


def _options(vllm_config: "VllmConfig") -> dict[str, object]:
    import vllm.envs

    chosen = {name: _value(vllm.envs, name) for name in _VARIABLES if name in os.environ}
    chosen = {name: value for name, value in chosen.items() if _is_chosen(name, value)}
    kernels = getattr(vllm_config, "kernel_config", None)
    chosen |= {name: value for name in _BACKENDS if (value := getattr(kernels, name, None)) not in (None, "auto")}
    overrides = getattr(vllm_config.model_config, "model_class_overrides", None)
    return ({"numerics": chosen} if chosen else {}) | ({"model_class": overrides} if overrides else {})


def _is_chosen(name: str, value: object) -> bool:
    if name not in _DEFAULTS:
        return bool(value)
    return value is not None and value != _DEFAULTS[name]


def _value(envs: Any, name: str) -> object:
    """Return what vLLM reads of a variable: the value of some is the name of a file."""
    try:
        return getattr(envs, name, None)  # None: this version has no such variable
    except Exception:  # a value that vLLM refuses, where it uses the variable
        return os.environ[name]


def _kernel_blocks(vllm_config: "VllmConfig") -> dict[str, object]:
    """Return the field of what decides whether kernels split a block of the KV cache.

    Each part of a split block has all heads: in layouts with heads before tokens, bytes lie in another order. Source:
    `select_common_block_size` in `v1/worker/utils.py` of vLLM 0.32.
    """
    attention: Any = vllm_config.attention_config
    draft = getattr(vllm_config, "speculative_config", None)
    chosen = {
        "trtllm": getattr(attention, "use_trtllm_attention", None),
        "flash_attn": getattr(attention, "flash_attn_version", None),
        "draft": getattr(draft, "attention_backend", None),
    }
    given = {name: str(value) for name, value in chosen.items() if value is not None}
    return {"kernels": given} if given else {}
