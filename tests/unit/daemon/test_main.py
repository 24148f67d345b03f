"""The daemon's command line, and one real process of it."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli.app import app as cli
from kvtier.client.address import SOCKET_VARIABLE
from kvtier.client.admin import AdminClient
from kvtier.daemon.main import app
from kvtier.doctor import all_checks
from kvtier.doctor.engine_environment import EngineEnvironment
from kvtier.process import MIN_OPEN_FILES
from kvtier.version import __version__
from tests.fakes.keys import write_keys


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    for name in ("CONFIG", "STATE", "RUNTIME"):
        monkeypatch.delenv(f"XDG_{name}_DIR", raising=False)
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path))
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    return CliRunner()


def test_version(runner: CliRunner) -> None:
    assert runner.invoke(app, ["--version"]).output == f"kvtier-daemon {__version__}\n"


def test_check_config_says_where_each_value_came_from(runner: CliRunner, tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text('[cache]\nstore = "all"')
    arguments = ["--check-config", "--config", str(path), "--host-bytes", "4MiB"]
    result = runner.invoke(app, arguments, env={"KVTIER_LOG_LEVEL": "error"})
    assert result.exit_code == 0
    assert f'store = "all"  # {path}\n' in result.output
    assert "bytes = 4194304  # flag\n" in result.output
    assert 'level = "error"  # environment\n' in result.output
    assert 'format = "text"  # default' in result.output
    assert "keep_arena = false  # default\n" in result.output


def test_check_config_writes_any_path_as_toml(runner: CliRunner, tmp_path: Path) -> None:
    """A quote in a path made it no TOML, and an escape sequence was obeyed."""
    folder = tmp_path / 'a "b" \\ \x1b[31m \U000e0041 ü'
    result = runner.invoke(app, ["--check-config", "--disk-dir", str(folder), "--http-listen", "off"])
    assert tomllib.loads(result.stdout)["disk"]["dir"] == str(folder)
    assert {c for c in result.output if not c.isprintable()} == {"\n"}


def test_a_bad_setting_is_a_usage_error(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--host-bytes", "lots"])
    assert result.exit_code == 2
    assert "flag: host.bytes = 'lots'" in result.stderr


def test_check_config_says_what_this_machine_lacks_and_makes_nothing(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    socket = ["--socket", str(tmp_path / "run" / "s")]
    arguments = ["--check-config", *socket, "--host-bytes", "1MiB", "--disk-bytes", "1MiB"]
    folders = ["--disk-dir", str(tmp_path / "new" / "state"), "--arena-dir", str(tmp_path / "new" / "arena")]
    result = runner.invoke(app, [*arguments, *folders])
    assert result.exit_code == 0, result.output
    assert "fail" not in result.stderr
    assert tomllib.loads(result.stdout)["disk"]["dir"] == str(tmp_path / "new" / "state")
    folders = ["--disk-dir", str(tmp_path / "open"), "--arena-dir", str(tmp_path / "file")]
    result = runner.invoke(app, [*arguments, *folders])
    assert result.exit_code == 1
    assert "fail disk.dir: " in result.stderr
    assert "any user may write there" in result.stderr
    assert "fail host.arena_dir: " in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_the_doctor_finds_a_real_daemon_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_checks, "probe_environment", lambda python: EngineEnvironment())
    daemon = start(tmp_path)
    try:
        result = CliRunner().invoke(cli, ["--socket", str(tmp_path / "s"), "doctor", "--json"])
    finally:
        finish(daemon, signal.SIGTERM)
    found = {finding["id"]: finding for finding in json.loads(result.stdout)}
    assert [check for check, finding in found.items() if finding["status"] == "fail"] == []
    assert result.exit_code == 0
    assert found["daemon.answers"]["found"].startswith(f"kvtier {__version__}, pid {daemon.pid}, ")
    assert found["host.arena_dir"]["found"] == str(tmp_path / "a")
    assert "host.bytes = 4.00 MiB" in found["host.space"]["found"]


def start(tmp_path: Path, **settings: str) -> subprocess.Popen[str]:
    arguments = ["--socket", tmp_path / "s", "--disk-dir", tmp_path / "d", "--arena-dir", tmp_path / "a"]
    command = [sys.executable, "-m", "kvtier.daemon.main", *map(str, arguments), "--host-bytes", "4MiB"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVTIER_LOG_LEVEL": "info", "KVTIER_HTTP_LISTEN": "off", **settings},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if " ready " in line:
            return process
    raise AssertionError(f"the daemon ended with {process.wait()}")


def test_too_few_open_files_are_said_before_anything_is_made(tmp_path: Path) -> None:
    """The first call that ran out of them ended in a traceback, or was taken for a broken ledger."""
    arguments = ["--socket", tmp_path / "s", "--disk-dir", tmp_path / "d", "--arena-dir", tmp_path / "a"]
    command = [sys.executable, "-m", "kvtier.daemon.main", *map(str, arguments), "--host-bytes", "4MiB"]
    limited = ["sh", "-c", 'ulimit -n 12 && exec "$@"', "sh", *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"kvtier-daemon: ulimit -n = 12: kvtier needs at least {MIN_OPEN_FILES} open files to start; raise it: "
        "ulimit -n 1024, or LimitNOFILE= in a unit\n"
    )
    assert list(tmp_path.iterdir()) == []


def finish(process: subprocess.Popen[str], number: signal.Signals) -> int:
    process.send_signal(number)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode


def test_a_real_daemon_starts_after_kill_9_and_stops_on_sigterm(tmp_path: Path) -> None:
    first = start(tmp_path)
    assert finish(first, signal.SIGKILL) == -signal.SIGKILL
    assert (tmp_path / "s").exists(), "kill -9 leaves the socket behind"
    second = start(tmp_path)
    try:
        with AdminClient(tmp_path / "s") as client:
            assert client.status().pid == second.pid
        third = subprocess.run(second.args, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert third.returncode == 1
        assert f"pid {second.pid}" in third.stderr
        with AdminClient(tmp_path / "s") as client:
            assert client.status().pid == second.pid
    finally:
        code = finish(second, signal.SIGTERM)
    assert code == 0
    assert not (tmp_path / "s").exists()


def test_a_daemon_with_keys_dumps_no_core(tmp_path: Path) -> None:
    """A crash, or systemd's watchdog, put keys and prompts on the disk in plain."""
    daemon = start(tmp_path, KVTIER_DISK_KEY_FILE=str(write_keys(tmp_path / "keys", "k1")))
    try:
        limits = Path(f"/proc/{daemon.pid}/limits").read_text().splitlines()
        (of_cores,) = (line.split() for line in limits if line.startswith("Max core file size"))
        assert of_cores[4:6] == ["0", "0"]
    finally:
        finish(daemon, signal.SIGTERM)


@pytest.mark.parametrize("arguments", [["--check-config"], []])
def test_all_bad_settings_are_named_at_once(runner: CliRunner, tmp_path: Path, arguments: list[str]) -> None:
    """One of three was: the others came with the next tries. And a start makes nothing."""
    path = tmp_path / "k.toml"
    path.write_text('[host]\nbytes = "lots"\n[disk]\nbyte = 1\n')
    given = [*arguments, "--config", str(path), "--disk-bytes", "x\x1b[31m"]
    result = runner.invoke(app, given, env={"KVTIER_HOST_BYTES": "4MiB", "KVTIER_LOG_LEVEL": "loud"})
    assert result.exit_code == 2
    lines = sorted(line.partition(" = ")[0].removeprefix("kvtier-daemon: ") for line in result.stderr.splitlines())
    assert lines == sorted(["environment: log.level", "flag: disk.bytes", f"{path}: disk.byte", f"{path}: host.bytes"])
    assert {character for character in result.stderr if not character.isprintable()} == {"\n"}
    assert [each.name for each in tmp_path.iterdir()] == ["k.toml"]
