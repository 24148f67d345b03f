"""The store that hosts share, as the daemon sees it."""

from collections.abc import Iterator
from pathlib import Path

from kvtier._pb.cache_pb2 import RemoteStatus
from kvtier.doctor.memory_and_disk import MOUNT_TABLE, mount_of
from kvtier.doctor.report import CheckResult, fail, ok, skipped, warn
from kvtier.printable import MAX_LISTED

CHECK = "remote.store"
MAX_CLOCK_OFFSET_S = 30.0
"""The daemon itself reports two seconds; a pin's end may be late by as much as this without a consequence."""
_OWN_TIMES = ("ceph", "fuse.ceph", "fuse.ceph-fuse", "lustre", "glusterfs", "fuse.glusterfs", "gfs2", "ocfs2")
"""File systems that take the time of a write from the clock of the host that writes."""


def check_remote(status: RemoteStatus | None, mounts: Path = MOUNT_TABLE) -> list[CheckResult]:
    """Judge what the daemon says of its store; None: no daemon answers."""
    if status is None:
        return [skipped(CHECK, "no daemon answers")]
    if not status.url:
        return [skipped(CHECK, "remote.url is off: pins of this host stay on it")]
    if problems := list(_problems(status, mounts)):
        return problems
    return [ok(CHECK, f"{status.url}: {status.num_pins} pins, {status.num_kv_objects} objects with KV")]


def _problems(status: RemoteStatus, mounts: Path) -> Iterator[CheckResult]:
    if status.problem:
        remedy = "correct remote.url, its credentials or the network; pins and requests go on without it meanwhile"
        yield fail(CHECK, f"{status.url}: {status.problem}", remedy)
    elif not status.looked_unix_s:
        remedy = "ask again in a moment; if it stays so, the daemon's log says why"
        yield warn(CHECK, f"{status.url}: its pins were not read yet", remedy)
    elif status.url.startswith("file://"):
        yield from _check_folder(status.url, mounts)
    if abs(status.clock_offset_s) > MAX_CLOCK_OFFSET_S:
        side = "behind" if status.clock_offset_s > 0 else "ahead of"
        found = f"the clock of this host is {abs(status.clock_offset_s):.0f} s {side} the store's"
        yield warn(CHECK, found, "set the clock of this host (NTP): TTLs end by the store's clock")
    for refused in status.refused[:MAX_LISTED]:
        remedy = f"correct it on the host that pinned it, or end it there: `kvtier unpin {refused.name}`"
        yield warn(CHECK, f"a pin of another host is not taken: {refused.name}: {refused.why}", remedy)


def _check_folder(url: str, mounts: Path) -> Iterator[CheckResult]:
    """Only once the daemon uses the folder: a file server that is gone holds up who looks."""
    mount = mount_of(Path(url.removeprefix("file://")), mounts)
    if mount is not None and mount.kind in _OWN_TIMES:
        remedy = "keep the clocks of all hosts together (NTP), or use a bucket or NFS; see docs/fleet.md"
        yield warn(CHECK, f"{url} is on {mount.kind}, where each host's own clock stands for the store's", remedy)
