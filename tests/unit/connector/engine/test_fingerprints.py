import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import MambaSpec

from kvtier_connector.engine import weights_fingerprint as weights_module
from kvtier_connector.engine.namespace_fingerprint import engine_fingerprint, explain_difference, weights_field
from kvtier_connector.engine.weights_fingerprint import fingerprint_files, weight_files
from kvtier_connector.settings import WeightsFingerprint
from tests.unit.connector.harness import full_spec, kv_cache_config_of, vllm_config_of

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
    monkeypatch.setattr("kvtier_connector.engine.weights_fingerprint.file_digest", lambda *_: pytest.fail("read again"))
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


def test_missing_files_are_said(config: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
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


def test_the_dtypes_of_recurrent_state_count(config: Any) -> None:
    """They are set apart from the model's, and two of one size make pages of one size."""

    def fields(dtype: torch.dtype) -> dict[str, str]:
        spec = MambaSpec(block_size=4, shapes=((16,),), dtypes=(dtype,))
        kv_cache_config = kv_cache_config_of([spec])
        offloading = build_offloading_config(config, kv_cache_config)
        return engine_fingerprint(config, kv_cache_config, offloading, weights="{}", none_hash=b"seed")

    assert fields(torch.float16)["groups"] != fields(torch.bfloat16)["groups"]


def test_differences_are_explained_with_a_remedy() -> None:
    text = explain_difference("0123456789abcdef", ["hash_seed", "weights"], 3)
    assert "holds 3 prompts" in text
    assert "different are: hash_seed, weights" in text
    assert "PYTHONHASHSEED" in text
