"""The settings that a daemon would read if it started now."""

from pathlib import Path

from kvtier.config import DaemonConfig
from kvtier.doctor.report import CheckResult, fail, ok
from kvtier.errors import ConfigErrors
from kvtier.folders import socket_folder_problem


def check_configuration(path: Path | None) -> tuple[DaemonConfig | None, CheckResult]:
    """Read the settings; None when a daemon would refuse them.

    Args:
        path: TOML file; None: the default file if it exists.
    """
    # Imported here, because it would slow down the other commands of the CLI.
    from kvtier.config.load import default_config_path, load_config

    try:
        loaded = load_config(path=path)
    except ConfigErrors as exc:
        return None, fail("config.file", str(exc), "correct it; `kvtier-daemon --check-config` tests it")
    found = str(loaded.path) if loaded.path else f"no {default_config_path()}: defaults and environment"
    return loaded.config, ok("config.file", found)


def check_socket_folder(socket: Path) -> CheckResult:
    """Check that the daemon can create its socket, and that its user alone can reach it."""
    if problem := socket_folder_problem(socket.parent):
        remedy = "set server.socket ($KVTIER_SOCKET for daemon and clients) to a path in a folder of its own"
        return fail("socket.folder", f"{socket.parent}: {problem}", remedy)
    return ok("socket.folder", str(socket.parent))
