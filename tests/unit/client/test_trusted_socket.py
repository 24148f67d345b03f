"""Who may be on the other end of the socket, and that a connection never leads to any other."""

import os
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from kvtier import folders
from kvtier._pb.cache_pb2 import DaemonStatus, GetStatusRequest, PinRequest, PromptStatus
from kvtier._pb.cache_pb2_grpc import CacheServiceServicer, CacheServiceStub, add_CacheServiceServicer_to_server
from kvtier.client import daemon_connection
from kvtier.client.address import DAEMON_UID_VARIABLE, MAX_UID, default_daemon_uid
from kvtier.client.admin import AdminClient
from kvtier.client.trusted_socket import TrustedSocket, open_trusted, peer_uid
from kvtier.errors import ConfigError, DaemonUnreachableError, UntrustedSocketError
from kvtier.folders import exposure, trusted_uids

OTHER = 4711
ANOTHER = 4712


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


@pytest.fixture
def listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener


def says(uid: int) -> Callable[[socket.socket], int]:
    return lambda connection: uid


def test_the_kernel_says_who_listens(path: Path, listener: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert peer_uid(client) == os.geteuid()


@pytest.mark.parametrize("uid", [os.geteuid(), 0, OTHER])
def test_we_root_and_the_one_named_are_trusted(path: Path, listener: socket.socket, uid: int) -> None:
    with open_trusted(path, OTHER, says(uid)) as trusted:
        assert trusted.is_current()


@pytest.mark.parametrize("daemon_uid", [None, ANOTHER])
def test_another_listener_is_refused_without_a_byte(
    path: Path, listener: socket.socket, daemon_uid: int | None
) -> None:
    with pytest.raises(UntrustedSocketError) as caught:
        open_trusted(path, daemon_uid, says(OTHER))
    error = caught.value
    assert (error.socket, error.uid, error.expected) == (path, OTHER, trusted_uids(daemon_uid))
    for part in (str(path), f"uid {OTHER} listens there", f"KVTIER_DAEMON_UID={OTHER}", *map(str, error.expected)):
        assert part in str(error)
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(1) == b"", "the connection ended without a byte"


def test_a_refusal_leaves_no_descriptor(path: Path, listener: socket.socket) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        with pytest.raises(UntrustedSocketError):
            open_trusted(path, None, says(OTHER))
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def mode_of(folder: Path, mode: int) -> Path:
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    return folder


@pytest.mark.parametrize(("mode", "is_safe"), [(0o700, True), (0o755, True), (0o1777, True), (0o777, False)])
@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_a_folder_on_the_way_that_all_may_write_to(tmp_path: Path, mode: int, is_safe: bool, below: str) -> None:
    folder = mode_of(tmp_path / "x", mode)
    (folder / below).mkdir(parents=True, exist_ok=True)
    found = exposure(folder / below, trusted_uids())
    assert (found is None) is is_safe
    if found:
        assert f"may write to {folder} " in found.problem
        assert f"chmod go-w {folder}" in found.remedy


@pytest.mark.parametrize(("gid", "is_safe"), [(os.geteuid(), True), (0, True), (OTHER, True), (ANOTHER, False)])
def test_a_group_may_write_when_it_is_a_trusted_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gid: int, is_safe: bool
) -> None:
    """Where umask is 002, users have a group of their own with their own number."""
    folder = mode_of(tmp_path / "x", 0o775)
    look = Path.lstat

    def lstat(place: Path) -> os.stat_result:
        facts = [*look(place)]
        if place == folder:
            facts[5] = gid
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert (exposure(folder, trusted_uids(OTHER)) is None) is is_safe


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mode_of(tmp_path / "x", 0o700)
    look = Path.lstat

    def lstat(place: Path) -> os.stat_result:
        facts = [*look(place)]
        facts[4] = OTHER if place == folder else facts[4]
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "lstat", lstat)
    found = exposure(folder / "not" / "yet", trusted_uids())
    assert found is not None
    assert found.problem == f"{folder} belongs to uid {OTHER}"
    assert exposure(folder, trusted_uids(OTHER)) is None


@pytest.mark.parametrize(
    ("uid_map", "is_safe"),
    [("0 1000 1\n", True), ("0 1000 1\n1 100000 65536\n", False), ("0 0 4294967295\n", False), ("", True)],
    ids=["only we are known", "rootless container", "no namespace", "nothing is mapped yet"],
)
def test_where_root_is_unknown_its_folders_show_as_the_overflow_uids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid_map: str, is_safe: bool
) -> None:
    """In `unshare --user --map-root-user` of an ordinary user, / belongs to 65534. Elsewhere that is another user."""
    folder = mode_of(tmp_path / "x", 0o700)
    (tmp_path / "map").write_text(uid_map)
    (tmp_path / "overflow").write_text(f"{OTHER}\n")
    monkeypatch.setattr(folders, "_UID_MAP", tmp_path / "map")
    monkeypatch.setattr(folders, "_OVERFLOW_UID", tmp_path / "overflow")
    look = Path.lstat

    def lstat(place: Path) -> os.stat_result:
        facts = [*look(place)]
        facts[4] = OTHER if place == folder else facts[4]
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert (exposure(folder, trusted_uids()) is None) is is_safe


