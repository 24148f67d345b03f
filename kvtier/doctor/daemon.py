"""The daemon as its clients see it: socket, answers, engines."""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier._pb.cache_pb2 import DaemonStatus, PromptStatus
from kvtier.client.address import usable_socket_path
from kvtier.client.admin import AdminClient, RemoteError
from kvtier.client.trusted_socket import open_trusted
from kvtier.doctor.report import CheckResult, Status, fail, ok, skipped, warn
from kvtier.errors import DaemonSilentError, KvtierError, UntrustedSocketError
from kvtier.version import __version__

_USUAL_PLACES = (("/tmp", "kvtier-[0-9]*"), ("/run/user", "*/kvtier"), ("/run", "kvtier"))
_DAMAGE_COUNTERS = ("chunks_damaged", "packs_quarantined")
_SHOWN_CHARS = 120
_ATTACH = "start vLLM with the KVTierConnector, with the same $KVTIER_SOCKET and as the same user (see README)"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a daemon.

    Attributes:
        status: None if no daemon answered.
        prompts: The prompts that it knows.
        finding: Whether it answered.
    """

    status: DaemonStatus | None
    prompts: tuple[PromptStatus, ...]
    finding: CheckResult


def ask_daemon(socket: Path, daemon_uid: int | None, socket_findings: Sequence[CheckResult]) -> Answer:
    """Ask for status and prompts, unless there is no socket or it is not trusted."""
    failed = {finding.id for finding in socket_findings if finding.status is Status.FAIL}
    if failed:
        why = "the socket is not trusted" if "socket.trusted" in failed else "there is no socket to ask at"
        return Answer(status=None, prompts=(), finding=skipped("daemon.answers", why))
    try:
        with AdminClient(socket, daemon_uid=daemon_uid) as client:
            status, prompts = client.status(), tuple(client.list())
    except RemoteError as exc:
        remedy = "run daemon and CLI of the same version; the daemon's log may say more"
        found = f"the daemon at {socket} answers, but refuses to list what it holds: {exc}"
        return Answer(status=None, prompts=(), finding=fail("daemon.answers", found, remedy))
    except DaemonSilentError as exc:
        found = f"no daemon answers at {socket}: {exc.problem}"
        return Answer(status=None, prompts=(), finding=fail("daemon.answers", found, exc.remedy))
    except KvtierError as exc:
        remedy = f"start it with KVTIER_SOCKET={socket}; if it was started, its log says why it ended"
        return Answer(status=None, prompts=(), finding=fail("daemon.answers", str(exc), remedy))
    found = f"kvtier {status.version}, pid {status.pid}, at {socket}"
    return Answer(status=status, prompts=prompts, finding=ok("daemon.answers", found))


def check_socket(socket: Path, daemon_uid: int | None = None) -> list[CheckResult]:
    """Check path, owner and mode of the socket, and the uid of the process that listens."""
    try:
        socket = usable_socket_path(socket)
    except ValueError as exc:
        remedy = "name the daemon's with --socket or $KVTIER_SOCKET"
        return [fail("socket.path", f"{str(socket)[:_SHOWN_CHARS]}: {exc}", remedy)]
    trusted = check_trusted(socket, daemon_uid)
    refused = [trusted] if trusted.status is Status.FAIL else []
    try:
        facts = socket.lstat()
    except FileNotFoundError:
        remedy = (
            "start `kvtier-daemon`, or name its socket with --socket or $KVTIER_SOCKET (containers: mount its folder)"
        )
        return [fail("socket.path", f"there is no {socket}", remedy), *refused, *_others(socket)]
    except OSError as exc:
        remedy = f"run as the daemon's user, or give uid {os.getuid()} access to {socket.parent}"
        found = f"{socket} cannot be inspected: {exc.strerror}"
        return [fail("socket.path", found, remedy), *refused, *_others(socket)]
    if not stat.S_ISSOCK(facts.st_mode):
        return [fail("socket.path", f"{socket} is not a socket", "remove it, or choose another path with --socket")]
    return [ok("socket.path", str(socket)), check_owner(socket, facts.st_uid, facts.st_mode), trusted]


def check_owner(socket: Path, owner: int, mode: int) -> CheckResult:
    """Judge owner and mode: every user who may write to the socket may pin, evict and read prompts."""
    if owner != os.getuid():
        remedy = "run daemon, vLLM and CLI as one user: the arenas are readable for their owner alone"
        return warn("socket.owner", f"{socket} belongs to uid {owner}, you are uid {os.getuid()}", remedy)
    if mode & stat.S_IWOTH and socket.parent.stat().st_mode & stat.S_IXOTH:
        remedy = f"chmod 700 {socket.parent}: every user who reaches the socket may read and evict prompts"
        return warn("socket.owner", f"every user may connect to {socket}", remedy)
    return ok("socket.owner", f"uid {owner}, mode {stat.S_IMODE(mode):04o}")


def check_trusted(socket: Path, daemon_uid: int | None) -> CheckResult:
    """Judge the listening process, and who could replace it: clients trust our uid, root and `daemon_uid` alone."""
    try:
        open_trusted(socket, daemon_uid).close()
    except UntrustedSocketError as exc:
        return fail("socket.trusted", exc.found, exc.remedy)
    except OSError as exc:
        return skipped("socket.trusted", f"no process can be reached there: {exc.strerror or exc}")
    return ok("socket.trusted", "yours, root's or of the uid that you named")


def check_daemon(status: DaemonStatus | None) -> list[CheckResult]:
    """Judge the status of the daemon."""
    if status is None:
        checks = ("daemon.version", "daemon.engines", "daemon.disk_tier", "daemon.damage", "daemon.metrics")
        return [skipped(check, "no daemon answers") for check in checks]
    return [
        check_version(status),
        check_engines(status),
        check_disk_tier(status),
        check_damage(status),
        check_metrics(status),
    ]


def check_version(status: DaemonStatus) -> CheckResult:
    """Compare the versions of daemon and CLI."""
    if status.version != __version__:
        found = f"the daemon is kvtier {status.version}, this is {__version__}"
        return warn("daemon.version", found, "restart the daemon with the kvtier that is installed")
    return ok("daemon.version", __version__)


def check_engines(status: DaemonStatus) -> CheckResult:
    """Judge the sessions."""
    lost = [session for session in status.sessions if session.quarantined]
    if lost:
        found = (
            f"{len(lost)} lost engines of which a process still runs: pids {', '.join(str(each.pid) for each in lost)}"
        )
        return warn("daemon.engines", found, "end these processes: their arena slots stay in quarantine until then")
    if not status.sessions:
        return warn("daemon.engines", "none attached", _ATTACH)
    return ok("daemon.engines", f"{len(status.sessions)} attached")


def check_disk_tier(status: DaemonStatus) -> CheckResult:
    """Judge the circuit breaker of the disk tier."""
    if status.disk.latched:
        remedy = f"check the disk of {status.disk.location} (dmesg, smartctl); a probe switches the tier on again"
        return fail("daemon.disk_tier", f"switched off: {status.disk.latched}", remedy)
    return ok("daemon.disk_tier", "in use")


def check_damage(status: DaemonStatus) -> CheckResult:
    """Judge the counters of damage."""
    counted = {name: status.counters[name] for name in _DAMAGE_COUNTERS if status.counters.get(name)}
    if counted:
        found = ", ".join(f"{name} {number}" for name, number in counted.items())
        remedy = "run `kvtier fsck --deep`, and check the disk; damaged chunks are computed and stored again"
        return warn("daemon.damage", f"since the daemon started: {found}", remedy)
    return ok("daemon.damage", "none since the daemon started")


def check_metrics(status: DaemonStatus) -> CheckResult:
    """Judge whether Prometheus can scrape it."""
    if status.metrics_problem:
        remedy = "correct that and restart the daemon; it serves engines and commands meanwhile"
        return warn("daemon.metrics", status.metrics_problem, remedy)
    if not status.metrics_url:
        return skipped("daemon.metrics", "metrics.listen is off, or the daemon is still starting")
    return ok("daemon.metrics", status.metrics_url)


def _others(socket: Path) -> list[CheckResult]:
    others = {folder: uid for folder, uid in _owners_of_usual_places().items() if folder != socket.parent}
    if not others:
        return [ok("socket.others", "none in the usual places")]
    found = ", ".join(f"{folder} (uid {uid})" for folder, uid in others.items())
    remedy = "if your daemon is one of these, name its socket with --socket or $KVTIER_SOCKET, and run as its user"
    return [warn("socket.others", f"daemons ran elsewhere: {found}", remedy)]


def _owners_of_usual_places() -> dict[Path, int]:
    owners = {}
    for root, pattern in _USUAL_PLACES:
        for folder in sorted(Path(root).glob(pattern)):
            with suppress(OSError):  # removed meanwhile, or not readable for us
                owners[folder] = folder.stat().st_uid
    return owners
