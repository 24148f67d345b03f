"""The units: systemd reads them, what they name exists and agrees, and the daemon works under their rules."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.cli.app import app
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig, HttpConfig
from kvtier.config.model import OFF
from kvtier.core.layout import GroupLayout, KVLayout
from tests.fakes.daemon_process import daemon_command, daemon_process
from tests.fakes.operator import evict, make_durable
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in
from tests.unit.deployment import sandbox
from tests.unit.deployment.shipped import CONFIGS, ROOT, config_of
from tests.unit.deployment.units import read_unit

MIB = 1024 * 1024
SYSTEMD = CONFIGS / "systemd"
SERVICE = SYSTEMD / "kvtier-daemon.service"
VERIFY, VERIFY_TIMER = SYSTEMD / "kvtier-verify.service", SYSTEMD / "kvtier-verify.timer"
UNIT = read_unit(SERVICE)
ENGINE = read_unit(SYSTEMD / "vllm.service.d" / "kvtier.conf")
# Large enough to be read past the page cache.
LARGE = KVLayout(
    num_ranks=1,
    rank_bytes=2 * MIB,
    num_writers=1,
    groups=(GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=MIB),),
)
KEYS = [chunk_key(n) for n in range(3)]
needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@needs_analyze
@pytest.mark.parametrize("drop_in", [False, True])
def test_systemd_reads_the_unit_without_complaint(tmp_path: Path, drop_in: bool) -> None:
    program = tmp_path / "kvtier-daemon"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = SERVICE.read_text().replace(UNIT.value("Service", "ExecStart"), str(program))
    (tmp_path / SERVICE.name).write_text(text)
    if drop_in:
        shutil.copytree(SYSTEMD / "kvtier-daemon.service.d", tmp_path / "kvtier-daemon.service.d")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / SERVICE.name)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_analyze
def test_systemd_reads_the_timer_and_what_it_starts(tmp_path: Path) -> None:
    for unit in (VERIFY, VERIFY_TIMER):
        text = (
            unit.read_text()
            .replace("/opt/kvtier/bin/kvtier", "/bin/true")
            .replace("Requires=kvtier-daemon.service", "")
        )
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / VERIFY_TIMER.name)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_verification_asks_the_daemon_as_its_user() -> None:
    verify = read_unit(VERIFY)
    program, *arguments = verify.words("Service", "ExecStart")
    assert Path(program).parent == Path(UNIT.value("Service", "ExecStart")).parent
    result = CliRunner().invoke(app, arguments, env={"KVTIER_SOCKET": "/nonexistent/kvtier.sock"})
    assert result.exit_code == 3, result.output
    assert verify.value("Service", "User") == UNIT.value("Service", "User")
    assert verify.environment["KVTIER_SOCKET"] == UNIT.environment["KVTIER_SOCKET"]
    assert Path(arguments[-1]).parent == Path("/var/lib") / verify.value("Service", "StateDirectory")


def test_the_unit_starts_a_script_of_ours() -> None:
    program = UNIT.value("Service", "ExecStart")
    assert Path(program).name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_the_folders_are_those_that_systemd_makes() -> None:
    config = config_of(UNIT.environment)
    assert config.server.socket.parent == Path("/run") / UNIT.value("Service", "RuntimeDirectory")
    assert config.disk.disk_dir == Path("/var/lib") / UNIT.value("Service", "StateDirectory")
    assert config.host.arena_dir.parent == Path("/dev/shm"), "writable under ProtectSystem=strict and PrivateDevices"
    assert int(UNIT.value("Service", "TimeoutStopSec")) > config.server.drain_timeout_s


def test_http_listen_where_the_unit_allows_it_and_nowhere_else() -> None:
    """The daemon listened on 127.0.0.1 by default, which the unit forbade: `http_not_served` at every start."""
    assert UNIT.words("Service", "RestrictAddressFamilies") == ["AF_UNIX"]
    assert config_of(UNIT.environment).http.listen == OFF
    drop_in = read_unit(SYSTEMD / "kvtier-daemon.service.d" / "http.conf")
    assert config_of(UNIT.environment | drop_in.environment).http.listen == HttpConfig().listen
    assert "AF_INET" in drop_in.words("Service", "RestrictAddressFamilies")
    assert drop_in.value("Service", "PrivateNetwork") == "no"


def test_a_fleet_has_a_drop_in_with_network_and_credentials() -> None:
    """With `remote.url` the unit as it is reaches no store, and nothing said so."""
    drop_in = read_unit(SYSTEMD / "kvtier-daemon.service.d" / "remote.conf")
    assert UNIT.value("Service", "PrivateNetwork") == "yes"
    assert drop_in.value("Service", "PrivateNetwork") == "no"
    assert {"AF_INET", "AF_INET6"} <= set(drop_in.words("Service", "RestrictAddressFamilies"))
    assert drop_in.value("Service", "EnvironmentFile").startswith("-"), "the host's role may do"
    assert "remote.conf" in SERVICE.read_text()
    assert "kvtier-daemon.service.d/remote.conf" in (ROOT / "docs" / "fleet.md").read_text()


def test_the_unit_installs_from_a_checkout_with_fast_codecs() -> None:
    """It named a package that no index has."""
    assert "pip install '.[fast]'" in SERVICE.read_text()


def test_vllm_finds_the_daemon_as_the_same_user() -> None:
    assert ENGINE.environment["KVTIER_SOCKET"] == UNIT.environment["KVTIER_SOCKET"]
    for key in ("User", "Group"):
        assert ENGINE.value("Service", key) == UNIT.value("Service", key)
    assert ENGINE.value("Unit", "After") == SERVICE.name


def test_the_watchdog_dumps_no_core() -> None:
    """It ends a daemon that hangs by SIGABRT, and a dump has prompts and keys in it."""
    assert UNIT.value("Service", "WatchdogSec")
    assert UNIT.value("Service", "LimitCORE") == "0"


def can_confine() -> bool:
    return sandbox.library() is not None and shutil.which("systemd-analyze") is not None


@pytest.mark.skipif(not can_confine(), reason="libseccomp or systemd-analyze is not installed")
def test_the_daemon_makes_no_system_call_that_the_unit_forbids(tmp_path: Path) -> None:
    """Storing, spilling, reading back past the page cache, stopping; a forbidden call would kill it."""
    config = config_in(tmp_path, host_bytes=64 * MIB)
    config = replace(config, server=replace(config.server, socket=tmp_path / "run" / "d.sock"))
    command = [sys.executable, "-m", "tests.unit.deployment.sandbox", str(SERVICE), *daemon_command(config)]
    without_network = ["unshare", "--net"] if os.geteuid() == 0 else []
    with daemon_process([*without_network, *command], tmp_path / "log"):
        asyncio.run(store_and_read_back(config))


async def store_and_read_back(config: DaemonConfig) -> None:
    async with grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        async with ScriptedEngine(config, LARGE) as engine:
            await make_durable(stub, engine, KEYS)
            await evict(stub, "p", force=True, tier=cache_pb2.TIER_HOST)
            leased = await engine.acquire(1, KEYS)
            assert [engine.read(KEYS[i], leased[i]) for i in range(3)] == [engine.payload(key) for key in KEYS]
            await engine.release(1)
            await stub.Fsck(cache_pb2.FsckRequest(deep=True))


@pytest.mark.skipif(not can_confine(), reason="libseccomp or systemd-analyze is not installed")
def test_the_sandbox_is_one() -> None:
    """Else the test above would prove nothing."""
    done = confined("import socket\ntry: socket.socket()\nexcept OSError as error: print(error.errno, flush=True)")
    assert (done.returncode, done.stdout) == (0, f"{errno.EAFNOSUPPORT}\n"), done.stderr
    # An argument that the kernel would refuse, should the sandbox let the call through.
    assert confined("import ctypes; ctypes.CDLL(None).reboot(0)").returncode == -signal.SIGSYS


def confined(code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.unit.deployment.sandbox", str(SERVICE), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
