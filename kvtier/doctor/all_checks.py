"""All checks together, in the order in which an operator would look."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier._pb.cache_pb2 import DaemonStatus
from kvtier.config import DaemonConfig, DiskConfig, HostConfig
from kvtier.doctor.configuration import check_configuration, check_socket_folder
from kvtier.doctor.daemon import ask_daemon, check_daemon, check_socket
from kvtier.doctor.disk import check_disk
from kvtier.doctor.engine_environment import check_environment_of_vllm, probe_environment
from kvtier.doctor.host_memory import check_host_memory, check_shared_arena_dir
from kvtier.doctor.machine import check_machine
from kvtier.doctor.pinned_prompts import check_pins
from kvtier.doctor.report import CHECKS, CheckResult, skipped
from kvtier.doctor.vllm_server import VllmServer, check_server
from kvtier.folders import is_folder_of


@dataclass(frozen=True, kw_only=True)
class Target:
    """What `run_checks` checks.

    Attributes:
        socket: Path of the daemon's socket.
        daemon_uid: Another uid that the daemon may run as, besides ours and root.
        config_path: Its TOML file; None: the default one.
        python: Interpreter of the environment that vLLM runs in; None: this one.
        server: A running vLLM; None: none was named.
    """

    socket: Path
    daemon_uid: int | None = None
    config_path: Path | None = None
    python: Path | None = None
    server: VllmServer | None = None


def run_checks(target: Target) -> list[CheckResult]:
    """Run every check; changes nothing."""
    config, config_finding = check_configuration(target.config_path)
    socket_findings = check_socket(target.socket, target.daemon_uid)
    answer = ask_daemon(target.socket, target.daemon_uid, socket_findings)
    status = answer.status
    environment = probe_environment(target.python or Path(sys.executable))
    disk_dir = Path(status.disk.location) if status else config.disk.disk_dir if config else None
    return [
        config_finding,
        *check_machine(disk_dir, status.started_unix_s if status else 0.0),
        *socket_findings,
        answer.finding,
        *check_daemon(status),
        *_check_tiers(config, status),
        *check_environment_of_vllm(environment, target.python),
        *check_server(target.server, environment, status),
        *check_pins(answer.prompts if status else None),
    ]


def check_environment(config: DaemonConfig) -> list[CheckResult]:
    """Check what a daemon with these settings needs from this machine; changes nothing."""
    return [
        *check_machine(config.disk.disk_dir),
        check_socket_folder(config.server.socket),
        *check_host_memory(config.host),
        *check_disk(config.disk),
    ]


def _check_tiers(config: DaemonConfig | None, status: DaemonStatus | None) -> list[CheckResult]:
    """Check the tiers of the running daemon, else those that the settings name."""
    if status is not None:
        if not is_folder_of(Path(status.disk.location), status.pid):
            return _check_from_elsewhere(status)
        return [*check_host_memory(_host_of(config, status)), *check_disk(_disk_of(config, status))]
    if config is not None:
        return [*check_host_memory(config.host), *check_disk(config.disk)]
    return _skip_tiers("there are no usable settings")


def _check_from_elsewhere(status: DaemonStatus) -> list[CheckResult]:
    """Check, in another container than the daemon's, that the arenas are mounted under the same path."""
    skipped_checks = _skip_tiers(f"the daemon's {status.disk.location} is not mounted here; run this where it runs")
    shared = check_shared_arena_dir(Path(status.host.location), status.pid)
    return [shared if finding.id == shared.id else finding for finding in skipped_checks]


def _skip_tiers(why: str) -> list[CheckResult]:
    return [skipped(check, why) for check in CHECKS if check.startswith(("host.", "disk."))]


def _host_of(config: DaemonConfig | None, status: DaemonStatus) -> HostConfig:
    arena_dir, host_bytes = Path(status.host.location), status.host.limit_bytes
    if config is None:
        return HostConfig(arena_dir=arena_dir, host_bytes=host_bytes)
    return replace(config.host, arena_dir=arena_dir, host_bytes=host_bytes)


def _disk_of(config: DaemonConfig | None, status: DaemonStatus) -> DiskConfig:
    disk_dir, disk_bytes = Path(status.disk.location), status.disk.limit_bytes
    if config is None:
        return DiskConfig(disk_dir=disk_dir, disk_bytes=disk_bytes)
    return replace(config.disk, disk_dir=disk_dir, disk_bytes=disk_bytes)