def test_a_link_is_looked_at_where_it_is_and_where_it_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safe, everyones = mode_of(tmp_path / "safe", 0o700), mode_of(tmp_path / "all", 0o777)
    (safe / "link").symlink_to(everyones)
    (everyones / "link").symlink_to(safe)
    for folder in (safe / "link", everyones / "link"):
        found = exposure(folder, trusted_uids())
        assert found is not None
        assert str(everyones) in found.problem


def test_a_linked_socket_is_judged_by_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    everyones = mode_of(tmp_path / "all", 0o777)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(everyones / "d.sock"))
        listener.listen()
        (tmp_path / "link").symlink_to(everyones / "d.sock")
        with pytest.raises(UntrustedSocketError, match="may write to"):
            open_trusted(tmp_path / "link", None)


class Answering(CacheServiceServicer):
    """A daemon that answers GetStatus and Pin at a path, with a pid of its own."""

    def __init__(self, path: Path, pid: int) -> None:
        self._pid, self.num_calls = pid, 0
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        add_CacheServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def GetStatus(self, request: GetStatusRequest, context: object) -> DaemonStatus:
        self.num_calls += 1
        return DaemonStatus(pid=self._pid)

    def Pin(self, request: PinRequest, context: object) -> PromptStatus:
        self.num_calls += 1
        return PromptStatus()

    def stop(self) -> None:
        self._server.stop(None).wait()


def test_a_reconnect_by_grpc_itself_does_not_reach_who_took_the_path_over(path: Path) -> None:
    first = Answering(path, 1)
    with open_trusted(path, None) as trusted, trusted.channel() as channel:
        stub = CacheServiceStub(channel)
        assert stub.GetStatus(GetStatusRequest(), timeout=10).pid == 1
        first.stop()
        second = Answering(path, 2)
        assert not trusted.is_current()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Pin(PinRequest(name="p", tokens=[1]), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert second.num_calls == 0
        second.stop()


def test_a_client_checks_again_after_each_restart_of_the_daemon(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Path] = []

    def recording(socket_path: Path, daemon_uid: int | None) -> TrustedSocket:
        checked.append(socket_path)
        uid = os.geteuid() if len(checked) < 3 else OTHER
        return open_trusted(socket_path, daemon_uid, says(uid))

    monkeypatch.setattr(daemon_connection, "open_trusted", recording)
    with AdminClient(path) as client:
        for pid in (1, 2):
            daemon = Answering(path, pid)
            assert [client.status().pid, client.status().pid] == [pid, pid]
            daemon.stop()
        assert checked == [path, path]
        squatter = Answering(path, 3)
        with pytest.raises(UntrustedSocketError):
            client.pin(PinRequest(name="p", tokens=[1]))
        assert squatter.num_calls == 0
        squatter.stop()


def test_descriptors_of_sockets_that_were_replaced_are_closed(path: Path) -> None:
    def open_fds() -> int:
        return sum(os.path.realpath(link).startswith(str(path)) for link in Path("/proc/self/fd").iterdir())

    with AdminClient(path) as client:
        for pid in range(3):
            daemon = Answering(path, pid)
            assert client.status().pid == pid
            assert open_fds() == 1
            daemon.stop()
    assert open_fds() == 0
    with pytest.raises(ValueError, match="closed"):
        client.status()


def test_no_more_descriptors_is_said(path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", refuse)
    with AdminClient(path) as client, pytest.raises(DaemonUnreachableError, match="ulimit -n"):
        client.status()


def test_the_configured_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DAEMON_UID_VARIABLE, raising=False)
    assert default_daemon_uid() is None
    for text, uid in (("", None), ("0", 0), ("1000", 1000), (str(MAX_UID), MAX_UID)):
        monkeypatch.setenv(DAEMON_UID_VARIABLE, text)
        assert default_daemon_uid() == uid
    for text in ("-1", "root", "1.0", " 1", "²", str(MAX_UID + 1), "9" * 5000):
        monkeypatch.setenv(DAEMON_UID_VARIABLE, text)
        with pytest.raises(ConfigError, match="KVTIER_DAEMON_UID"):
            default_daemon_uid()
