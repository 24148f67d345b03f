"""The gatekeeper of a daemon: opened with its files, kept fresh on the loop, closed at the end."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from kvtier.access.audit_log import AuditLog
from kvtier.access.gatekeeper import REFRESH_S, Gatekeeper
from kvtier.access.grants import GrantBook
from kvtier.concurrency.pauses import until_next
from kvtier.concurrency.tasks import kept_running
from kvtier.concurrency.thread_calls import begin_in_thread
from kvtier.config import DaemonConfig
from kvtier.obs.counters import Counters


@asynccontextmanager
async def opened_gatekeeper(config: DaemonConfig) -> AsyncIterator[Gatekeeper]:
    """Read the grants, and open the audit log during the block; SIGHUP opens its file again."""
    grants = await asyncio.to_thread(GrantBook, config.disk.disk_dir)
    audit = AuditLog(config.access.audit_file)
    audit.reopen()  # so that a file that cannot be written is in the log at once
    # In another thread no signal can be handled: tests run daemons so.
    handles_signal = config.access.audit_file is not None and threading.current_thread() is threading.main_thread()
    loop = asyncio.get_running_loop()
    if handles_signal:
        loop.add_signal_handler(signal.SIGHUP, audit.reopen)
    try:
        yield Gatekeeper(grants, audit, needs_credentials=config.access.auth == "token")
    finally:
        if handles_signal:
            loop.remove_signal_handler(signal.SIGHUP)
        await asyncio.to_thread(audit.close)


@asynccontextmanager
async def kept_fresh(gatekeeper: Gatekeeper, counters: Counters) -> AsyncIterator[None]:
    """During the block, look after the grants and count what the gatekeeper did."""
    task = asyncio.create_task(kept_running("access", partial(_keep_fresh, gatekeeper, counters)), name="access")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _keep_fresh(gatekeeper: Gatekeeper, counters: Counters) -> None:
    while True:
        # Not `to_thread`, whose threads the loop's end waits for: the disk may hang.
        await begin_in_thread("kvtier-access", gatekeeper.grants.refresh)
        gatekeeper.end_streams()
        counters.calls_refused_unauthenticated = gatekeeper.num_unauthenticated
        counters.calls_refused_forbidden = gatekeeper.num_forbidden
        counters.calls_refused_too_many = gatekeeper.num_too_many
        counters.calls_refused_silent = gatekeeper.num_silent
        counters.audit_lines_written = gatekeeper.audit.num_written
        counters.audit_lines_lost = gatekeeper.audit.num_lost
        await asyncio.sleep(until_next(REFRESH_S))
