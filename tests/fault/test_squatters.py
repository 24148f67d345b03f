"""Another user's process at the daemon's socket: no client sends it a byte, and each says whom it found there.

Clients without XDG_RUNTIME_DIR look below /tmp, where every user may be first. A squatter's fake daemon got the tokens
of `kvtier pin`, and engines attached to it.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier._pb import engine_pb2 as pb
from kvtier._pb.cache_pb2 import PinRequest
from kvtier.cli.app import app
from kvtier.client.admin import AdminClient
from kvtier.client.engine_session import EngineSession
from kvtier.core.arena_format import ArenaGeometry
from kvtier.daemon.main import app as daemon_app
from kvtier.doctor import all_checks
from kvtier.doctor.engine_environment import EngineEnvironment
from kvtier.errors import DaemonUnreachableError, UntrustedSocketError
from tests.fakes.fake_daemon import FakeDaemon
from tests.fakes.squatter import OTHER_UID, Squatter, squatting
from tests.fakes.waiting import wait_for
from tests.unit.client.test_engine_session import Recorder

GEOMETRY = ArenaGeometry(arena_id=b"A" * 16, num_slots=64, row_bytes=4096, num_ranks=2, rank_bytes=2048)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder like /tmp: everyone's, and sticky."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["folder", "socket"])
def socket_path(public: Path, request: pytest.FixtureRequest) -> Path:
    """Where the squatter is: in a folder of its own, as below /tmp, or right in the public one."""
    return public / f"kvtier-{os.getuid()}" / "daemon.sock" if request.param == "folder" else public / "daemon.sock"


@pytest.fixture
def squatter(socket_path: Path) -> Iterator[Squatter]:
    with squatting(socket_path) as squatter:
        yield squatter


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["status"],
        ["show", "p"],
        ["unpin", "p"],
        ["evict", "--all"],
        ["fsck"],
        ["export", "p", "p.bundle"],
        ["warm"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_command_sends_a_byte(squatter: Squatter, socket_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["--socket", str(socket_path), *arguments])
    assert squatter.received() == b""
    assert result.exit_code == 1
    assert str(socket_path) in result.stderr
    assert f"uid {OTHER_UID}" in result.stderr
    assert "KVTIER_DAEMON_UID" in result.stderr


def test_the_uid_that_was_named_is_talked_to(squatter: Squatter, socket_path: Path) -> None:
    with (
        AdminClient(socket_path, daemon_uid=OTHER_UID, timeout_s=0.5) as client,
        pytest.raises(DaemonUnreachableError, match="no answer"),
    ):
        client.status()
    assert squatter.received().startswith(b"PRI * HTTP/2.0")


def test_a_prompts_tokens_stay_here(squatter: Squatter, socket_path: Path) -> None:
    with AdminClient(socket_path) as client, pytest.raises(UntrustedSocketError):
        client.pin(PinRequest(name="p", tokens=range(1000)))
    assert squatter.received() == b""


def test_a_daemon_does_not_bind_where_another_user_could_replace_its_socket(public: Path, tmp_path: Path) -> None:
    folder = public / f"kvtier-{os.getuid()}"
    folder.mkdir(mode=0o755)
    os.chown(folder, OTHER_UID, OTHER_UID)
    flags = ["--socket", str(folder / "daemon.sock"), "--disk-dir", str(tmp_path / "d")]
    result = CliRunner().invoke(daemon_app, [*flags, "--arena-dir", str(tmp_path / "a"), "--host-bytes", "4MiB"])
    assert result.exit_code == 2
    assert f"{folder} belongs to uid {OTHER_UID}, who could replace the socket" in result.stderr
    assert list(folder.iterdir()) == []


def test_the_doctor_says_who_is_there_and_not_that_no_daemon_answers(
    squatter: Squatter, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_checks, "probe_environment", lambda python: EngineEnvironment())
    result = CliRunner().invoke(app, ["--socket", str(socket_path), "doctor", "--json"])
    assert squatter.received() == b""
    found = {finding["id"]: finding for finding in json.loads(result.stdout)}
    assert found["socket.trusted"]["status"] == "fail"
    assert f"uid {OTHER_UID}" in found["socket.trusted"]["found"]
    assert found["daemon.answers"]["status"] == "skipped"
    assert result.exit_code == 1


def test_an_engine_stays_away_says_so_once_and_attaches_when_the_squatter_has_gone(
    socket_path: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder()
    attempts: list[int] = []

    def make_hello(turn: int) -> pb.Hello:
        attempts.append(turn)
        return pb.Hello(engine_id="secret")

    session = EngineSession(socket_path, make_hello, recorder)
    try:
        with squatting(socket_path) as squatter:
            session.start()
            wait_for(lambda: len(attempts) > 3)
            assert squatter.received() == b""
            assert not recorder.attached
        shutil.rmtree(socket_path.parent) if socket_path.parent.owner() != "root" else socket_path.unlink()
        socket_path.parent.mkdir(mode=0o700, exist_ok=True)
        daemon = FakeDaemon(tmp_path, GEOMETRY)
        daemon.socket = socket_path
        daemon.start()
        wait_for(lambda: bool(recorder.attached))
        daemon.stop()
    finally:
        session.close()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert f"uid {OTHER_UID}" in errors[0]
    assert "vLLM serves without kvtier" in errors[0]
