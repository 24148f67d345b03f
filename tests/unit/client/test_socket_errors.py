import errno
import os
import socket
from pathlib import Path

import pytest

from kvtier.client.address import channel_target, default_socket_path
from kvtier.client.trusted_socket import open_trusted, unreachable


def problem_at(path: Path) -> str:
    with pytest.raises(OSError) as caught:
        open_trusted(path, None)
    return unreachable(path, caught.value).problem


def test_nothing_there(tmp_path: Path) -> None:
    assert problem_at(tmp_path / "none" / "d.sock") == "there is no such socket"


def test_no_listener(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    assert problem_at(path).startswith("no process listens on that socket")


def test_permission_denied_names_both_users(tmp_path: Path) -> None:
    error = unreachable(tmp_path / "d.sock", PermissionError(errno.EACCES, "denied"), "start it")
    assert error.problem == f"permission denied: {tmp_path} belongs to uid {os.getuid()}, you are uid {os.geteuid()}"
    assert error.remedy.startswith("run as that user, or join the group")


def test_no_more_descriptors() -> None:
    error = unreachable(Path("/d.sock"), OSError(errno.EMFILE, "Too many open files"), "start it")
    assert "ulimit -n" in error.remedy


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED])
def test_only_a_daemon_that_does_not_run_is_to_be_started(number: int) -> None:
    assert unreachable(Path("/d.sock"), OSError(number, "x"), "start it").remedy == "start it"


def test_default_socket_path_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVTIER_SOCKET", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert default_socket_path() == Path(f"/tmp/kvtier-{os.getuid()}/daemon.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket_path() == tmp_path / "kvtier" / "daemon.sock"
    monkeypatch.setenv("KVTIER_SOCKET", "/x/y.sock")
    assert default_socket_path() == Path("/x/y.sock")
    assert channel_target("/x/y.sock") == "unix:/x/y.sock"
