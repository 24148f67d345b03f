"""`python -m kvtier.daemon.offline_check`: the check whose report `kvtier fsck --offline` shows, as one JSON value."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvtier.config.load import load_config
from kvtier.daemon.folder_locks import locked
from kvtier.errors import AlreadyRunningError, ConfigError, ConfigErrors, KvtierError
from kvtier.maintenance.offline import check_offline
from kvtier.printable import printable
from kvtier.process import ExitCode
from kvtier.sealing import load_key_ring
from kvtier.usage_errors import PrintableCommand

_REMEDY = "name the disk folder with: kvtier fsck --offline --disk-dir DIR"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=PrintableCommand)
def fsck(
    config: Annotated[Path | None, typer.Option(metavar="FILE", envvar="KVTIER_CONFIG")] = None,
    disk_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of packs and ledger (disk.dir)")] = None,
    repair: Annotated[bool, typer.Option("--repair")] = False,
    deep: Annotated[bool, typer.Option("--deep")] = False,
) -> None:
    """Check a disk folder that no daemon uses."""
    os.umask(0o077)
    try:
        loaded = load_config(path=config, flags={"disk.dir": disk_dir})
        folder = loaded.config.disk.disk_dir
        _check_is_folder(folder, loaded.sources["disk.dir"])
        with _claimed(folder):
            key_file = loaded.config.disk.key_file
            ring = load_key_ring(key_file) if key_file is not None else None
            report = check_offline(folder, arena_dir=loaded.config.host.arena_dir, repair=repair, deep=deep, ring=ring)
    except (ConfigError, ConfigErrors) as exc:
        _fail(str(exc), ExitCode.USAGE)
    except AlreadyRunningError as exc:
        who = f"the daemon with pid {exc.pid}" if exc.pid else "a daemon"
        _fail(f"{who} uses {folder}; run `kvtier fsck` without --offline, or stop it", ExitCode.UNREACHABLE)
    except KvtierError as exc:
        _fail(str(exc), ExitCode.FAILED)
    print(json.dumps({"folder": str(folder), **dataclasses.asdict(report)}))


def _check_is_folder(folder: Path, source: str) -> None:
    problem = ""
    try:
        if not folder.is_dir():
            problem = f"is no directory; {_REMEDY}"
        # Or a mistyped path would be called clean. Before the lock, which leaves a file.
        elif not any((folder / name).exists() for name in ("ledger.sqlite", "packs")):
            problem = f"holds neither ledger.sqlite nor packs; {_REMEDY}"
    except OSError as exc:
        problem = f"cannot be looked at: {exc.strerror}; run the command as the daemon's user, or {_REMEDY}"
    if problem:
        raise ConfigError("disk.dir", str(folder), source, problem)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Take the lock of the daemon. A directory that we may not write is only read, and no daemon of ours uses it."""
    if not os.access(folder, os.W_OK):
        yield
        return
    with locked(folder):
        yield


def _fail(problem: str, code: int) -> None:
    print(printable(problem), file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
