"""`server.group`: engines and operators of another user in the group use the daemon; a third user gets nothing.

Real users of this machine, a real daemon as one of them, the real CLI and an engine of another one.
"""

import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier._pb.cache_pb2 import GetPromptRequest, PinRequest, PromptStatus
from tests.fakes.daemon_process import daemon_command
from tests.fakes.operator import stub_of
from tests.fakes.other_users import ROOT, User, as_user, made_group, made_users, run_as, why_not
from tests.fakes.two_users import World, world_of
from tests.fakes.waiting import wait_for
from tests.unit.deployment.contained_engine import KEYS

pytestmark = [pytest.mark.skipif(bool(reason := why_not()), reason=reason), pytest.mark.timeout(300)]

PASSAGE, PRIVATE = 0o710, 0o700
READ_ONLY = {"connect", "map arena", "hold session"}
"""What a member can do of `tests.fakes.intruder`; a user outside the group can do nothing of it."""


@pytest.fixture(scope="module")
def users() -> Iterator[tuple[User, User, User, str, int]]:
    with (
        made_users("daemon", "engine", "other") as made,
        made_group(made["daemon"], made["engine"]) as (name, gid),
    ):
        yield made["daemon"], made["engine"], made["other"], name, gid


@pytest.fixture
def world(users: tuple[User, User, User, str, int]) -> Iterator[World]:
    with world_of(users) as world:
        yield world


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def engine_command(world: World) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.fakes.member_engine", str(world.config.server.socket), str(world.daemon.uid))


def test_an_engine_and_an_operator_of_another_user_in_the_group_use_the_daemon(world: World) -> None:
    """The engine takes a pin up, stores its chunks and reads them back; the operator pins, lists, exports, unpins."""
    config, tokens = world.config, world.folder / "tokens.json"
    tokens.write_text(json.dumps(list(range(80))))
    tokens.chmod(0o644)
    with world.serving("log"):
        code, printed = world.cli(world.engine, "pin", "p", "--tokens", str(tokens), "--model", "model", "--no-warm")
        assert (code, "p" in printed) == (0, True), printed
        done = run_as(world.engine, *engine_command(world))
        assert done.stdout.split() == [str(len(KEYS))], done.stderr
        with stub_of(config.server.socket) as stub:

            def is_durable() -> bool:
                state: int = stub.GetPrompt(GetPromptRequest(name="p")).state
                return state == PromptStatus.DURABLE

            wait_for(is_durable)
        for arguments in (["list"], ["status"], ["show", "p"]):
            code, printed = world.cli(world.engine, *arguments)
            assert code == 0, printed
        bundle = tokens.parent / "mine"
        bundle.mkdir()
        shutil.chown(bundle, world.engine.uid)
        code, printed = world.cli(world.engine, "export", "p", str(bundle / "p.bundle"))
        assert code == 0, printed
        code, printed = world.cli(world.engine, "import", str(bundle / "p.bundle"), "--name", "again")
        assert code == 0, printed
        code, printed = world.cli(world.engine, "unpin", "p")
        assert code == 0, printed
        assert mode_of(config.server.socket) == 0o660
        assert {mode_of(config.server.socket.parent), mode_of(config.host.arena_dir)} == {PASSAGE}
    private = [config.disk.disk_dir, *config.disk.disk_dir.rglob("*")]
    assert {mode_of(path) & 0o077 for path in private} == {0}


def test_what_a_member_can_do_and_that_a_stranger_can_do_nothing(world: World) -> None:
    """A member uses what it was named; it cannot look around, replace a file, or lock the daemon out."""
    with world.serving("log"), session_of(world):
        assert {name for name, outcome in world.attempts(world.engine).items() if outcome == "done"} == READ_ONLY
        outcomes = world.attempts(world.outsider)
        assert {name for name, outcome in outcomes.items() if outcome == "done"} == set()
        assert set(outcomes.values()) <= {"EACCES", "EPERM"}
        code, printed = world.cli(world.outsider, "list")
        assert (code, "permission denied" in printed, "server.group" in printed) == (3, True, True), printed
        done = run_as(world.outsider, *engine_command(world))
        assert done.returncode != 0
        assert "PermissionError" in done.stderr
        code, printed = world.cli(world.engine, "list")
        assert code == 0, printed


