"""All checks together, in the order in which an operator would look."""

import sys
from dataclasses import replace
from pathlib import Path

from kvtier._pb.cache_pb2 import DaemonStatus
from kvtier.config import DaemonConfig, DiskConfig, HostConfig
from kvtier.doctor.daemon import ask_daemon, check_daemon, check_pins, check_socket
from kvtier.doctor.engine_environment import check_environment_of_vllm, probe_environment
from kvtier.doctor.machine import check_machine
from kvtier.doctor.memory_and_disk import check_disk, check_host_memory, check_shared_arena_dir
from kvtier.doctor.report import CHECKS, CheckResult, fail, ok, skipped
from kvtier.doctor.shared_store import check_remote
from kvtier.doctor.vllm_server import VllmServer, check_server
from kvtier.errors import ConfigErrors
from kvtier.folders import group_problem, is_folder_of, is_private_folder, passage_problem, socket_folder_problem


def run_checks(
    socket: Path,
    daemon_uid: int | None = None,
    *,
    config_path: Path | None = None,
    python: Path | None = None,
    server: VllmServer | None = None,
) -> list[CheckResult]:
    """Run every check; changes nothing.

    Args:
        socket: Path of the daemon's socket.
        daemon_uid: Another uid that the daemon may run as, besides ours and root.
        config_path: Its TOML file; None: the default one.
        python: Interpreter of the environment that vLLM runs in; None: this one.
        server: A running vLLM; None: none was named.
    """
    config, config_finding = _check_configuration(config_path)
    socket_findings = check_socket(socket, daemon_uid)
    answer = ask_daemon(socket, daemon_uid, socket_findings)
    status = answer.status
    environment = probe_environment(python or Path(sys.executable))
    disk_dir = Path(status.disk.location) if status else config.disk.disk_dir if config else None
    return [
        config_finding,
        check_group(config),
        *check_machine(disk_dir, status.started_unix_s if status else 0.0),
        *socket_findings,
        answer.finding,
        *check_daemon(status),
        *_check_tiers(config, status),
        *check_environment_of_vllm(environment, python),
        *check_server(server, environment, status),
        *check_remote(answer.remote),
        *check_pins(answer.prompts if status else None),
    ]


def check_environment(config: DaemonConfig) -> list[CheckResult]:
    """Check what a daemon with these settings needs from this machine; changes nothing."""
    return [
        *check_machine(config.disk.disk_dir),
        _check_socket_folder(config.server.socket),
        check_group(config),
        *check_host_memory(config.host),
        *check_disk(config.disk),
    ]


def _check_configuration(path: Path | None) -> tuple[DaemonConfig | None, CheckResult]:
    """Read the settings that a daemon would read if it started now; None when it would refuse them."""
    # Imported here, because it would slow down the other commands of the CLI.
    from kvtier.config.load import default_config_path, load_config

    try:
        loaded = load_config(path=path)
    except ConfigErrors as exc:
        return None, fail("config.file", str(exc), "correct it; `kvtier-daemon --check-config` tests it")
    found = str(loaded.path) if loaded.path else f"no {default_config_path()}: defaults and environment"
    return loaded.config, ok("config.file", found)


def _check_socket_folder(socket: Path) -> CheckResult:
    """Check that the daemon can create its socket, and that its user alone can reach it."""
    if problem := socket_folder_problem(socket.parent):
        remedy = "set server.socket ($KVTIER_SOCKET for daemon and clients) to a path in a folder of its own"
        return fail("socket.folder", f"{socket.parent}: {problem}", remedy)
    return ok("socket.folder", str(socket.parent))


def check_group(config: DaemonConfig | None) -> CheckResult:
    """Check that the daemon can let the members of its group in, and that they reach socket and arenas.

    A folder of its own, 0700 until now, the daemon opens itself when it starts.
    """
    if config is None or config.server.gid is None:
        return ok("socket.group", "server.group is off: for the daemon's own user")
    server, gid = config.server, config.server.gid
    if problem := group_problem(gid):
        return fail(
            "socket.group", f"server.group = {server.group}: {problem.partition('; ')[0]}", problem.partition("; ")[2]
        )
    for folder in (server.socket.parent, config.host.arena_dir):
        try:
            is_opened_by_start = is_private_folder(folder)
        except OSError:  # it is not there, or may not be looked at: those above it are judged
            is_opened_by_start = True
        if problem := passage_problem(folder, gid, server.group, above_only=is_opened_by_start):
            return fail("socket.group", problem.partition("; ")[0], problem.partition("; ")[2])
    return ok("socket.group", f"{server.group} (gid {gid})")


def _check_tiers(config: DaemonConfig | None, status: DaemonStatus | None) -> list[CheckResult]:
    """Check the tiers of the running daemon, else those that the settings name."""
    if status is None and config is None:
        return _skip_tiers("there are no usable settings")
    if status is None:
        assert config is not None
        return [*check_host_memory(config.host), *check_disk(config.disk)]
    arena_dir, disk_dir = Path(status.host.location), Path(status.disk.location)
    if not is_folder_of(disk_dir, status.pid):
        # The daemon is in another container: its arenas have to be mounted here, under the same path.
        found = _skip_tiers(f"the daemon's {disk_dir} is not mounted here; run this where it runs")
        shared = check_shared_arena_dir(arena_dir, status.pid)
        return [shared if finding.id == shared.id else finding for finding in found]
    host = HostConfig(arena_dir=arena_dir, host_bytes=status.host.limit_bytes)
    disk = DiskConfig(disk_dir=disk_dir, disk_bytes=status.disk.limit_bytes)
    if config is None:
        return [*check_host_memory(host), *check_disk(disk)]
    disk = replace(disk, reserve_bytes=config.disk.reserve_bytes, key_file=config.disk.key_file)
    return [*check_host_memory(host), *check_disk(disk, status.disk_keys)]


def _skip_tiers(why: str) -> list[CheckResult]:
    return [skipped(check, why) for check in CHECKS if check.startswith(("host.", "disk."))]
