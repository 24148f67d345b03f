"""What is there at a start is made private, or the start is refused."""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config.model import DaemonConfig, DiskConfig, HostConfig, RemoteConfig, ServerConfig
from kvtier.daemon import private_files
from kvtier.daemon.folder_locks import claimed
from kvtier.daemon.private_files import mend_modes, own_folders
from kvtier.errors import AlreadyRunningError, ConfigError, TierIOError
from tests.fakes.fleet_daemons import eventually

KEPT = [
    *("disk/ledger.sqlite", "disk/ledger.sqlite-wal", "disk/ledger.sqlite.damaged-20260101-000000", "disk/daemon.lock"),
    *("disk/packs/ab.kvpack", "disk/packs/ab.kvpack.tmp", "disk/packs/ab.kvpack-damaged", "disk/unclaimed/ab.kvpack"),
    *("disk/promises/a.json", "disk/promises/a.json.damaged", "disk/namespaces/n.json", "disk/quarantined/n.json"),
    *("disk/traffic/n.sketch", "disk/traffic/n.json", "disk/tmp/ab.kvpack", "disk/usage.json", "disk/scrub.json"),
    *("arena/arena-1", "arena/session-1.lock", "arena/daemon.lock", "run/.s.lock"),
    *("store/pins/a.json", "store/prompts/b.json", "store/kv/n/c.safetensors", "store/hosts/h.json"),
    *("store/collected.json", "store/.lock", "store/.tmp/x"),
]
OTHERS = ["disk/lost+found/x", "arena/psm_1", "run/other", "store/readme"]


@pytest.fixture
def config(tmp_path: Path) -> DaemonConfig:
    for name in ("run", "arena", "disk", "store"):
        (tmp_path / name).mkdir()
    return DaemonConfig(
        server=ServerConfig(socket=tmp_path / "run" / "s"),
        host=HostConfig(arena_dir=tmp_path / "arena", host_bytes=1 << 20),
        disk=DiskConfig(disk_dir=tmp_path / "disk", disk_bytes=1 << 20),
        remote=RemoteConfig(url=f"file://{tmp_path / 'store'}"),
    )


