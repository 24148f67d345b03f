import hashlib
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import vllm
from vllm.config.attention import AttentionConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec

from kvtier_connector.engine.namespace import namespace_fingerprint
from kvtier_connector.engine.namespace.namespace_fingerprint import engine_fingerprint, explain_difference
from kvtier_connector.engine.namespace.weights_field import weights_are_known, weights_field
from kvtier_connector.engine.weights import weights_fingerprint as weights_module
from kvtier_connector.engine.weights.weights_fingerprint import file_digest, fingerprint_files, weight_files
from kvtier_connector.settings import WeightsFingerprint
from tests.unit.connector.harness import full_spec, kv_cache_config_of, sliding_spec, vllm_config_of

SAMPLED, FULL = WeightsFingerprint.SAMPLED, WeightsFingerprint.FULL


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", {"a": bytes(100_000), "b": bytes(50)})
    (folder / "other.bin").write_bytes(b"x")
    return folder


@pytest.fixture
def config(model: Path) -> Any:
    made = vllm_config_of()
    made.model_config.model = str(model)
    return made


def fields_of(config: Any, weights: str = "{}", none_hash: bytes = b"seed", epoch: str = "") -> dict[str, str]:
    kv_cache_config = kv_cache_config_of([full_spec()])
    offloading = build_offloading_config(config, kv_cache_config)
    return engine_fingerprint(config, kv_cache_config, offloading, weights=weights, none_hash=none_hash, epoch=epoch)


def set_rope_theta(config: Any) -> None:
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"rope_theta": 5e5})


