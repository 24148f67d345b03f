"""What a process of kvtier needs before its command line is read: open files, and streams that take any text."""

import io
import os
import resource
import sys

MIN_OPEN_FILES = 64
"""gRPC ends the process below some 7, Python loads no modules below some 12, a daemon with an engine needs some 40."""


def prepare_process(name: str) -> None:
    """Make stdout and stderr usable, or end the process in a line that says what it lacks.

    Args:
        name: What the line begins with.
    """
    # Closed by who started us (`>&-`): None, at which every write fails.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if problem := _too_few_open_files():
        sys.exit(f"{name}: {problem}")


def _nowhere() -> io.TextIOWrapper:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 (until the process ends)


def _too_few_open_files() -> str | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES:
        return None
    return (
        f"ulimit -n = {limit}: kvtier needs at least {MIN_OPEN_FILES} open files to start; raise it: ulimit -n 1024, "
        "or LimitNOFILE= in a unit"
    )
