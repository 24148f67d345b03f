import tomllib
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

import kvtier_connector
from kvtier.errors import ConfigError
from kvtier_connector import plugin
from kvtier_connector.connector import KVTierConnector
from kvtier_connector.settings import WeightsFingerprint, check_vllm_config, name_our_spec, parse_settings
from kvtier_connector.supported import VLLM_SERIES
from tests.unit.connector.harness import full_spec, kv_cache_config_of, vllm_config_of


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_SOCKET", "/run/x.sock")
    settings = parse_settings({})
    assert settings.socket == Path("/run/x.sock")
    assert (settings.blocks_per_chunk, settings.lookup_timeout_s) == (1, 0.25)
    assert settings.prefill_tokens_per_s is None
    assert settings.weights_fingerprint is WeightsFingerprint.SAMPLED


def test_the_package_asks_for_the_vllm_that_the_connector_says_it_supports() -> None:
    major, minor = map(int, VLLM_SERIES.split("."))
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={VLLM_SERIES},<{major}.{minor + 1}"]
    assert vllm.__version__.startswith(f"{VLLM_SERIES}.")


def test_our_own_spec_name_is_accepted_so_that_parsing_is_idempotent() -> None:
    extra: dict[str, Any] = {"socket": "/s"}
    name_our_spec(extra)
    assert parse_settings(extra).socket == Path("/s")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cpu_bytes_to_use", 1, r"cpu_bytes_to_use = 1: unknown key; allowed are blocks_per_chunk, lookup_timeout_ms"),
        ("blocks_per_chunk", 0, "blocks_per_chunk = 0: must be a positive whole number"),
        ("blocks_per_chunk", True, "must be a positive whole number"),
        ("lookup_timeout_ms", "250", "lookup_timeout_ms = '250': must be a positive whole number"),
        ("prefill_tokens_per_s", 0, "prefill_tokens_per_s = 0: must be a positive whole number"),
        ("weights_fingerprint", "none", "must be 'sampled' or 'full'"),
        ("socket", "", "must be the path of the daemon's unix socket"),
        ("spec_name", "CPUOffloadingSpec", "set by kvtier itself; remove it"),
    ],
)
def test_bad_settings_name_key_value_and_remedy(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config: .*" + message):
        parse_settings({key: value})


def test_prefix_caching_off_is_refused() -> None:
    config = vllm_config_of()
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigError, match="start vLLM with --enable-prefix-caching"):
        check_vllm_config(config)


def test_hashes_that_differ_at_every_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config_of()
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=r"--prefix-caching-hash-algo sha256, or set PYTHONHASHSEED"):
        check_vllm_config(config)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    check_vllm_config(config)


def test_load_failure_policy_fail_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config_of()
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    check_vllm_config(config)
    assert '"kv_load_failure_policy": "recompute"' in caplog.text


def test_the_connector_refuses_at_construction() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        KVTierConnector(vllm_config_of({"sokcet": "/x"}), KVConnectorRole.SCHEDULER, kv_cache_config_of([full_spec()]))


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(NotImplementedError, match="CPU platform only"):
        KVTierConnector(vllm_config_of(), KVConnectorRole.SCHEDULER, kv_cache_config_of([full_spec()]))


def test_the_plugin_registers_once_and_by_name() -> None:
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVTierConnector") is KVTierConnector
    assert kvtier_connector.KVTierConnector is KVTierConnector


def test_metrics_in_the_api_server_process_use_our_spec() -> None:
    config = vllm_config_of()

    class Metric:
        def __init__(self, **_: object) -> None: ...

        def labels(self, *_: object) -> "Metric":
            return self

    from prometheus_client import Counter, Gauge, Histogram

    made = KVTierConnector.build_prom_metrics(
        config, {Counter: Metric, Gauge: Metric, Histogram: Metric}, ["engine"], {0: ["0"]}
    )
    assert not made._observe_deprecated_metrics
    assert config.kv_transfer_config.kv_connector_extra_config["spec_name"] == "KVTierOffloadingSpec"