CHANGES: dict[str, Callable[[Any], object]] = {
    "hf_config": set_rope_theta,
    "dtype": lambda config: setattr(config.model_config, "dtype", "torch.float16"),
    "kv_cache_dtype": lambda config: setattr(config.cache_config, "cache_dtype", "fp8"),
    "quantization": lambda config: setattr(config.model_config, "quantization", "awq"),
    "kv_layout": lambda config: setattr(config.cache_config, "kv_cache_layout", "BLHNC"),
    "hash_algorithm": lambda config: setattr(config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
    "speculative": lambda config: setattr(
        config, "speculative_config", SimpleNamespace(method="ngram", model=None, num_speculative_tokens=2)
    ),
    "tokens": lambda config: config.kv_transfer_config.kv_connector_extra_config.update(blocks_per_chunk=2),
    "parallel": lambda config: setattr(config.parallel_config, "tensor_parallel_size", 2),
}


@pytest.mark.parametrize("field", CHANGES)
def test_whatever_changes_the_bytes_changes_its_field_and_no_other(config: Any, field: str) -> None:
    before = fields_of(config)
    CHANGES[field](config)
    after = fields_of(config)
    changed = {name for name in before if before[name] != after[name]}
    # kv_cache_dtype "auto" follows the model's dtype.
    assert changed - ({"kv_cache_dtype"} if field == "dtype" else set()) == {field}


def test_which_rank_has_which_tokens_counts(config: Any) -> None:
    """Ranks that share a sequence have other tokens in the same bytes when they take them in runs of another length."""
    config.parallel_config.tensor_parallel_size = config.parallel_config.decode_context_parallel_size = 2
    before = fields_of(config)
    config.parallel_config.cp_kv_cache_interleave_size = 4
    assert fields_of(config)["parallel"] != before["parallel"]


def test_which_layers_keep_the_models_own_dtype_counts(config: Any) -> None:
    """With another layer left out as many bytes are in another order."""
    config.cache_config.cache_dtype = "fp8"
    found = []
    for skipped in ([], ["3"], ["5"], ["5", "3"], ["3", "5"]):
        config.cache_config.kv_cache_dtype_skip_layers = skipped
        found.append(fields_of(config)["kv_cache_dtype"])
    assert len({*found}) == 4
    assert found[3] == found[4]


def test_which_layers_are_quantized_while_they_are_loaded_counts(config: Any) -> None:
    config.model_config.quantization = "fp8_per_block"
    found = []
    for ignored in (None, [], ["lm_head"]):
        config.model_config.quantization_config = None if ignored is None else QuantizationConfigArgs(ignore=ignored)
        found.append(fields_of(config)["quantization"])
    assert len({*found}) == 3
    assert found[0] == '"fp8_per_block"'


def test_what_is_made_of_images_counts(config: Any) -> None:
    """vLLM hashes an image and what its request says of it, and none of the options that it was started with."""
    plain = fields_of(config)
    found = []
    for options in (
        {"mm_processor_kwargs": {"size": {"shortest_edge": 336}, "do_normalize": True}},
        {"mm_processor_kwargs": {"do_normalize": False}},
        {"mm_encoder_attn_dtype": "fp8"},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
    ):
        config.model_config.multimodal_config = MultiModalConfig(**options)
        fields = fields_of(config)
        found.append(fields.pop("multimodal"))
        assert fields == plain, "and nothing else"
    assert len({*found}) == len(found)
    config.model_config.multimodal_config = MultiModalConfig(video_pruning_method="vidcom2", mm_processor_kwargs={})
    assert fields_of(config) == plain


def test_the_scales_of_an_image_encoder_count_by_their_content(config: Any, tmp_path: Path) -> None:
    """Images that were encoded with the scales of another file, or with none, were restored."""
    found, scales = [], tmp_path / "scales.json"
    for content in (None, "{}", '{"0": 1}'):
        options = {} if content is None else {"mm_encoder_fp8_scale_path": str(scales)}
        scales.write_text(content or "")
        config.model_config.multimodal_config = MultiModalConfig(mm_encoder_attn_dtype="fp8", **options)
        found.append(fields_of(config)["multimodal"])
    assert len({*found}) == 3


def test_attention_backends_by_kind_of_layer_count(config: Any) -> None:
    """They choose what is in a page, as the one for all layers does."""
    plain = fields_of(config)
    found = []
    for backend in (AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.FLASHINFER):
        config.attention_config = AttentionConfig(backend_per_kind={"sliding_window": backend})
        fields = fields_of(config)
        found.append(fields.pop("attention_by_kind"))
        assert fields == plain, "and nothing else"
    assert len({*found}) == 2


def test_on_rocm_the_environment_counts(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses kernels there, and one variable another order of the values within a page."""
    on_rocm = SimpleNamespace(
        is_cpu=lambda: False, is_rocm=lambda: True, device_type="cuda", get_device_capability=lambda: (9, 4)
    )
    monkeypatch.setattr("vllm.platforms.current_platform", on_rocm)
    before = fields_of(config)
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    after = fields_of(config)
    assert {name for name in after if after[name] != before.get(name)} == {"rocm"}


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_amx_counts(config: Any, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """vLLM packs KV for it in another way; torch says AVX512 of processors with it and without."""
    config.model_config.dtype = dtype
    found = []
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        found.append(fields_of(config))
    expected = {"cpu_isa"} if dtype == "torch.bfloat16" else set()
    assert {name for name in found[0] if found[0][name] != found[1][name]} == expected
    assert found[0]["cpu_isa"] == json.dumps(torch.backends.cpu.get_cpu_capability())


def test_how_adapters_are_applied_counts(config: Any) -> None:
    """The same adapter on other modules gives other KV."""
    found = []
    for options in (
        {},
        {"target_modules": ["o_proj"]},
        {"target_modules": ["q_proj", "o_proj"]},
        {"lora_dtype": "float32"},
    ):
        config.lora_config = SimpleNamespace(**{"target_modules": None, "lora_dtype": "auto"} | options)
        found.append(fields_of(config).get("lora"))
    assert found[0] is None
    assert len({*found}) == 4
    config.lora_config = SimpleNamespace(target_modules=None, lora_dtype=config.model_config.dtype)
    assert "lora" not in fields_of(config), "it is the model's own, once vLLM has looked"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", '{"bits": 4}'),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
        ("VLLM_BATCH_INVARIANT", "1"),
        ("VLLM_CPU_INT4_W4A8", "0"),
    ],
)
def test_variables_that_change_what_is_computed_count(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = fields_of(config)
    assert "numerics" not in before, "what was stored by earlier versions is found"
    monkeypatch.setenv(name, value)
    assert name in json.loads(fields_of(config)["numerics"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_BATCH_INVARIANT", "0"),
        ("VLLM_CPU_INT4_W4A8", "1"),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "highest"),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", ""),
        ("VLLM_B12X_MOE_FP4_FORCE_A16", "0"),
    ],
)
def test_a_variable_with_vllms_default_does_not_count(
    config: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert "numerics" not in fields_of(config)


def test_a_value_that_vllm_refuses_counts_as_it_is_written(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int3")
    assert json.loads(fields_of(config)["numerics"]) == {"VLLM_MARLIN_INPUT_DTYPE": "int3"}


def test_a_variable_that_names_a_file_counts_by_the_files_content(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = tmp_path / "humming.json"
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(options))
    found = []
    for text in ('{"bits": 4}', '{"bits": 8}'):
        options.write_text(text)
        found.append(fields_of(config)["numerics"])
    assert found[0] != found[1]


def test_kernels_that_quantize_count(config: Any) -> None:
    config.kernel_config = SimpleNamespace(moe_backend="auto", linear_backend="auto", linear_backend_per_quant=None)
    assert "numerics" not in fields_of(config)
    config.kernel_config.moe_backend = "flashinfer_moe_ep_cutedsl"
    assert json.loads(fields_of(config)["numerics"]) == {"moe_backend": "flashinfer_moe_ep_cutedsl"}


def test_another_class_for_the_model_counts(config: Any) -> None:
    config.model_config.model_class_overrides = {}
    assert "model_class" not in fields_of(config)
    config.model_config.model_class_overrides = {"LlamaForCausalLM": "mine:Llama"}
    assert json.loads(fields_of(config)["model_class"]) == {"LlamaForCausalLM": "mine:Llama"}


def test_what_decides_how_kernels_divide_blocks_counts(config: Any) -> None:
    found = [fields_of(config).get("kernels")]
    config.attention_config = AttentionConfig(use_trtllm_attention=False)
    found.append(fields_of(config).get("kernels"))
    config.attention_config = AttentionConfig(flash_attn_version=3)
    found.append(fields_of(config).get("kernels"))
    config.speculative_config = SimpleNamespace(
        method="eagle", model="draft", num_speculative_tokens=2, attention_backend=AttentionBackendEnum.FLASH_ATTN
    )
    found.append(fields_of(config).get("kernels"))
    assert found[0] is None
    assert len({*found}) == 4


def test_the_models_that_are_loaded_into_parts_of_this_one_count(config: Any, tmp_path: Path) -> None:
    language = tmp_path / "language"
    language.mkdir()
    write_safetensors(language / "model.safetensors", {"a": bytes(100)})
    alone = json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))
    assert "parts" not in alone
    config.model_config.hf_config.text_model_id, config.model_config.hf_config.audio_model_id = str(language), None
    before = json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))["parts"]
    write_safetensors(language / "model.safetensors", {"a": b"\1" * 100})
    assert json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))["parts"] != before
    config.model_config.hf_config.text_model_id = "someone/gone"
    assert "unreadable" in json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))["parts"]["text_model_id"]


def test_the_length_that_the_model_was_built_with_counts(config: Any, tmp_path: Path) -> None:
    """`--max-model-len auto`: vLLM shortens it behind that to what the KV cache has blocks for."""
    model = config.model_config
    rope = {"rope_parameters": LONG | ORIGINAL}
    model.hf_text_config = SimpleNamespace(model_type="llama4_text", to_dict=lambda: rope)
    model.override_generation_config, model.try_get_generation_config = {}, dict
    model.max_model_len, model.original_max_model_len = 2048, -1
    model.get_and_verify_max_len = lambda asked: {-1: 131_072}[asked]
    assert json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))["temperature_tuning"]
    assert fields_of(config)["long_rope"] == "true"
    model.original_max_model_len = 2048
    assert not json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))["temperature_tuning"]
    assert fields_of(config)["long_rope"] == "false"


def test_what_decides_on_llama_4s_tuning_counts(config: Any, tmp_path: Path) -> None:
    """Of its configuration the scheduler's process sees what the file says."""
    model = config.model_config
    assert "temperature_tuning" not in weights_field(config, SAMPLED, tmp_path / "cache.json")
    model.hf_text_config = SimpleNamespace(model_type="llama4_text", to_dict=dict)
    found = []
    for max_model_len, generation, override in (
        (131_072, {}, {}),
        (32_768, {}, {}),
        (131_072, {"attn_temperature_tuning": False}, {}),
        (32_768, {"attn_temperature_tuning": False}, {"attn_temperature_tuning": True}),
    ):
        model.max_model_len, model.override_generation_config = max_model_len, override
        model.try_get_generation_config = lambda generation=generation: dict(generation)
        found.append(json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))["temperature_tuning"])
    assert found == [True, False, False, True]


