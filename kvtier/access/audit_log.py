"""The audit log: a JSON line for each call that changed something or was refused. It never delays a call.

A thread of its own writes; what does not fit into its queue, or what the disk refuses, is counted and lost. Rejected:
calls that wait for their line, or fail without it: a full disk would stop the cache.
"""

import errno
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Lines: some megabytes."""
_CLOSE_TIMEOUT_S = 2.0

Write = Callable[[int, bytes], int]


class AuditLog:
    """Appends to a file. Any thread.

    Attributes:
        num_written: Lines that were written.
        num_lost: Lines that were not.
    """

    def __init__(self, path: Path | None, *, max_waiting: int = MAX_WAITING, write: Write = os.write) -> None:
        """Write to the file at `path`; None: nothing is written, or counted."""
        self.num_written = self.num_lost = 0
        self._path, self._write = path, write
        self._lines: queue.Queue[bytes | None] = queue.Queue(max_waiting)
        self._reopen, self._is_closed = threading.Event(), threading.Event()
        self._lost_lock = threading.Lock()  # protects num_lost
        self._thread: threading.Thread | None = None
        # Of the thread only:
        self._fd = -1
        self._is_failing = self._is_torn = False
        if path is not None:
            self._thread = threading.Thread(target=self._run, name="kvtier-audit", daemon=True)
            self._thread.start()

    def add(self, entry: Mapping[str, object]) -> None:
        """Have an entry written soon; it is lost if too many wait. Never blocks."""
        if self._thread is None or self._is_closed.is_set():
            return
        try:
            self._lines.put_nowait(json.dumps(entry, ensure_ascii=True).encode() + b"\n")
        except queue.Full:
            self._lose(1)

    def reopen(self) -> None:
        """Open the file again before the next line: after logrotate has renamed it. Never blocks."""
        self._reopen.set()
        with suppress(queue.Full):
            self._lines.put_nowait(b"")  # so that an idle log makes the new file, too

    def close(self) -> None:
        """Write what waits, for a bounded time, and end the thread. Blocks."""
        self._is_closed.set()
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_TIMEOUT_S)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                self._append(line)
        finally:
            self._close_file()

    def _append(self, line: bytes) -> None:
        try:
            if self._reopen.is_set():
                self._reopen.clear()
                self._close_file()
            self._open_file()
            if not line:
                return
            self._write_whole(line)
        except OSError as exc:
            self._lose(1 if line else 0)
            if not self._is_failing:
                self._is_failing = True
                log_event(
                    logger,
                    "audit_not_written",
                    level=logging.ERROR,
                    path=self._path,
                    problem=exc.strerror or str(exc),
                    consequence="calls go on, and their lines are lost",
                )
            self._close_file()
        else:
            self.num_written += 1
            if self._is_failing:
                self._is_failing = False
                log_event(logger, "audit_written_again", path=self._path, lost=self.num_lost)

    def _write_whole(self, line: bytes) -> None:
        data = (b"\n" if self._is_torn else b"") + line
        written = self._write(self._fd, data)
        if written < len(data):  # a nearly full disk took a part, which the next line must not continue
            self._is_torn = self._is_torn or written > 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._is_torn = False

    def _open_file(self) -> None:
        if self._fd < 0:
            assert self._path is not None
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._fd = os.open(self._path, flags, 0o600)

    def _close_file(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                os.close(fd)

    def _lose(self, num: int) -> None:
        with self._lost_lock:
            self.num_lost += num
