"""What `kvtier export` may write over.

`export NAME /dev/full --force` replaced the device node by the bundle: for every program on the machine.
"""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.client.admin import AdminClient
from tests.unit.cli import hostile
from tests.unit.cli.conftest import Kvtier
from tests.unit.cli.hostile import HostileDaemon


@pytest.fixture(autouse=True)
def daemon(tmp_path: Path) -> Iterator[HostileDaemon]:
    with hostile.serving(HostileDaemon(text="bundle"), tmp_path / "s") as fake:
        yield fake


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("only root makes device nodes")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def make_link(path: Path) -> None:
    (path.parent / "mine").write_text("mine")
    path.symlink_to("mine")


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (make_device, "is a device"),
        (os.mkfifo, "is a pipe"),
        (make_socket, "is a socket"),
        (Path.mkdir, "is a folder; name a file in it"),
        (make_link, "is a symbolic link to mine; name the file itself"),
        (lambda path: path.symlink_to("nowhere"), "is a symbolic link to nowhere"),
        (lambda path: path.symlink_to("/dev/full"), "is a symbolic link to /dev/full"),
    ],
    ids=["device", "pipe", "socket", "folder", "link to a file", "dangling link", "link to a device"],
)
def test_only_regular_files_are_replaced(
    make: Callable[[Path], object], says: str, force: tuple[str, ...], kvtier: Kvtier, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    make(target)
    before = target.lstat()
    result = kvtier("export", "p", target, *force)
    said = " ".join(result.output.split())
    assert (result.exit_code, says in said) == (2, True), said
    assert "--force to" not in said, "it would not help"
    after = target.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    assert not (tmp_path / "mine").exists() or (tmp_path / "mine").read_text() == "mine"


def test_a_name_as_long_as_names_may_be(kvtier: Kvtier, tmp_path: Path) -> None:
    """The temporary file beside it had a longer name, which the file system refused."""
    target = tmp_path / ("x" * 255)
    assert kvtier("export", "p", target).exit_code == 0
    assert target.read_text() == "bundle"


@pytest.mark.parametrize(
    ("appears", "force"), [(Path.touch, ()), (os.mkfifo, ("--force",))], ids=["a file", "a pipe, in spite of --force"]
)
def test_what_appears_meanwhile_is_not_replaced_either(
    appears: Callable[[Path], object],
    force: tuple[str, ...],
    kvtier: Kvtier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, original = tmp_path / "target", AdminClient.export

    def slow(self: AdminClient, request: object) -> Iterator[bytes]:
        yield from original(self, request)  # type: ignore[arg-type]
        appears(target)

    monkeypatch.setattr(AdminClient, "export", slow)
    assert kvtier("export", "p", target, *force).exit_code == 2
    assert target.stat().st_size == 0
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