@pytest.mark.parametrize("name", ["preprocessor_config.json", "video_preprocessor_config.json"])
def test_the_files_of_an_image_processor_count(config: Any, model: Path, tmp_path: Path, name: str) -> None:
    """vLLM's block hash has the image as it came, and these files say what becomes of it."""

    def field() -> str:
        return weights_field(config, SAMPLED, tmp_path / "cache.json")

    text_only = field()
    (model / name).write_text('{"image_mean": [0.5]}')
    assert field() == text_only
    config.model_config.multimodal_config = MultiModalConfig()
    before = field()
    (model / name).write_text('{"image_mean": [0.4]}')
    assert len({before, field(), text_only}) == 3


def test_weights_that_are_loaded_from_elsewhere_are_not_those_of_the_folder(
    config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for uri, key in (("s3://b/v1", "k1"), ("s3://b/v2", "k1"), ("s3://b/v1", "k2")):
        inner = {"tensorizer_uri": uri, "s3_secret_access_key": key}
        for extra in (inner, {"tensorizer_config": inner}, {"tensorizer_config": SimpleNamespace(**inner)}):
            config.load_config = SimpleNamespace(load_format="tensorizer", model_loader_extra_config=extra)
            found.append(weights_field(config, SAMPLED, tmp_path / "cache.json"))
    assert found[0] == found[1] == found[2] == found[6] != found[3]
    assert all("unreadable" in each and '"files"' not in each and "s3" not in each for each in found)
    assert "would not be noticed" in caplog.text


def test_how_fast_weights_are_loaded_does_not_count(config: Any, tmp_path: Path) -> None:
    before = weights_field(config, SAMPLED, tmp_path / "cache.json")
    config.load_config.model_loader_extra_config = {"enable_multithread_load": True, "num_threads": 8}
    assert weights_field(config, SAMPLED, tmp_path / "cache.json") == before


def test_seed_and_epoch_are_fields(config: Any) -> None:
    before = fields_of(config)
    assert fields_of(config, none_hash=b"other")["hash_seed"] != before["hash_seed"]
    assert fields_of(config, epoch="e:1")["epoch"] == '"e:1"'
    assert all(json.loads(value) is not ... for value in before.values()), "every value is JSON"


def test_the_path_as_typed_does_not_count(config: Any) -> None:
    before = fields_of(config)
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4, "_name_or_path": "elsewhere"})
    assert fields_of(config) == before


