"""The store that hosts share, as the daemon sees it."""

from collections.abc import Iterator

from kvtier._pb.cache_pb2 import RemoteStatus
from kvtier.doctor.report import CheckResult, fail, ok, skipped, warn
from kvtier.printable import MAX_LISTED

CHECK = "remote.store"
MAX_CLOCK_OFFSET_S = 30.0
"""The daemon itself reports two seconds; a pin's end may be late by as much as this without a consequence."""


def check_remote(status: RemoteStatus | None) -> list[CheckResult]:
    """Judge what the daemon says of its store; None: no daemon answers."""
    if status is None:
        return [skipped(CHECK, "no daemon answers")]
    if not status.url:
        return [skipped(CHECK, "remote.url is off: pins of this host stay on it")]
    if problems := list(_problems(status)):
        return problems
    return [ok(CHECK, f"{status.url}: {status.num_pins} pins, {status.num_kv_objects} objects with KV")]


def _problems(status: RemoteStatus) -> Iterator[CheckResult]:
    if status.problem:
        remedy = "correct remote.url, its credentials or the network; pins and requests go on without it meanwhile"
        yield fail(CHECK, f"{status.url}: {status.problem}", remedy)
    elif not status.looked_unix_s:
        remedy = "ask again in a moment; if it stays so, the daemon's log says why"
        yield warn(CHECK, f"{status.url}: its pins were not read yet", remedy)
    if abs(status.clock_offset_s) > MAX_CLOCK_OFFSET_S:
        side = "behind" if status.clock_offset_s > 0 else "ahead of"
        found = f"the clock of this host is {abs(status.clock_offset_s):.0f} s {side} the store's"
        yield warn(CHECK, found, "set the clock of this host (NTP): TTLs end by the store's clock")
    for refused in status.refused[:MAX_LISTED]:
        remedy = f"correct it on the host that pinned it, or end it there: `kvtier unpin {refused.name}`"
        yield warn(CHECK, f"a pin of another host is not taken: {refused.name}: {refused.why}", remedy)
