"""What a process needs before its command line is read (open files, streams that take any text), and how it ends."""

import io
import os
import resource
import signal
import sys
from enum import IntEnum

MIN_OPEN_FILES = 64
"""gRPC ends the process below some 7, Python loads no modules below some 12, a daemon with an engine needs some 40."""


class ExitCode(IntEnum):
    """What the shell gets from `kvtier`, `kvtier-daemon` and the offline check, which it runs."""

    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    """The daemon does not answer; of the offline check: it does, and its folders are in use."""
    CHANGED = 4
    """With --detailed-exitcode: something differed."""
    INTERRUPTED = 130
    """128 + SIGINT, as shells say it."""


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


def exit_on_sigterm() -> None:
    """Have SIGTERM end the process in order while it serves nothing yet; what serves replaces that by what drains.

    Of a container's first process the kernel drops a signal that has no handler.
    """

    def end(*_: object) -> None:
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)


def forbid_core_dumps() -> None:
    """Keep what this process has in memory off the disk: keys, and prompts in plain. Its children dump none either."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def prepare_grpc() -> None:
    """Have gRPC take TLS 1.3 only, and log errors only. Before gRPC is imported: it reads its environment once.

    Python's gRPC has no setting for the least version of TLS. The cipher suites that can be named are those up to 1.2;
    the one here needs a key shared in advance, which no server of ours has, so no handshake of 1.2 succeeds.
    (Without the second, each client that connects without TLS writes a line to stderr.)
    """
    os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-AES128-CBC-SHA"
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


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