@pytest.mark.parametrize("mode", [SAMPLED, FULL])
def test_weights_changed_under_the_same_path_and_size(
    config: Any, model: Path, tmp_path: Path, mode: WeightsFingerprint
) -> None:
    before = weights_field(config, mode, tmp_path / "cache.json")
    assert weights_field(config, mode, tmp_path / "cache.json") == before
    write_safetensors(model / "model.safetensors", {"a": bytes(100_000), "b": b"\1" * 50})
    assert weights_field(config, mode, tmp_path / "cache.json") != before


def test_the_order_within_a_recurrent_state_counts() -> None:
    """`VLLM_SSM_CONV_STATE_LAYOUT` transposes it: as many bytes of the same type, and a wrong state was loaded."""

    def groups(*shape: int) -> list[dict[str, object]]:
        spec = MambaSpec(block_size=16, shapes=(shape,), dtypes=(torch.float16,))
        config: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        group = SimpleNamespace(tokens_per_block=16, layer_names=("a",), group_id=0, group_idx=0)
        return namespace_fingerprint._groups(config, cast(Any, SimpleNamespace(groups=[group])))

    assert groups(3, 8) == groups(3, 8)
    (one,), (other,) = groups(3, 8), groups(8, 3)
    assert {name for name in one if one[name] != other[name]} == {"shapes"}


