"""The parts of the GPU benchmark that need no GPU: how vLLM's answers are read, what is printed, what is started."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.gpu import needs
from benchmarks.gpu.budgeted import ROOT, Section, python, run_sections
from benchmarks.gpu.budgeted import pytest as pytest_of_gpu
from benchmarks.gpu.dummy_model import host_bytes, kv_bytes_per_token, write_model
from benchmarks.gpu.first_tokens import Recorder, Samples, ask
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


def test_what_a_machine_lacks_is_named_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert needs.problems(tmp_path / "new" / "folder", host_bytes=2**20) == []
    monkeypatch.setattr(needs, "MODULES", {"no_such_module": "such-a-module", "no.such": "another"})
    monkeypatch.setattr("importlib.metadata.version", lambda name: "5.29.1")
    found = needs.problems(tmp_path, host_bytes=2**50)
    assert found[0] == "no_such_module is missing: install such-a-module"
    assert found[1] == "no.such is missing: install another"
    assert found[2] == "protobuf 5.29.1 is too old for the generated code: install 6.31 or later"
    assert [each.split()[0] for each in found[3:5]] == ["/dev/shm", str(tmp_path)]
    assert "GiB of memory are free" in found[5]
    assert len(found) == 6


def test_needs_are_looked_at_without_importing_what_may_be_missing() -> None:
    code = "import benchmarks.gpu.__main__, sys; print([m for m in ('torch', 'vllm', 'httpx') if m in sys.modules])"
    done = subprocess.run(python("-c", code), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_bytes_that_a_run_needs() -> None:
    assert host_bytes("8b", [8192], 4) == 5 * 2**30 + 2**30


def test_samples_of_a_run_that_is_cut_are_kept(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "samples.jsonl")
    recorder.add(stage="cold", ttft_s=1.5)
    recorder.add(stage="host hit", ttft_s=0.5)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"stage": "cold", "ttft_s": 1.5}, {"stage": "host hit", "ttft_s": 0.5},
    ]  # fmt: skip
    Recorder(None).add(stage="cold")


def section(name: str, code: str, least_s: float = 0.0) -> Section:
    return Section(name=name, argv=python("-c", code), least_s=least_s)


def test_sections_run_within_the_budget_and_leave_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.gpu.budgeted.CLEANUP_S", 5.0)
    waits = "import time; print('has begun', flush=True); time.sleep(600)"
    sections = [
        section("works", "import kvtier_connector; print('42 GB/s')"),
        section("fails", "raise SystemExit(3)"),
        section("is too long", "", least_s=60),
        section("waits", waits),
    ]
    began_s = time.monotonic()
    assert not run_sections(sections, 15, tmp_path / "out")
    assert time.monotonic() - began_s < 60
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "## works: done" in page
    assert "42 GB/s" in page
    assert "## fails: failed with 3, see fails.txt" in page
    assert "## is too long: left out" in page
    assert "## waits: cut after" in page
    assert "has begun" in page
    assert "works: done" in capsys.readouterr().out
    assert run_sections([section("works", "")], 15, tmp_path / "out")


def test_a_section_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.budgeted.CLEANUP_S", 0.5)
    code = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True)"
    assert not run_sections([section("deaf", code + "; time.sleep(600)")], 8, tmp_path)
    pid = int((tmp_path / "deaf.txt").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_machine_without_a_gpu_gets_an_answer_in_words() -> None:
    argv = [sys.executable, "-m", "benchmarks.gpu", "first-token", "--shape", "tiny", "--lengths", "64"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "torch finds no GPU here" in done.stderr


def test_the_tests_on_a_gpu_need_no_plugin_that_our_settings_name() -> None:
    argv = pytest_of_gpu("-p", "no:timeout", "--collect-only", "tests/gpu/test_sanitizer.py")
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_vllm_the_tests_on_a_gpu_say_that_it_is_missing() -> None:
    hides = "import sys; sys.modules['vllm'] = None; import pytest; sys.exit(pytest.main(['-ra', 'tests/gpu']))"
    done = subprocess.run(python("-c", hides), cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "vllm missing: install vLLM for CUDA" in done.stdout