@contextmanager
def session_of(world: World) -> Iterator[None]:
    """Keep an engine of the other user attached."""
    with stub_of(world.config.server.socket) as stub:
        stub.Pin(PinRequest(name="p", tokens=range(80), model="model"))
    process = subprocess.Popen(
        as_user(world.engine, [*engine_command(world), "--stay"]),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().split() == [str(len(KEYS)).encode()]
        yield
    finally:
        process.communicate(timeout=60)


def test_numbers_without_names_do_as_in_containers() -> None:
    """`group_add` and `supplementalGroups` give a process groups that /etc/group does not know."""
    gid, free = 32_000, 31_000
    member, other, daemon = (
        User("", free + number, free + number, groups) for number, groups in enumerate([(gid,), (), (gid,)])
    )
    with world_of((daemon, member, other, str(gid), gid)) as world, world.serving("log"), session_of(world):
        code, printed = world.cli(member, "list")
        assert code == 0, printed
        code, printed = world.cli(other, "list")
        assert (code, "permission denied" in printed) == (3, True), printed


def test_a_client_that_was_not_named_the_daemons_uid_sends_nothing(world: World) -> None:
    with world.serving("log"):
        code, printed = world.cli(world.engine, "list", uid=0)
        assert (code, f"KVTIER_DAEMON_UID={world.daemon.uid}" in printed) == (1, True), printed


def test_without_the_group_folders_and_kept_arenas_are_private_again(world: World) -> None:
    """`keep_arena` leaves an arena that members may map; the next start takes it over as one of its user alone."""
    config = world.config
    with world.serving("log", KVTIER_HOST_KEEP_ARENA="true"), session_of(world):
        (arena,) = config.host.arena_dir.glob("arena-*")
        assert mode_of(arena) == 0o660
    assert arena.exists()
    with world.serving("log-2", KVTIER_SERVER_GROUP="off"):
        assert arena.exists()
        assert mode_of(arena) == 0o600
        assert {mode_of(config.server.socket.parent), mode_of(config.host.arena_dir)} == {PRIVATE}
        code, printed = world.cli(world.engine, "list")
        assert (code, "permission denied" in printed) == (3, True), printed
    with world.serving("log-3"):
        code, printed = world.cli(world.engine, "list")
        assert code == 0, printed


def refusal(world: World, user: User, **settings: str) -> str:
    """Start a daemon that must not start; return what it printed."""
    named = {"KVTIER_HTTP_LISTEN": "off", "KVTIER_SERVER_GROUP": world.group} | settings
    done = run_as(user, *daemon_command(world.config), environment=named)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_start_that_could_not_keep_the_promise_is_refused_with_the_remedy(world: World) -> None:
    config = world.config
    printed = refusal(world, world.daemon, KVTIER_SERVER_GROUP="no-such-group")
    assert "server.group = 'no-such-group': there is no such group; make it (`groupadd no-such-group`)" in printed
    printed = refusal(world, world.daemon, KVTIER_SERVER_GROUP=world.outsider.name)
    assert f"server.group = '{world.outsider.name}'" in printed
    assert f"is not in group {world.outsider.gid}" in printed
    assert "usermod -aG" in printed
    above = config.server.socket.parent.parent
    above.chmod(0o700)
    shutil.chown(above, world.daemon.uid)
    printed = refusal(world, world.daemon)
    assert f"members of group {world.group} may not pass through {above}" in printed
    above.chmod(0o755)
    assert {mode_of(config.server.socket.parent), mode_of(config.host.arena_dir)} == {PRIVATE}, "nothing was changed"
    (config.server.socket.parent / "other-things").touch()
    printed = refusal(world, world.daemon)
    assert f"chmod 0710 {config.server.socket.parent}" in printed
    assert mode_of(config.server.socket.parent) == PRIVATE, "it may be a home folder, named by mistake"
    (config.server.socket.parent / "other-things").unlink()
    shutil.chown(config.host.arena_dir, group=world.gid)
    config.host.arena_dir.chmod(0o770)
    printed = refusal(world, world.daemon)
    assert f"could replace files in {config.host.arena_dir}" in printed
    assert f"chmod g-w {config.host.arena_dir}" in printed
    assert list(config.host.arena_dir.glob("arena-*")) == []


def test_the_doctor_of_a_member_finds_nothing_wrong_with_the_socket(world: World) -> None:
    with world.serving("log"):
        _, printed = world.cli(world.engine, "doctor", "--json")
        found = {each["id"]: each for each in json.loads(printed[: printed.rindex("]") + 1])}
        for check in ("socket.path", "socket.owner", "socket.trusted", "daemon.answers", "host.arena_dir"):
            assert found[check]["status"] == "ok", found[check]
        assert f"for group {world.gid}, which you are in" in found["socket.owner"]["found"]
    checked = [*daemon_command(world.config), "--check-config"]
    done = run_as(world.daemon, *checked, environment={"KVTIER_SERVER_GROUP": world.outsider.name})
    assert (done.returncode, "socket.group" in done.stderr) == (1, True), done.stderr
    done = run_as(world.daemon, *checked, environment={"KVTIER_SERVER_GROUP": world.group})
    assert "socket.group" not in done.stderr
    assert f'group = "{world.group}"' in done.stdout