def test_another_draft_model_under_the_same_path(config: Any, model: Path, tmp_path: Path) -> None:
    """Its KV is stored beside the model's: an EAGLE head that was trained again accepted little of pinned prompts."""
    alone = json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))
    draft = tmp_path / "draft"
    draft.mkdir()
    write_safetensors(draft / "model.safetensors", {"a": b"1" * 50})
    config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(draft), revision=None))
    before = json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))
    assert {name: value for name, value in before.items() if name != "draft"} == alone
    write_safetensors(draft / "model.safetensors", {"a": b"2" * 50})
    assert json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))["draft"] != before["draft"]
    config.speculative_config.draft_model_config.model = config.model_config.model  # MTP: of the model itself
    assert json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json")) == alone


def test_every_tensor_is_sampled_at_both_ends_and_full_reads_all(model: Path, tmp_path: Path) -> None:
    def digest(mode: WeightsFingerprint, data: bytes) -> object:
        write_safetensors(model / "model.safetensors", {"a": data, "b": bytes(50)})
        return fingerprint_files(weight_files(model), mode, tmp_path / "none.json")[0]["digest"]

    plain = bytes(100_000)
    last = plain[:-1] + b"\1"
    between = plain[:30_000] + b"\1" + plain[30_001:]
    assert digest(SAMPLED, last) != digest(SAMPLED, plain)
    assert digest(SAMPLED, between) == digest(SAMPLED, plain)
    assert digest(FULL, between) != digest(FULL, plain)


@pytest.mark.parametrize(
    ("num_bytes", "num_samples"), [(16384, 4), (16385, 4), (100_000, 2), (100_001, 7), (5, 3), (0, 3)]
)
def test_samples_are_spread_evenly_over_the_whole(num_bytes: int, num_samples: int) -> None:
    """None is wasted on what lies behind the end, where the next tensor begins."""
    samples = list(weights_module._spread(1000, 1000 + num_bytes, num_samples))
    if num_bytes <= num_samples * weights_module._SAMPLE_BYTES:
        assert samples == [(1000, num_bytes)]
        return
    begins = [begin for begin, _ in samples]
    assert {length for _, length in samples} == {weights_module._SAMPLE_BYTES}
    assert (begins[0], begins[-1] + samples[-1][1], len(samples)) == (1000, 1000 + num_bytes, num_samples)
    gaps = [after - before for before, after in itertools.pairwise(begins)]
    assert max(gaps) - min(gaps) <= 1


