"""What a check says, and which checks there are."""

from dataclasses import dataclass
from enum import StrEnum

CHECKS = {
    "config.file": "the TOML file can be read and has no unknown setting or unusable value",
    "machine.kernel": "Linux, and not older than the wheels kvtier needs",
    "machine.open_files": "enough open files are allowed",
    "machine.clock": "the wall clock, by which pins end, is not behind what was written before",
    "socket.folder": "the folder of the socket can be used, and by its owner alone",
    "socket.path": "there is a socket where daemon and clients look for it",
    "socket.owner": "the socket is yours: engines and daemon share a uid",
    "socket.trusted": "no other user listens there, or may put another socket there: else nothing is sent",
    "socket.others": "no daemon of another user is what you meant",
    "daemon.answers": "the daemon answers",
    "daemon.version": "daemon and CLI have the same version",
    "daemon.engines": "engines are attached, and none is lost with its memory set aside",
    "daemon.disk_tier": "the disk tier is not switched off",
    "daemon.damage": "nothing that was read back was damaged",
    "daemon.metrics": "GET /metrics is answered at the address that metrics.listen names",
    "host.arena_dir": "the folder of the arenas can be used",
    "host.file_system": "the arenas are on a tmpfs",
    "host.space": "the tmpfs has room for host.bytes",
    "host.memory": "memory, or the container's limit, holds host.bytes and leaves some for others",
    "host.memlock": "where there is a GPU: so much memory may be locked",
    "disk.dir": "the folder of packs and ledger can be used",
    "disk.file_system": "it is on a file system that keeps what was fsynced, and locks",
    "disk.space": "the file system has room for disk.bytes and the daemon's reserve",
    "disk.direct_reads": "packs can be read past the page cache",
    "vllm.installed": "vLLM is installed in the environment, in a version the connector is written for",
    "vllm.connector": "the connector can be imported there",
    "server.answers": "vLLM answers at the URL, in a version the connector is written for",
    "server.prefix_caching": "its prefix caching is on",
    "server.hash_algorithm": "its block hashes are the same after a restart",
    "server.attached": "an engine of it is attached to the daemon",
    "pins.kept": "every pinned prompt is durable; for each that is not, why",
}
"""Every check's stable id, and what is good when it says ok."""


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        id: One of `CHECKS`.
        status: `fail`: kvtier does not work so. `warn`: it works, and something is likely not as you want it.
        found: What is the case.
        remedy: What to do; empty when there is nothing to do.
    """

    id: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        """Check what the author of a check could forget."""
        assert self.id in CHECKS, self.id
        assert bool(self.remedy) == (self.status in (Status.WARN, Status.FAIL)), self


def ok(check: str, found: str) -> Finding:
    """Return that all is well."""
    return Finding(id=check, status=Status.OK, found=found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """Return that it works, but likely not as wanted."""
    return Finding(id=check, status=Status.WARN, found=found, remedy=remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """Return that kvtier does not work so."""
    return Finding(id=check, status=Status.FAIL, found=found, remedy=remedy)


def skipped(check: str, why: str) -> Finding:
    """Return that there was nothing to check."""
    return Finding(id=check, status=Status.SKIPPED, found=why)
