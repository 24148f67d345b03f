from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

import kvtier_connector
from kvtier.errors import ConfigError
from kvtier_connector import plugin
from kvtier_connector.connector import KVTierConnector
from kvtier_connector.settings import GpuPin, Role, WeightsFingerprint, check_vllm_config, name_our_spec, parse_settings
from tests.unit.connector.harness import full_spec, kv_cache_config_of, vllm_config_of


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_SOCKET", "/run/x.sock")
    settings = parse_settings({})
    assert settings.socket == Path("/run/x.sock")
    assert (settings.blocks_per_chunk, settings.lookup_timeout_s) == (1, 0.25)
    assert settings.prefill_tokens_per_s is None
    assert settings.gpu_pin is GpuPin.SOFT
    assert settings.weights_fingerprint is WeightsFingerprint.SAMPLED
    assert settings.warm_url is None
    assert settings.chat_template is None
    assert settings.otlp_endpoint is None
    assert settings.daemon_uid is None


def test_as_whom_the_daemon_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_DAEMON_UID", "1000")
    assert parse_settings({}).daemon_uid == 1000
    assert parse_settings({"daemon_uid": 0}).daemon_uid == 0
    monkeypatch.setenv("KVTIER_DAEMON_UID", "kvtier")
    with pytest.raises(ConfigError, match="environment: KVTIER_DAEMON_UID = 'kvtier': must be a uid"):
        parse_settings({})


def test_a_chat_template_is_a_file_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert parse_settings({"chat_template": "chat.jinja"}).chat_template == tmp_path / "chat.jinja"
    (tmp_path / "bytes").write_bytes(b"\xff")
    for value, message in (
        ("{{ messages }}", r"chat_template = '{{ messages }}': cannot be read as text .*name the file"),
        ("bytes", "chat_template = 'bytes': cannot be read as text"),
        (str(tmp_path), "cannot be read as text"),
        (7, "chat_template = 7: must be the path of the file that vLLM got by --chat-template"),
        ("", "must be the path"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_settings({"chat_template": value})


@pytest.mark.parametrize(
    "value", [7, "", "localhost:4317", "ftp://x", "http://", "http://[x", "http://x:43l7", "http://x:0"]
)
def test_a_collector_has_a_url(value: Any) -> None:
    assert parse_settings({"otlp_endpoint": "http://127.0.0.1:4317"}).otlp_endpoint == "http://127.0.0.1:4317"
    with pytest.raises(ConfigError, match=r"otlp_endpoint = .*: must be the URL of an OTLP collector"):
        parse_settings({"otlp_endpoint": value})


def test_one_variable_traces_daemon_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_settings({}).trace_folder is None
    monkeypatch.setenv("KVTIER_TRACE_FOLDER", "/traces")
    assert parse_settings({}).trace_folder == Path("/traces")
    monkeypatch.setenv("KVTIER_TRACE_FOLDER", "OFF")
    assert parse_settings({}).trace_folder is None, "as the daemon reads it"
    monkeypatch.setenv("KVTIER_TRACE_FOLDER", "~no-such-user/traces")
    with pytest.raises(
        ConfigError, match="environment: KVTIER_TRACE_FOLDER = '~no-such-user/traces': ~ names no user here"
    ):
        parse_settings({})


def test_a_socket_path_is_absolute_whatever_folder_vllm_changes_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/u")
    assert parse_settings({"socket": "run/s"}).socket == tmp_path / "run" / "s"
    monkeypatch.setenv("KVTIER_SOCKET", "~/s")
    assert parse_settings({}).socket == Path("/home/u/s")
    monkeypatch.setenv("KVTIER_SOCKET", "/" + "x" * 200)
    with pytest.raises(ConfigError, match="KVTIER_SOCKET"):
        parse_settings({})


def test_our_own_spec_name_is_accepted_so_that_parsing_is_idempotent() -> None:
    extra: dict[str, Any] = {"socket": "/s"}
    name_our_spec(extra)
    assert parse_settings(extra).socket == Path("/s")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "cpu_bytes_to_use",
            1,
            r"cpu_bytes_to_use = 1: unknown key; allowed are admission, blocks_per_chunk, chat_template, daemon_uid, ",
        ),
        ("blocks_per_chunk", 0, "blocks_per_chunk = 0: must be a positive whole number"),
        ("blocks_per_chunk", True, "must be a positive whole number"),
        ("offload_prompt_only", "false", "offload_prompt_only = 'false': must be true or false"),
        ("lookup_timeout_ms", "250", "lookup_timeout_ms = '250': must be a positive whole number"),
        ("prefill_tokens_per_s", 0, "prefill_tokens_per_s = 0: must be a positive whole number"),
        # It was accepted, and the daemon ended each session that reported it.
        ("prefill_tokens_per_s", 10**9 + 1, "must be a positive whole number, at most 1000000000"),
        ("gpu_pin", "firm", "gpu_pin = 'firm': must be 'soft', 'hard' or 'off'"),
        ("gpu_pin", True, "must be 'soft', 'hard' or 'off'"),
        ("gpu_pin_max_ratio", 0.5, "unknown key"),
        # It was accepted: no event came of it, and vLLM kept the tokens of every stored or loaded chunk, for good.
        ("self_describing_kv_events", True, "unknown key"),
        ("weights_fingerprint", "none", "must be 'sampled' or 'full'"),
        ("warm_url", "127.0.0.1:8000", "must be the URL of vLLM's own API server, like http://127.0.0.1:8000"),
        ("warm_url", "http://", "must be the URL"),
        ("warm_url", "http://host:port", "must be the URL"),
        ("warm_url", 8000, "must be the URL"),
        ("socket", "", "must be the path of the daemon's unix socket"),
        ("socket", "/run/a\0b", "NUL character"),
        ("socket", "/run/\ud800", "no path of this system"),
        ("socket", "/" + "x" * 107, "has 108 bytes, a unix socket's at most 107"),
        ("socket", "~no-such-user/s", "no home folder"),
        ("daemon_uid", "1000", "daemon_uid = '1000': must be a uid"),
        ("daemon_uid", True, "must be a uid"),
        ("daemon_uid", 2**32 - 1, "must be a uid"),
        ("spec_name", "CPUOffloadingSpec", "set by kvtier itself; remove it"),
    ],
)
def test_bad_settings_name_key_value_and_remedy(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config: .*" + message):
        parse_settings({key: value})


def test_a_password_in_a_warm_url_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_settings({"warm_url": "http://me:hunter2@127.0.0.1:port"})
    assert "hunter2" not in str(refused.value)
    assert "***@127.0.0.1:port" in str(refused.value)


def test_a_warm_url_is_taken_as_users_know_it() -> None:
    assert parse_settings({"warm_url": "https://[::1]:8000/v1/"}).warm_url == "https://[::1]:8000"


def test_prefix_caching_off_is_refused() -> None:
    config = vllm_config_of()
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigError, match="start vLLM with --enable-prefix-caching"):
        check_vllm_config(config)