def test_unchanged_files_are_not_read_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "MIN_AGE_NS", 0)
    cache_path = tmp_path / "cache" / "fingerprints.json"
    first = fingerprint_files(weight_files(model), FULL, cache_path)
    monkeypatch.setattr(
        "kvtier_connector.engine.weights.weights_fingerprint.file_digest", lambda *_: pytest.fail("read again")
    )
    assert fingerprint_files(weight_files(model), FULL, cache_path) == first


@pytest.mark.parametrize("mode", [SAMPLED, FULL])
def test_a_change_within_a_tick_of_the_clock_shows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: WeightsFingerprint
) -> None:
    """Weights were replaced just before they were read, and again after it, on a file system with coarse times."""
    path, cache_path = model / "model.safetensors", tmp_path / "fingerprints.json"
    monkeypatch.setattr(weights_module, "_identity", lambda path, stat, mode: str(path))
    before = fingerprint_files([path], mode, cache_path)
    write_safetensors(path, {"a": bytes(100_000), "b": b"\1" * 50})
    assert fingerprint_files([path], mode, cache_path) != before


def test_what_changes_while_it_is_read_is_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "MIN_AGE_NS", 0)
    path, cache_path, read = model / "model.safetensors", tmp_path / "fingerprints.json", weights_module.file_digest

    def replaced_meanwhile(path: Path, mode: WeightsFingerprint) -> str:
        digest = read(path, mode)
        path.write_bytes(path.read_bytes() + b"x")
        return digest

    monkeypatch.setattr(weights_module, "file_digest", replaced_meanwhile)
    fingerprint_files([path], FULL, cache_path)
    assert not cache_path.exists()


def test_a_damaged_cache_is_ignored(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    for damage in ("{", "[1]", '{"a": 1}'):
        path.write_text(damage)
        assert fingerprint_files(weight_files(model), SAMPLED, path)


def test_dummy_weights_are_their_seed(config: Any) -> None:
    config.load_config.load_format = "dummy"
    assert json.loads(weights_field(config, SAMPLED)) == {"load_format": "dummy", "seed": 0}


@pytest.mark.parametrize(
    ("load_format", "is_known"), [("auto", True), ("dummy", True), ("tensorizer", True), ("ipc_cache", False)]
)
def test_weights_of_another_process_are_not_known(config: Any, load_format: str, is_known: bool) -> None:
    config.load_config.load_format = load_format
    assert weights_are_known(config) == is_known


def test_missing_files_are_said(
    config: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config.model_config.model = str(tmp_path / "none")
    assert "unreadable" in json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))
    assert "would not be noticed" in caplog.text


def test_safetensors_win_over_other_formats(model: Path) -> None:
    assert [path.name for path in weight_files(model)] == ["model.safetensors"]
    assert weight_files(model / "other.bin") == [model / "other.bin"]


@pytest.mark.parametrize("load_format", ["pt", "npcache"])
def test_the_files_that_vllm_loads_are_fingerprinted(
    config: Any, model: Path, tmp_path: Path, load_format: str
) -> None:
    """Both formats lie in the folder; this load format ignores safetensors."""
    config.load_config.load_format = load_format
    before = weights_field(config, SAMPLED, tmp_path / "cache.json")
    (model / "other.bin").write_bytes(b"y")
    assert weights_field(config, SAMPLED, tmp_path / "cache.json") != before


def test_weights_are_looked_for_where_vllm_downloads_them(
    config: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options["cache_dir"]))
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    config.model_config.model = "someone/model-elsewhere"
    config.load_config.download_dir = "/downloads"
    assert "files" in json.loads(weights_field(config, SAMPLED, tmp_path / "cache.json"))
    assert asked == [("someone/model-elsewhere", "/downloads")]


