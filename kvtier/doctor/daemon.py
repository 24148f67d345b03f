"""The daemon as its clients see it: socket, answers, engines, pinned prompts."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtier._pb.cache_pb2 import DaemonStatus, PromptStatus, RemoteStatus
from kvtier.client.address import usable_socket_path
from kvtier.client.admin import AdminClient
from kvtier.client.remote_errors import RemoteError
from kvtier.client.trusted_socket import open_trusted
from kvtier.doctor.report import CheckResult, Status, fail, ok, skipped, warn
from kvtier.errors import DaemonSilentError, KvtierError, UntrustedSocketError
from kvtier.printable import MAX_LISTED
from kvtier.version import __version__

_USUAL_PLACES = (("/tmp", "kvtier-[0-9]*"), ("/run/user", "*/kvtier"), ("/run", "kvtier"))
_DAMAGE = (
    (
        ("damaged_chunks_disk", "tampered_chunks", "packs_set_aside"),
        "run `kvtier fsck --deep`, and check the disk; damaged chunks are computed and stored again",
    ),
    (
        ("damaged_chunks_host",),
        "test this host's memory (dmesg and EDAC say what its hardware has noticed): chunks changed while they lay "
        "there; they come from disk, or are computed again",
    ),
    (
        ("remote_damaged_chunks",),
        "test the memory of the hosts that uploaded them, and check the store that hosts share (`kvtier remote`): "
        "chunks were read twice and are not what was stored; a host that has them uploads them again",
    ),
)
"""Counters of damage, by place, and what to do."""
_ATTACH = (
    "start vLLM with the KVTierConnector and the same $KVTIER_SOCKET, as the same user or in server.group "
    "(docs/two-users.md)"
)


class Answer(NamedTuple):
    """Whether a daemon answered, and what."""

    finding: CheckResult
    status: DaemonStatus | None = None
    prompts: Sequence[PromptStatus] = ()
    remote: RemoteStatus | None = None


def ask_daemon(socket: Path, daemon_uid: int | None, socket_findings: Sequence[CheckResult]) -> Answer:
    """Ask for status, prompts and the store that hosts share, unless there is no socket or it is not trusted."""
    check = "daemon.answers"
    failed = {finding.id for finding in socket_findings if finding.status is Status.FAIL}
    if failed:
        why = "the socket is not trusted" if "socket.trusted" in failed else "there is no socket to ask at"
        return Answer(skipped(check, why))
    try:
        with AdminClient(socket, daemon_uid=daemon_uid) as client:
            status, prompts, remote = client.status(), list(client.list()), client.remote(with_hosts=False)
    except RemoteError as exc:
        remedy = "run daemon and CLI of the same version; the daemon's log may say more"
        found = f"the daemon at {socket} answers, but refuses to list what it holds: {exc}"
        return Answer(fail(check, found, remedy))
    except DaemonSilentError as exc:
        return Answer(fail(check, f"no daemon answers at {socket}: {exc.problem}", exc.remedy))
    except KvtierError as exc:
        remedy = f"start it with KVTIER_SOCKET={socket}; if it was started, its log says why it ended"
        return Answer(fail(check, str(exc), remedy))
    return Answer(ok(check, f"kvtier {status.version}, pid {status.pid}, at {socket}"), status, prompts, remote)


def check_socket(socket: Path, daemon_uid: int | None = None) -> list[CheckResult]:
    """Check path, owner and mode of the socket, and the uid of the process that listens."""
    try:
        socket = usable_socket_path(socket)
    except ValueError as exc:
        remedy = "name the daemon's with --socket or $KVTIER_SOCKET"
        return [fail("socket.path", f"{socket}: {exc}", remedy)]
    trusted = check_trusted(socket, daemon_uid)
    refused = [trusted] if trusted.status is Status.FAIL else []
    try:
        facts = socket.lstat()
    except FileNotFoundError:
        where = "name its socket with --socket or $KVTIER_SOCKET (containers: mount its folder)"
        remedy = f"start `kvtier-daemon`, or {where}"
        return [fail("socket.path", f"there is no {socket}", remedy), *refused, *_others(socket)]
    except OSError as exc:
        remedy = f"run as the daemon's user, or as a member of its server.group; you are uid {os.getuid()}"
        found = f"{socket} cannot be inspected: {exc.strerror}"
        return [fail("socket.path", found, remedy), *refused, *_others(socket)]
    if not stat.S_ISSOCK(facts.st_mode):
        return [fail("socket.path", f"{socket} is not a socket", "remove it, or choose another path with --socket")]
    return [ok("socket.path", str(socket)), check_owner(socket, facts.st_uid, facts.st_mode, facts.st_gid), trusted]


def check_owner(socket: Path, owner: int, mode: int, gid: int = -1) -> CheckResult:
    """Judge owner and mode: every user who may write to the socket may pin, evict and read prompts."""
    if owner != os.getuid() and os.getuid():  # root may use all arenas; whom its clients trust is another check
        if mode & stat.S_IWGRP and gid in (os.getegid(), *os.getgroups()):
            return ok("socket.owner", f"uid {owner}, mode {stat.S_IMODE(mode):04o}, for group {gid}, which you are in")
        remedy = "run daemon, vLLM and CLI as one user, or in one group (server.group): arenas are for these alone"
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
        names = ("version", "engines", "quarantine", "disk_tier", "keys", "damage", "http")
        checks = [f"daemon.{name}" for name in names]
        return [skipped(check, "no daemon answers") for check in checks]
    return list(_judged(status))


def _check_keys(status: DaemonStatus) -> CheckResult:
    if not status.disk_keys:
        return ok("daemon.keys", "disk.key_file is off")
    found = ", ".join(f"{key.name or 'plain'}: {key.num_bytes} bytes" for key in status.disk_keys)
    missing = [key.name for key in status.disk_keys if key.is_missing]
    if missing:
        remedy = (
            "put it back into the file that disk.key_file names, and restart the daemon; until then its chunks miss"
        )
        return fail("daemon.keys", f"{', '.join(missing)} is not in disk.key_file ({found})", remedy)
    return ok("daemon.keys", found)


def _check_damage(status: DaemonStatus) -> Iterator[CheckResult]:
    counters = status.counters
    by_place = [([f"{name} {counters[name]}" for name in names if counters.get(name)], how) for names, how in _DAMAGE]
    for damage, remedy in by_place:
        if damage:
            yield warn("daemon.damage", f"since the daemon started: {', '.join(damage)}", remedy)
    if not any(damage for damage, _ in by_place):
        yield ok("daemon.damage", "none since the daemon started")


def _judged(status: DaemonStatus) -> Iterator[CheckResult]:
    if status.version == __version__:
        yield ok("daemon.version", __version__)
    else:
        found = f"the daemon is kvtier {status.version}, this is {__version__}"
        yield warn("daemon.version", found, "restart the daemon with the kvtier that is installed")
    if lost := [str(session.pid) for session in status.sessions if session.quarantined]:
        found = f"{len(lost)} lost engines of which a process still runs: pids {', '.join(lost)}"
        remedy = "end these processes: their arena slots stay in quarantine until then"
        yield warn("daemon.engines", found, remedy)
    elif not status.sessions:
        yield warn("daemon.engines", "none attached", _ATTACH)
    else:
        yield ok("daemon.engines", f"{len(status.sessions)} attached")
    stopped = [each for each in status.namespaces if each.quarantine_reason]
    for namespace in stopped:
        found = f"{namespace.namespace_id} ({namespace.model}) serves nothing: {namespace.quarantine_reason}"
        remedy = (
            "after `kvtier verify --all --no-live`, let it serve again: `kvtier quarantine NAMESPACE --release`; or "
            "evict its chunks, which ends the quarantine"
        )
        yield fail("daemon.quarantine", found, remedy)
    if not stopped:
        yield ok("daemon.quarantine", "no namespace is quarantined")
    if status.disk.breaker_open_reason:
        remedy = f"check the disk of {status.disk.location} (dmesg, smartctl); a probe switches the tier on again"
        yield fail("daemon.disk_tier", f"switched off: {status.disk.breaker_open_reason}", remedy)
    else:
        yield ok("daemon.disk_tier", "in use")
    yield _check_keys(status)
    yield from _check_damage(status)
    if status.http_problem:
        remedy = "correct that and restart the daemon; it serves engines and commands meanwhile"
        yield warn("daemon.http", status.http_problem, remedy)
    elif not status.http_url:
        yield skipped("daemon.http", "http.listen is off, or the daemon is still starting")
    else:
        yield ok("daemon.http", status.http_url)


def _others(socket: Path) -> list[CheckResult]:
    others = []
    for root, pattern in _USUAL_PLACES:
        for folder in sorted(Path(root).glob(pattern)):
            with suppress(OSError):  # removed meanwhile, or not readable for us
                others += [f"{folder} (uid {folder.stat().st_uid})"] if folder != socket.parent else []
    if not others:
        return [ok("socket.others", "none in the usual places")]
    remedy = "if your daemon is one of these, name its socket with --socket or $KVTIER_SOCKET, and run as its user"
    return [warn("socket.others", f"daemons ran elsewhere: {', '.join(others)}", remedy)]


def check_pins(prompts: Sequence[PromptStatus] | None) -> list[CheckResult]:
    """Return one finding for each pinned prompt that is not durable, up to `MAX_LISTED`, and one for all others.

    None stands for a daemon that does not answer.
    """
    if prompts is None:
        return [skipped("pins.kept", "no daemon answers")]
    pinned = [prompt for prompt in prompts if prompt.pinned]
    broken = [finding for finding in map(check_pin, pinned) if finding.status is not Status.OK]
    if len(broken) > MAX_LISTED:
        rest = warn("pins.kept", f"{len(broken) - MAX_LISTED} more are not durable", "see `kvtier list`")
        return [*broken[:MAX_LISTED], rest]
    return [*broken, ok("pins.kept", f"{len(pinned) - len(broken)} of {len(pinned)} pinned prompts are durable")]


def check_pin(prompt: PromptStatus) -> CheckResult:
    """Say whether a pinned prompt is durable and recognized by the engines that serve its model, and if not, why."""
    name = prompt.name
    if prompt.error:
        remedy = f"correct that, then `kvtier pin {name}`; or `kvtier unpin {name}`"
        return warn("pins.kept", f"{name}: an engine cannot recognize it: {prompt.error}", remedy)
    if prompt.num_confirmed < prompt.num_engines:
        found = f"{name}: recognized by {prompt.num_confirmed} of {prompt.num_engines} engines so far"
        remedy = "wait a moment and run this again; the engine's log says what it does with pins"
        return warn("pins.kept", found, remedy)
    if prompt.state == PromptStatus.DURABLE:
        return ok("pins.kept", name)
    num_chunks = sum(binding.num_chunks for binding in prompt.bindings)
    num_durable = sum(binding.num_durable_chunks for binding in prompt.bindings)
    rest = f"`kvtier pin {name}` computes the rest"
    if prompt.origin in ("auto", "request", "replacement"):  # they have no source that could be rendered again
        rest = "the next request that begins with it computes the rest"
    found, remedy = {
        PromptStatus.UNRENDERED: ("not yet turned into tokens", f"run `kvtier pin {name}` while vLLM runs"),
        PromptStatus.WAITING: (
            "no vLLM with the connector has recognized it yet",
            f"start vLLM with the connector, serving {prompt.model or 'its model'}",
        ),
        PromptStatus.OVER_QUOTA: ("does not fit into disk.bytes", "raise disk.bytes, or unpin and evict another"),
    }.get(
        prompt.state,
        (f"{num_durable} of {num_chunks} chunks are durable", rest),
    )
    return warn("pins.kept", f"{name}: {found}", remedy)
