"""The result of a check, and the list of all checks."""

from dataclasses import dataclass
from enum import StrEnum

CHECKS = {
    "config.file": "the TOML file can be read and has no unknown setting or unusable value",
    "machine.kernel": "Linux, and not older than the wheels kvtier needs",
    "machine.open_files": "enough open files are allowed",
    "machine.clock": "the wall clock, by which pins end, is not behind the time of earlier writes",
    "machine.nvidia_driver": "the driver has CUDA 12.8, which the connector needs; skipped without one",
    "socket.folder": "the folder of the socket can be used, by its owner alone",
    "socket.group": "server.group is off; or the daemon is in it, and its members pass through the daemon's folders",
    "socket.path": "there is a socket where daemon and clients look for it",
    "socket.owner": "the socket is yours, or its group is: engines and daemon share a uid, or server.group",
    "socket.trusted": "no other user listens there or may replace the socket; otherwise clients send nothing",
    "socket.others": "no folder of another daemon is in the usual places",
    "daemon.answers": "the daemon answers",
    "daemon.version": "daemon and CLI have the same version",
    "daemon.engines": "engines are attached, and none is lost with arena slots in quarantine",
    "daemon.disk_tier": "the circuit breaker of the disk tier is closed",
    "daemon.keys": "with disk.key_file, every key that packs are sealed with is in that file",
    "daemon.quarantine": "no namespace is quarantined: each serves what it holds",
    "daemon.damage": "no chunk that was read was damaged",
    "daemon.http": "the daemon serves HTTP (metrics, API) at http.listen",
    "host.arena_dir": "the folder of the arenas can be used",
    "host.file_system": "the arenas are on a tmpfs",
    "host.space": "the tmpfs has space for host.bytes",
    "host.memory": "host.bytes is at most three quarters of memory, or 85 % of the container's limit",
    "disk.dir": "the folder of packs and ledger can be used",
    "disk.file_system": "it is on a file system that keeps fsynced data and has file locks",
    "disk.space": "the file system has space for disk.bytes and the daemon's reserve",
    "disk.direct_reads": "packs can be read with O_DIRECT",
    "disk.key_file": "it can be used, if there is one: yours and 0600, or root's for a group of yours; and it has the "
    "keys that the running daemon needs again after a restart",
    "vllm.installed": "vLLM is installed in the environment, in a version the connector is written for",
    "vllm.connector": "the connector can be imported there",
    "server.answers": "vLLM answers at the URL, in a version the connector is written for",
    "server.prefix_caching": "its prefix caching is on",
    "server.hash_algorithm": "its block hashes are the same after a restart",
    "server.attached": "an engine of it is attached to the daemon",
    "remote.store": "the store that hosts share can be used, by a clock that agrees with its own",
    "pins.kept": "every pinned prompt is durable; for each that is not, why",
}
"""The stable id of each check, and what is true when its status is ok."""


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What one check found.

    Attributes:
        id: One of `CHECKS`.
        status: `fail`: kvtier does not work like this. `warn`: it works, but probably not as intended.
        found: The facts.
        remedy: What to do; only where something is to be done.
    """

    id: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.id in CHECKS, self.id
        assert bool(self.remedy) == (self.status in (Status.WARN, Status.FAIL)), self


def ok(check: str, found: str) -> CheckResult:
    return CheckResult(id=check, status=Status.OK, found=found)


def warn(check: str, found: str, remedy: str) -> CheckResult:
    return CheckResult(id=check, status=Status.WARN, found=found, remedy=remedy)


def fail(check: str, found: str, remedy: str) -> CheckResult:
    return CheckResult(id=check, status=Status.FAIL, found=found, remedy=remedy)


def skipped(check: str, why: str) -> CheckResult:
    return CheckResult(id=check, status=Status.SKIPPED, found=why)