LONG, ORIGINAL = {"rope_type": "longrope"}, {"original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("hf_config", "counts"),
    [
        ({"rope_parameters": LONG | ORIGINAL}, True),
        ({"rope_scaling": {"type": "longrope"}} | ORIGINAL, True),
        ({"rope_parameters": {"full_attention": LONG | ORIGINAL, "sliding_attention": {}}}, True),
        ({"rope_parameters": {"rope_type": "llama3"} | ORIGINAL}, False),
        ({"rope_scaling": None} | ORIGINAL, False),
        ({"rope_parameters": LONG}, False),
        ({"rope_parameters": {}, "rope_scaling": LONG | ORIGINAL}, True),
        ({"rope_parameters": {"full_attention": LONG, "sliding_attention": {}, "factor": 2.0}} | ORIGINAL, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}} | ORIGINAL, False),
        ({}, False),
    ],
)
def test_max_model_len_counts_where_it_changes_the_rope(config: Any, hf_config: dict[str, Any], counts: bool) -> None:
    """Phi-3's LongRoPE takes the long factors for all positions when max_model_len exceeds the original context."""
    config.model_config.hf_text_config = SimpleNamespace(to_dict=lambda: hf_config)
    config.model_config.max_model_len = 2048
    short = fields_of(config)
    config.model_config.max_model_len = 4096
    assert fields_of(config) == short
    config.model_config.max_model_len = 4097
    changed = fields_of(config)
    assert {name for name in short if short[name] != changed[name]} == ({"long_rope"} if counts else set())
    assert (short["long_rope"], changed["long_rope"]) == ("false", "true" if counts else "false")


def test_the_dtypes_of_recurrent_state_count(config: Any) -> None:
    """They are set apart from the model's, and two of one size make pages of one size."""

    def fields(dtype: torch.dtype) -> dict[str, str]:
        spec = MambaSpec(block_size=4, shapes=((16,),), dtypes=(dtype,))
        kv_cache_config = kv_cache_config_of([spec])
        offloading = build_offloading_config(config, kv_cache_config)
        return engine_fingerprint(config, kv_cache_config, offloading, weights="{}", none_hash=b"seed")

    assert fields(torch.float16)["groups"] != fields(torch.bfloat16)["groups"]


def test_a_group_is_described_by_what_decides_its_bytes(config: Any) -> None:
    """A later version of kvtier writes the same, or what was stored before would be lost."""
    kv_cache_config = kv_cache_config_of([full_spec(), sliding_spec(8)])
    offloading = build_offloading_config(config, kv_cache_config)
    found = engine_fingerprint(config, kv_cache_config, offloading, weights="{}", none_hash=b"seed")
    full = {"dtypes": [], "group": 0, "layers": ["layer0"], "page_bytes": 256, "tokens_per_block": 4, "window": None}
    window = full | {"group": 1, "layers": ["layer1"], "window": 8}
    assert json.loads(found["groups"]) == [
        full | {"spec": "FullAttentionSpec"},
        window | {"spec": "SlidingWindowSpec"},
    ]
    spec = full_spec()
    chunked = ChunkedLocalAttentionSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        attention_chunk_size=12,
    )
    kv_cache_config = kv_cache_config_of([chunked])
    offloading = build_offloading_config(config, kv_cache_config)
    found = engine_fingerprint(config, kv_cache_config, offloading, weights="{}", none_hash=b"seed")
    assert json.loads(found["groups"])[0]["window"] == 12


def test_fields_are_as_earlier_versions_wrote_them(config: Any) -> None:
    """All that was stored is found by them only."""
    config.speculative_config = SimpleNamespace(method="ngram", model="draft", num_speculative_tokens=2)
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"b": 1, "a": {3, 12}, "_commit_hash": "x"})
    found = fields_of(config, weights='{"x": 1}', epoch="e:1")
    known = {
        "weights": '{"x":1}',
        "hf_config": '{"a":[12,3],"b":1}',
        "long_rope": "false",
        "dtype": '"torch.bfloat16"',
        "tokens": '{"blocks_per_chunk":1,"hash":4}',
        "parallel": '{"dcp":1,"pcp":1,"pp":1,"tp":1,"world":1}',
        "hash_seed": f'"{hashlib.sha256(b"seed").hexdigest()}"',
        "vllm_version": f'"{vllm.__version__.rsplit(".", 1)[0]}"',
        "speculative": '{"method":"ngram","model":"draft","tokens":2}',
        "layout_version": "1",
        "epoch": '"e:1"',
    }
    assert {name: found[name] for name in known} == known


