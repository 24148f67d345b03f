"""Folders, the lock on them, and what a previous daemon leaves at the socket's path."""

import os
import socket
import stat
from pathlib import Path

import pytest

from kvtier.daemon.folder_locks import locked, locked_socket, prepare_folder, prepare_socket_folder, remove_stale_socket
from kvtier.errors import AlreadyRunningError, ConfigError


def test_new_folder_is_private(tmp_path: Path) -> None:
    prepare_folder("disk.dir", tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_folder_open_to_everyone_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """It may be /tmp or /dev/shm, named by mistake: its mode is not ours to change."""
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match="any user may write") as caught:
        prepare_folder("host.arena_dir", tmp_path)
    assert caught.value.key == "host.arena_dir"
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o1777


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created"):
        prepare_folder("disk.dir", tmp_path / "file" / "x")


def test_a_socket_is_bound_only_where_no_other_user_can_replace_it(tmp_path: Path) -> None:
    """Not in a folder below one that all may write to, either: they could move it away."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match=f"other users may write to {shared} .* chmod go-w"):
        prepare_socket_folder(shared / "mine")
    assert list(shared.iterdir()) == []
    shared.chmod(0o1777)
    prepare_socket_folder(shared / "mine")
    assert stat.S_IMODE((shared / "mine").stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="any user may write there") as caught:
        prepare_socket_folder(shared)
    assert caught.value.key == "server.socket"


def test_second_holder_is_refused_and_learns_the_first_ones_pid(tmp_path: Path) -> None:
    with locked(tmp_path) as path:
        assert path.read_text() == f"{os.getpid()}\n"
        with pytest.raises(AlreadyRunningError) as caught, locked(tmp_path):
            pass
        assert caught.value.pid == os.getpid()
        assert "give this one another disk.dir (--disk-dir)" in str(caught.value)
    with locked(tmp_path):
        pass


def test_the_second_on_a_socket_is_refused_before_anybody_listens(tmp_path: Path) -> None:
    """Two that start together find neither the other's socket nor an answer there."""
    with locked_socket(tmp_path / "s"):
        with pytest.raises(ConfigError, match=f"pid {os.getpid()} .*--socket") as caught, locked_socket(tmp_path / "s"):
            pass
        assert caught.value.key == "server.socket"
        with locked_socket(tmp_path / "other"):
            pass
    with locked_socket(tmp_path / "s"):
        pass


def test_stale_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert remove_stale_socket(path)
    assert not path.exists()
    assert not remove_stale_socket(path)


def test_living_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        with pytest.raises(ConfigError, match="another daemon answers"):
            remove_stale_socket(path)
    assert path.exists()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        remove_stale_socket(path)
    assert path.read_text() == "mine"
