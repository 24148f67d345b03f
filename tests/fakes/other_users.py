"""Real users and groups of this machine, made for a test by root and removed after it, and commands run as them."""

import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class User:
    """A user of this machine; `name` is that of its own group too.

    With `groups` there need be no such user: as in a container, it has these groups, whatever /etc/group says.
    """

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] | None = None


def why_not() -> str:
    """Return what keeps this machine from running a command as another user; empty: nothing."""
    if os.geteuid() != 0:
        return "only root can make users; run this as root, in a container"
    try:
        done = subprocess.run(
            as_user(User("", 65534, 65534, groups=()), [sys.executable, "-c", "import kvtier"]),
            cwd=ROOT, capture_output=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except OSError as exc:
        return f"{exc.filename} is missing (Debian: passwd, util-linux)"
    return "" if done.returncode == 0 else f"no other user can run this Python: {done.stderr.decode()[-200:]}"


@contextmanager
def made_users(*roles: str) -> Iterator[dict[str, User]]:
    """Make a user for each role, with a group of its own name; remove them at the end."""
    mark, users = secrets.token_hex(3), dict[str, User]()
    try:
        for role in roles:
            name = f"kvt-{role[:8]}-{mark}"
            _run("useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", name)
            uid, gid = (int(_run("id", option, name)) for option in ("-u", "-g"))
            users[role] = User(name, uid, gid)
        yield users
    finally:
        for user in users.values():
            subprocess.run(["userdel", user.name], capture_output=True, timeout=TIMEOUT_S, check=False)


@contextmanager
def made_group(*members: User) -> Iterator[tuple[str, int]]:
    """Make a group with these members; yield its name and gid."""
    name = f"kvt-group-{secrets.token_hex(3)}"
    _run("groupadd", "--system", name)
    try:
        for member in members:
            _run("usermod", "-aG", name, member.name)
        yield name, int(_run("getent", "group", name).split(":")[2])
    finally:
        subprocess.run(["groupdel", name], capture_output=True, timeout=TIMEOUT_S, check=False)


def as_user(user: User, command: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Return a command that becomes another: as this user, in its groups, without any capability.

    Where a folder above this Python or the code is root's alone (/root), a mount namespace shows them to the user.
    """
    variables = [f"{name}={value}" for name, value in ({"HOME": "/nonexistent"} | dict(environment or {})).items()]
    groups = "--init-groups"
    if user.groups is not None:
        groups = f"--groups={','.join(map(str, user.groups))}" if user.groups else "--clear-groups"
    switch = [
        shutil.which("setpriv") or "setpriv",
        f"--reuid={user.uid}",
        f"--regid={user.gid}",
        groups,
        "--inh-caps=-all",
        "env",
        *variables,
    ]
    needed = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT.resolve()]
    hidden = {path: blocked for path in dict.fromkeys(needed) if (blocked := _blocked_at(path))}
    if not hidden:
        return [*switch, *command]
    aside = "/tmp/kvtier-test-aside"
    steps = [f"umask 022 && mkdir -p {aside}", f"mount -t tmpfs none {aside}"]
    for number, path in enumerate(hidden):
        steps += [f"mkdir {aside}/{number}", f"mount --bind {shlex.quote(str(path))} {aside}/{number}"]
    steps += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(blocked))}" for blocked in set(hidden.values())]
    for number, path in enumerate(hidden):
        place = shlex.quote(str(path))
        steps += [f"mkdir -p {place}", f"mount --move {aside}/{number} {place}"]
    return [
        shutil.which("unshare") or "unshare",
        "--mount",
        "sh",
        "-c",
        " && ".join([*steps, 'exec "$@"']),
        "sh",
        *switch,
        *command,
    ]


def run_as(
    user: User, *command: str, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command as a user to its end."""
    return subprocess.run(
        as_user(user, command, environment),
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def _blocked_at(path: Path) -> Path | None:
    """Return the highest folder on the way that other users may not pass through."""
    return next((each for each in (*reversed(path.parents), path) if not each.stat().st_mode & 0o001), None)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout.strip()