def noise(num_bytes: int) -> bytes:
    return hashlib.shake_128(b"kvtier").digest(num_bytes)


def test_digests_of_weights_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """Another one for the same file would lose what was stored for the model."""
    tensors, other = tmp_path / "m.safetensors", tmp_path / "m.bin"
    write_safetensors(tensors, {"a": noise(100_000), "b": noise(50)})
    other.write_bytes(noise(3_000_000))
    found = [file_digest(path, mode) for path in (tensors, other) for mode in (SAMPLED, FULL)]
    assert found == [
        "1bc61337ecaccce370f625ca5a20f7d83111f5e388ff90c3c26ef420716fcdf7",
        "3fb5d59539233c764a0f9b3bc393fb877fbdde20551fd0900338aef12ea55315",
        "c40b22b85752b2c7db1ddaabf68342c9c2d168a1c7f3a676de11364b3e4caeae",
        "773e0905bb699c28f420a8ec1a39148ae905559ad3db8754680069e0a12399a9",
    ]


def test_the_metadata_of_safetensors_are_no_tensor(tmp_path: Path) -> None:
    tensors = tmp_path / "m.safetensors"
    header = json.dumps({"__metadata__": {"format": "pt"}, "a": {"data_offsets": [0, 50_000]}}).encode()
    tensors.write_bytes(struct.pack("<Q", len(header)) + header + bytes(50_000))
    plain = file_digest(tensors, SAMPLED)
    tensors.write_bytes(struct.pack("<Q", len(header)) + header + bytes(10_000) + b"x" + bytes(39_999))
    assert file_digest(tensors, SAMPLED) == plain, "between the samples of a tensor"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"1234567", id="no length"),
        pytest.param(struct.pack("<Q", 1000) + b"{}", id="header longer than the file"),
        pytest.param(struct.pack("<Q", 2) + b"{]" + bytes(9), id="no JSON"),
        pytest.param(struct.pack("<Q", 2) + b"[]" + bytes(9), id="no object"),
        pytest.param(struct.pack("<Q", 8) + b'{"a":{}}' + bytes(9), id="no offsets"),
        pytest.param(struct.pack("<Q", 7) + b'{"a":1}' + bytes(9), id="no tensor"),
        pytest.param(struct.pack("<Q", 2**40) + noise(2_000_000), id="noise"),
    ],
)
def test_a_file_that_is_none_of_safetensors_is_sampled_as_any_other(tmp_path: Path, content: bytes) -> None:
    for name in ("m.safetensors", "m.bin"):
        (tmp_path / name).write_bytes(content)
    assert file_digest(tmp_path / "m.safetensors", SAMPLED) == file_digest(tmp_path / "m.bin", SAMPLED)


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert weight_files(tmp_path) == weight_files(tmp_path, "pt") == []


def test_differences_of_which_nothing_is_known_are_said_as_such() -> None:
    assert explain_difference("0" * 20, [], 1).endswith("different are: unknown fields")
    assert explain_difference("0" * 20, ["groups"], 1).endswith("different are: groups")
    assert f"namespace {'0' * 12} of" in explain_difference("0" * 20, [], 1)


def test_differences_are_explained_with_a_remedy() -> None:
    text = explain_difference("0123456789abcdef", ["hash_seed", "weights"], 3)
    assert "holds 3 prompts" in text
    assert "different are: hash_seed, weights" in text
    assert "PYTHONHASHSEED" in text
