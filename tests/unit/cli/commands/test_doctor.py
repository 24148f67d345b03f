"""`kvtier doctor` as a user types it, without and with a daemon and a vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.doctor import CHECKS, all_checks
from kvtier.doctor.engine_environment import EngineEnvironment
from tests.fakes.fake_cache_service import FakeCacheService
from tests.unit.cli.commands.test_commands import assert_narrow
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.fake_vllm import FakeVllm

METRICS = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",prefix_caching_hash_algo="sha256"} 1.0
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of this machine's, and no ten seconds of importing vLLM."""
    for table in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{table}_HOME", str(tmp_path / table.lower()))
    monkeypatch.delenv("KVTIER_CONFIG", raising=False)
    environment = EngineEnvironment(vllm="0.32.0", series=("0.32",), hashes=("sha256",))
    monkeypatch.setattr(all_checks, "probe_environment", lambda python: environment)


def findings(kvtier: Kvtier, *arguments: object, exit_code: int) -> dict[str, dict[str, Any]]:
    result = kvtier("doctor", "--json", *arguments)
    assert result.exit_code == exit_code, result.output
    return {finding["id"]: finding for finding in json.loads(result.stdout)}


def test_without_a_daemon(kvtier: Kvtier) -> None:
    found = findings(kvtier, exit_code=1)
    assert set(found) == set(CHECKS) - {"socket.owner", "socket.folder", "socket.trusted"}
    assert found["socket.path"]["status"] == "fail"
    assert "kvtier-daemon" in found["socket.path"]["remedy"]
    assert found["daemon.answers"]["status"] == found["pins.kept"]["status"] == "skipped"
    assert found["disk.dir"]["status"] == found["config.file"]["status"] == "ok"


def test_people_get_a_table(kvtier: Kvtier) -> None:
    result = kvtier("doctor")
    assert_narrow(result.output)
    assert "-> start `kvtier-daemon`" in result.output
    assert "1 fail (socket.path)" in result.output.splitlines()[-1]


def test_a_bad_config_file_is_a_finding(kvtier: Kvtier, tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text("[disk]\nbyte = 1\n")
    found = findings(kvtier, "--config", path, exit_code=1)
    assert "did you mean disk.bytes?" in found["config.file"]["found"]
    assert found["disk.dir"]["status"] == "skipped", "there is nothing to check then"


def test_a_daemon_of_another_container_and_a_vllm(kvtier: Kvtier, daemon: FakeCacheService, vllm: FakeVllm) -> None:
    """The fake daemon names folders that do not exist here."""
    vllm.metrics = METRICS
    daemon.prompts["p"] = PromptStatus(name="p", pinned=True, state=PromptStatus.WAITING, model="toy")
    found = findings(kvtier, "--url", f"{vllm.url}/v1", exit_code=1)
    failed = {check for check, finding in found.items() if finding["status"] == "fail"}
    assert failed == {"host.arena_dir", "server.attached"}
    assert "same path" in found["host.arena_dir"]["remedy"]
    assert found["disk.space"]["status"] == "skipped"
    assert found["server.prefix_caching"]["found"] == "on"
    assert found["server.hash_algorithm"]["found"] == "sha256"
    assert found["server.answers"]["found"] == "vLLM 0.32.0"


def test_a_url_that_is_none_is_wrong_usage(kvtier: Kvtier) -> None:
    assert kvtier("doctor", "--url", "nonsense").exit_code == 2


def test_no_server_answers_at_the_url(kvtier: Kvtier) -> None:
    found = findings(kvtier, "--url", "http://127.0.0.1:9", exit_code=1)
    assert found["server.answers"]["status"] == "fail"
    assert found["server.attached"]["status"] == "skipped"
