"""Spans: which stage ran when, in daemon, engine and workers, in files that a trace viewer opens.

Each process writes a file of its own into one folder, in the array form of the Trace Event Format. The closing bracket
may be missing there, so a killed process leaves a readable file. All processes of a host share the monotonic clock, so
`kvtier trace` merges the files as they are.

Tracing is off until `start`, and then global in the process, like logging. While it is off, `record` costs a
comparison and `span` about half a microsecond; neither is called per chunk.

Source: "Trace Event Format" (Google, 2016), which chrome://tracing and https://ui.perfetto.dev read.
"""

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TextIO

from kvtier.concurrency.pauses import SLOW_POLL_S
from kvtier.obs.log import log_event

MAX_FILE_BYTES = 256 * 1024**2
"""Largest file: about two million spans."""
SUFFIX = ".trace.json"

logger = logging.getLogger(__name__)
Value = str | int | float | bool


class TraceFile:
    """Writes the spans of one process. Any thread; buffered, for about a second at most.

    If the file cannot be written, the trace ends with one line in the log; nothing else changes.
    """

    def __init__(self, folder: Path, process: str) -> None:
        """Create `<process>-<pid>.trace.json`, or with a number behind the pid, which only its owner may read.

        Raises:
            OSError: The folder or the file cannot be created.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        pid = os.getpid()
        self.path, fd = _new_file(folder, f"{process}-{pid}")
        self._pid = pid
        self._ends = threading.Event()
        self._lock = threading.Lock()  # protects all below
        self._file: TextIO | None = os.fdopen(fd, "w", encoding="utf-8")
        self._lines: list[str] = ["["]
        self._written_bytes = 0
        self._threads: set[int] = set()
        self._add({"ph": "M", "name": "process_name", "tid": 0, "args": {"name": f"{process} {pid}"}})
        threading.Thread(target=self._run, name="kvtier-trace", daemon=True).start()

    def record(self, name: str, began_s: float, ended_s: float, of: str | None, args: dict[str, Value]) -> None:
        """Add a span; see the function `record`."""
        event: dict[str, object] = {"name": name, "cat": name, "args": args}
        with self._lock:
            if self._file is None:
                return
            if of is None:
                event |= {"ph": "X", "ts": _micros(began_s), "dur": _micros(ended_s - began_s), "tid": self._thread()}
                self._add(event)
            else:  # begin and end, on a track of their own
                event |= {"id": of, "tid": 0}
                self._add(event | {"ph": "b", "ts": _micros(began_s)})
                self._add({**event, "ph": "e", "ts": _micros(ended_s), "args": {}})
            if len(self._lines) >= 512:
                self._flush()

    def close(self) -> None:
        """Write what is buffered; later spans are dropped. Idempotent."""
        with self._lock:
            self._flush()
            self._end()

    def _run(self) -> None:
        # Spans come in bursts. Without this, a process that is killed after a burst would lose the end of it.
        while not self._ends.wait(SLOW_POLL_S):
            with self._lock:
                self._flush()

    def _thread(self) -> int:
        tid = threading.get_native_id()
        if tid not in self._threads:
            self._threads.add(tid)
            name = threading.current_thread().name
            self._add({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})
        return tid

    def _add(self, event: dict[str, object]) -> None:
        self._lines.append(json.dumps(event | {"pid": self._pid}, separators=(",", ":")) + ",")

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._file is None or not lines:
            return
        text = "\n".join(lines) + "\n"
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as exc:
            log_event(logger, "trace_ended", level=logging.WARNING, path=self.path, problem=str(exc))
            self._end()
            return
        self._written_bytes += len(text)
        if self._written_bytes > MAX_FILE_BYTES:
            log_event(logger, "trace_ended", level=logging.WARNING, path=self.path, num_bytes=self._written_bytes)
            self._end()

    def _end(self) -> None:
        self._ends.set()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as exc:
                log_event(logger, "trace_ended", level=logging.WARNING, path=self.path, problem=str(exc))
            self._file = None


def _new_file(folder: Path, name: str) -> tuple[Path, int]:
    """Create a file that there was none of: what is there may be of an earlier start, or a link of someone else."""
    path, numbers = folder / f"{name}{SUFFIX}", count(2)
    while True:
        with suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        path = folder / f"{name}-{next(numbers)}{SUFFIX}"


_trace: TraceFile | None = None


def start(folder: Path | None, process: str) -> Path | None:
    """Begin to trace this process; return the file. If it already traces into the folder, it keeps its file.

    Args:
        folder: Holds one file for each process; None: no trace.
        process: Its name in the viewer: `daemon`, `engine`, `worker`.

    Raises:
        OSError: The file cannot be created.
    """
    global _trace
    if folder is None:
        return None
    if _trace is None or _trace.path.parent != folder:
        stop()
        _trace = TraceFile(folder, process)
        atexit.register(_trace.close)
    return _trace.path


def stop() -> None:
    """End the trace of this process, if there is one."""
    global _trace
    if _trace is not None:
        _trace.close()
        _trace = None


def record(name: str, began_s: float, ended_s: float, *, of: str | None = None, **args: Value) -> None:
    """Record a span that has ended.

    Args:
        name: The stage, one of a small set.
        began_s: Monotonic seconds, as `time.monotonic` and `time.perf_counter` count them on Linux.
        ended_s: The same.
        of: What it belongs to, for example a request: such spans may overlap. None: it belongs to this thread.
        args: Shown with the span; never a token nor a prompt's text.
    """
    if _trace is not None:
        _trace.record(name, began_s, ended_s, of, args)


@contextmanager
def span(name: str, **args: Value) -> Iterator[None]:
    """Record the block as a span of this thread."""
    if _trace is None:
        yield
        return
    began_s = time.monotonic()
    try:
        yield
    finally:
        if _trace is not None:
            _trace.record(name, began_s, time.monotonic(), None, args)


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