@pytest.fixture
def folder(config: DaemonConfig, tmp_path: Path) -> Path:
    """Every kind of file that kvtier keeps, and some of others, as `chmod -R go+rX` leaves them."""
    for name in (*KEPT, *OTHERS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return tmp_path


def give_to_another_user(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lstat = Path.lstat

    def as_another_users(path: Path) -> os.stat_result:
        facts = lstat(path)
        if path != target:
            return facts
        return os.stat_result((*facts[:4], os.geteuid() + 1, *facts[5:]))

    monkeypatch.setattr(Path, "lstat", as_another_users)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_of_kvtier_becomes_its_users_alone(
    config: DaemonConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_mended = mend_modes(config, own_folders(config))
    assert {name: mode_of(folder / name) & 0o077 for name in KEPT} == dict.fromkeys(KEPT, 0)
    folders = {(folder / name).parent for name in KEPT} - {folder / "run", folder / "store"}
    assert [path for path in folders if mode_of(path) != 0o700] == []
    assert {mode_of(folder / name) for name in OTHERS} == {0o644}, "what others have there is not touched"
    assert mode_of(folder / "run") == 0o755, "the socket is private, its folder may be /run"
    assert "modes_mended" in caplog.text
    assert num_mended >= len(KEPT)
    assert mend_modes(config, own_folders(config)) == 0


def test_a_start_does_so(config: DaemonConfig, folder: Path) -> None:
    with claimed(config):
        assert mode_of(folder / "disk") == 0o700
        assert mode_of(folder / "disk" / "ledger.sqlite") == 0o600


def test_a_second_start_leaves_the_files_of_a_running_daemon_alone(config: DaemonConfig, folder: Path) -> None:
    """It narrowed the modes of arenas that a group shares, before it found that another daemon runs."""
    with claimed(config):
        (folder / "arena" / "arena-1").chmod(0o660)
        with pytest.raises(AlreadyRunningError), claimed(config):
            pass
        assert stat.S_IMODE((folder / "arena" / "arena-1").stat().st_mode) == 0o660


def test_a_folder_that_others_use_too_keeps_its_mode(config: DaemonConfig, tmp_path: Path) -> None:
    """A mount point, say: it has no lock file of ours, and something else lies there."""
    (tmp_path / "disk" / "lost+found").mkdir()
    (tmp_path / "disk").chmod(0o755)
    (tmp_path / "disk" / "packs").mkdir()
    (tmp_path / "disk" / "packs").chmod(0o755)
    assert mend_modes(config, own_folders(config)) >= 1
    assert (mode_of(tmp_path / "disk"), mode_of(tmp_path / "disk" / "packs")) == (0o755, 0o700)


def test_a_start_keeps_the_mode_of_a_folder_that_others_use_too(config: DaemonConfig, tmp_path: Path) -> None:
    """The lock file that it had just made there said that kvtier alone uses the folder: a home became 0700."""
    for name in ("disk", "arena"):
        (tmp_path / name / "public_html").mkdir()
        (tmp_path / name).chmod(0o755)
    with claimed(config):
        assert [mode_of(tmp_path / name) for name in ("disk", "arena")] == [0o755, 0o755]


@pytest.mark.parametrize("name", KEPT)
def test_another_users_file_refuses_the_start(
    config: DaemonConfig, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = folder / name
    give_to_another_user(target, monkeypatch)
    with pytest.raises(ConfigError, match=f"belongs to uid {os.geteuid() + 1}; run chown") as caught:
        mend_modes(config, own_folders(config))
    keys = {"disk": "disk.dir", "arena": "host.arena_dir", "run": "server.socket", "store": "remote.url"}
    assert (caught.value.key, caught.value.value) == (keys[name.partition("/")[0]], str(target))


def test_a_lock_of_another_user_is_named_with_the_remedy(
    config: DaemonConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a daemon that was once started as root: to open it is refused before any other file is looked at."""
    target, open_file = folder / "disk" / "daemon.lock", os.open

    def refusing(path: Path | str, flags: int, mode: int = 0o777) -> int:
        if path == target:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(TierIOError, match=f"cannot open the lock {target}: Permission denied"), claimed(config):
        pass
    give_to_another_user(target, monkeypatch)
    with pytest.raises(ConfigError, match=f"belongs to uid {os.geteuid() + 1}; run chown"), claimed(config):
        pass


@pytest.mark.parametrize(
    ("error", "remedy"), [(PermissionError(1, "no"), "run chmod go-rwx"), (None, "on a file system that keeps modes")]
)
def test_a_mode_that_cannot_be_changed_refuses_the_start(
    config: DaemonConfig, folder: Path, error: OSError | None, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file system without modes, such as FAT or some network mounts, chmod fails or does nothing."""

    def chmod(path: Path, mode: int) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(Path, "chmod", chmod)
    with pytest.raises(ConfigError, match=remedy) as caught:
        mend_modes(config, own_folders(config))
    assert caught.value.key == "disk.dir"


def test_arenas_of_a_group_stay_its_members(config: DaemonConfig, folder: Path) -> None:
    """See `server.group`: everything on disk is the daemon's alone all the same."""
    shared = replace(config, server=replace(config.server, group="staff", gid=50))
    (folder / "arena" / "arena-1").chmod(0o660)
    (folder / "arena").chmod(0o710)
    mend_modes(shared, own_folders(shared))
    assert (mode_of(folder / "arena"), mode_of(folder / "arena" / "arena-1")) == (0o710, 0o660)
    assert mode_of(folder / "disk" / "ledger.sqlite") == 0o600
    assert mend_modes(shared, own_folders(shared)) == 0


def test_a_file_server_that_is_gone_does_not_keep_a_daemon_from_starting(
    config: DaemonConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls to a network file system whose server is gone do not return."""
    back, iterdir = threading.Event(), Path.iterdir

    def hanging(path: Path) -> Iterator[Path]:
        if path.name == "store":
            assert back.wait(60)
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", hanging)
    monkeypatch.setattr(private_files, "_STORE_S", 0.1)
    try:
        with claimed(config):
            assert mode_of(folder / "disk" / "ledger.sqlite") == 0o600
            assert mode_of(folder / "store" / "pins" / "a.json") == 0o644
            assert "modes_unknown" in caplog.text
    finally:
        back.set()
    eventually(lambda: mode_of(folder / "store" / "pins" / "a.json") == 0o600)


def test_what_goes_away_meanwhile_is_fine(config: DaemonConfig, folder: Path) -> None:
    (folder / "disk" / "packs" / "gone.kvpack").symlink_to(folder / "nowhere")
    assert mend_modes(config, own_folders(config))
