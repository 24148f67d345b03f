"""The parts of the GPU benchmark that need no GPU: how vLLM's answers are read, what is printed, what is started."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.gpu.dummy_model import kv_bytes_per_token, write_model
from benchmarks.gpu.first_tokens import Samples, ask
from benchmarks.gpu.gpu_servers import Connector, GpuDaemon, ServerOptions
from benchmarks.measuring.chat_requests import forget_device_cache


def answer(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/reset_prefix_cache":
        return httpx.Response(200, json={"success": True})
    assert json.loads(request.content)["prompt"] == [5, 6]
    usage = {"prompt_tokens_details": {"cached_tokens": 7}}
    events: list[dict[str, Any]] = [{"choices": [{"text": "x"}]}, {"choices": [], "usage": usage}]
    return httpx.Response(200, text="".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n")


def test_an_answer_is_timed_and_its_cached_tokens_are_read() -> None:
    http = httpx.Client(base_url="http://vllm", transport=httpx.MockTransport(answer))
    server: Any = SimpleNamespace(http=http)
    seconds, cached = ask(server, [5, 6])
    assert (seconds > 0, cached) == (True, 7)
    forget_device_cache(server)


def test_the_report_compares_with_cold_and_with_vllms_own_connector(capsys: pytest.CaptureFixture[str]) -> None:
    samples = Samples()
    for connector, stage, values in (
        (Connector.NONE, "cold", [2.0, 2.2, 1.8]),
        (Connector.OFFLOADING, "host hit", [0.4]),
        (Connector.KVTIER, "host hit", [0.2]),
    ):
        samples.ttft_s[connector, stage, 8192] = values
        samples.cached[connector, stage, 8192] = [8176]
    samples.report((8192,))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "kvtier" in line]
    assert "0.200 (0.200..0.200) s, 0.100 of cold, 0.50 of OffloadingConnector; at least 8176 tokens" in line


def test_the_model_has_llamas_shape(tmp_path: Path) -> None:
    write_model(tmp_path, "8b")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (32, 8, 128)
    assert kv_bytes_per_token("8b") == 128 * 1024


@pytest.mark.parametrize("connector", Connector)
def test_each_system_is_started_with_its_connector(connector: Connector) -> None:
    options = ServerOptions(model="/m", connector=connector, socket=Path("/s"), host_bytes=2**30, max_model_len=1024)
    argv = options.argv(8000)
    assert ("--kv-transfer-config" in argv) == (connector is not Connector.NONE)
    assert ("KVTierConnector" in argv[-1]) == (connector is Connector.KVTIER)


def test_the_daemon_runs_where_its_console_script_is_not_installed(tmp_path: Path) -> None:
    """`Daemon.start` put the console script back in place of the module that a GPU machine has on its path."""
    with GpuDaemon(tmp_path, 64 << 20, 1 << 30, stores_all=False) as daemon:
        command = Path(f"/proc/{daemon.pid}/cmdline").read_bytes().split(b"\0")
    assert b"kvtier.daemon.main" in command
    assert not any(part.endswith(b"bin/kvtier-daemon") for part in command)