def test_an_engine_on_several_hosts_is_refused() -> None:
    """Nothing was ever stored: ranks of another host have no arena, and said that the session had ended."""
    config = vllm_config_of()
    config.parallel_config.nnodes, config.parallel_config.nnodes_within_dp = 4, 2
    with pytest.raises(ConfigError, match=r"vLLM: nnodes = 4: .* run each engine on one host"):
        check_vllm_config(config)
    config.parallel_config.nnodes_within_dp = 1
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


def test_the_connector_by_name_alone_is_warned_of_vllms_default_policy(caplog: pytest.LogCaptureFixture) -> None:
    config = vllm_config_of()
    by_name = KVTransferConfig(kv_connector="KVTierConnector", kv_role="kv_both")
    config.kv_transfer_config.kv_load_failure_policy = by_name.kv_load_failure_policy
    check_vllm_config(config)
    assert 'set "kv_load_failure_policy": "recompute" in --kv-transfer-config' in caplog.text


def test_an_unknown_role_is_refused_by_vllm_which_names_those_that_there_are() -> None:
    for kv_role, problem in (("kv_decode", "kv_role"), (None, "Please specify kv_role")):
        with pytest.raises(ValueError, match=problem) as refused:
            KVTransferConfig(kv_connector="KVTierConnector", kv_role=kv_role)
        assert all(role.value in str(refused.value) for role in Role)


def test_the_connector_refuses_at_construction() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        KVTierConnector(vllm_config_of({"sokcet": "/x"}), KVConnectorRole.SCHEDULER, kv_cache_config_of([full_spec()]))


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(NotImplementedError, match="CPU platform and on CUDA, not on"):
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
