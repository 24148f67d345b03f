"""`kvtier export` and `kvtier import`: a pinned prompt as a file, or as a stream (`-`)."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvtier._pb.cache_pb2 import ExportRequest, ImportStart
from kvtier.cli.context import connect, interruptible
from kvtier.cli.options import PUBLIC_HELP, AsJsonWithProgress, PromptName, checked_text
from kvtier.cli.output.progress import byte_progress
from kvtier.cli.output.prompt_summary import summarize
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import pin_result
from kvtier.config.units import format_size
from kvtier.core.limits import PIECE_BYTES
from kvtier.core.ttl import parse_duration
from kvtier.errors import InvalidArgumentError
from kvtier.fsync import fsync_directory

_STANDARD = Path("-")


def export(
    context: typer.Context,
    name: PromptName,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The bundle to write, say NAME.safetensors; -: stdout", show_default=False),
    ],
    namespace: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="Which, if the prompt is in several (kvtier show NAME)",
            show_default=False,
            callback=checked_text,
        ),
    ] = "",
    decoded: Annotated[
        bool, typer.Option("--decoded", help="Write the KV as plain tensors for a notebook; no import takes them")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE, if it is a regular file")] = False,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Write a pinned prompt with its KV cache into a file, for `kvtier import` on another machine.

    The file is a safetensors file. It holds the text of the prompt, and only you may read it.
    """
    to_stdout = file == _STANDARD
    if to_stdout and as_json:
        raise InvalidArgumentError("--json", "with FILE -", "the bundle goes to stdout; name a file")
    if to_stdout and sys.stdout.isatty():
        raise InvalidArgumentError("FILE", "-", f"stdout is a terminal; redirect it: kvtier export {name} - > FILE")
    output = Output(json=as_json or to_stdout)  # messages go to stderr
    if not to_stdout:
        _check_target(file, force=force)
    with connect(context) as client:
        status = client.get(name)
        request = ExportRequest(name=name, namespace_id=namespace, decoded=decoded)
        expected = 0 if decoded else max((binding.disk_bytes for binding in status.bindings), default=0)
        with (
            interruptible(output, "the bundle on stdout is incomplete" if to_stdout else "nothing was written"),
            byte_progress(output, expected) as bar,
        ):
            pieces = bar(client.export(request))
            num_bytes = _send(pieces) if to_stdout else _write(pieces, file, force=force)
    lines = (
        f"exported: {name} to {'stdout' if to_stdout else file}",
        f"{status.num_tokens} tokens, {summarize(status).num_chunks} chunks, {format_size(num_bytes)}",
    )
    if to_stdout:
        output.say(*lines)
    else:
        answer = {"name": name, "file": str(file), "bytes": num_bytes, "prompt": to_jsonable(status)}
        output.answer(answer, *lines)


def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bundle to read; -: stdin", show_default=False)],
    name: Annotated[
        str,
        typer.Option(metavar="NEW", help="Pin it under another name", show_default=False, callback=checked_text),
    ] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Replace another prompt of this name")] = False,
    ttl: Annotated[
        str, typer.Option(metavar="DURATION", help="End the pin after 90s, 30m, 12h, 7d, 2w", show_default=False)
    ] = "never",
    public: Annotated[bool, typer.Option("--public", help=PUBLIC_HELP)] = False,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Pin a prompt from a bundle of `kvtier export`; vLLM computes nothing.

    Needs a namespace with the fingerprint of the bundle: a vLLM with the same model and settings has attached once.
    """
    output = Output(json=as_json)
    start = ImportStart(name=name, replace=replace, ttl_s=parse_duration("--ttl", ttl), public=public)
    with (
        _opened(file) as source,
        connect(context) as client,
        interruptible(output, "see kvtier list for what was done"),
        byte_progress(output, 0 if file == _STANDARD else os.fstat(source.fileno()).st_size) as bar,
    ):
        status = client.import_bundle(start, bar(iter(lambda: source.read(PIECE_BYTES), b"")))
    source_name = "stdin" if file == _STANDARD else file
    output.answer(status, f"imported: {status.name} from {source_name}", pin_result(status))


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    if file == _STANDARD:
        if sys.stdin.isatty():
            raise InvalidArgumentError("FILE", "-", "stdin is a terminal; redirect it: kvtier import - < FILE")
        yield sys.stdin.buffer
        return
    try:
        source = file.open("rb")
    except (OSError, ValueError) as exc:
        raise InvalidArgumentError("FILE", str(file), f"cannot be read: {getattr(exc, 'strerror', exc)}") from exc
    with source:
        yield source


_KINDS = {
    stat.S_IFDIR: "a folder; name a file in it",
    stat.S_IFIFO: "a pipe; name a new file, and copy that",
    stat.S_IFSOCK: "a socket; name a new file",
    stat.S_IFCHR: "a device; name a new file",
    stat.S_IFBLK: "a device; name a new file, and copy that",
}


def _check_target(file: Path, *, force: bool) -> None:
    """Refuse targets that a rename would destroy: all but regular files, and those too without --force.

    Any link is refused too: to replace it and to write through it are both surprising.
    """
    try:
        mode = file.lstat().st_mode
        target = file.readlink() if stat.S_ISLNK(mode) else None
    except FileNotFoundError:
        return
    except OSError as exc:
        raise InvalidArgumentError("FILE", str(file), f"cannot be written: {exc.strerror}") from exc
    if target is not None:
        raise InvalidArgumentError("FILE", str(file), f"is a symbolic link to {target}; name the file itself")
    if not stat.S_ISREG(mode):
        raise InvalidArgumentError("FILE", str(file), f"is {_KINDS.get(stat.S_IFMT(mode), 'no file; name a new one')}")
    if not force:
        raise InvalidArgumentError("FILE", str(file), "exists; pass --force to overwrite it")


def _send(pieces: Iterator[bytes]) -> int:
    num_bytes = sum(sys.stdout.buffer.write(data) for data in pieces)
    sys.stdout.buffer.flush()
    return num_bytes


def _write(pieces: Iterator[bytes], file: Path, *, force: bool) -> int:
    """Write a temporary file beside the target, fsync it, and rename it to its final name."""
    temp = file.with_name(f".kvtier-export-{os.getpid()}.tmp")
    try:
        with open(temp, "xb", opener=partial(os.open, mode=0o600)) as target:
            for data in pieces:
                target.write(data)
            target.flush()
            os.fsync(target.fileno())
            num_bytes = target.tell()
        _check_target(file, force=force)  # again, because an export takes long
        temp.rename(file)
        fsync_directory(file.absolute().parent)
    except OSError as exc:
        raise InvalidArgumentError("FILE", str(file), f"cannot be written: {exc.strerror}") from exc
    finally:
        with suppress(OSError):
            temp.unlink(missing_ok=True)
    return num_bytes
