"""`kvtier export` and `kvtier import`: a pinned prompt as a file, or as a stream (`-`)."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvtier.cli.cli_client import OPTION_NAMES
from kvtier.cli.context import connect, interruptible
from kvtier.cli.options import PUBLIC_HELP, AsJsonWithProgress, PromptName, checked_text
from kvtier.cli.output.progress import byte_progress
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import pin_result
from kvtier.config.units import format_size
from kvtier.core.ttl import parse_duration
from kvtier.errors import InvalidArgumentError
from kvtier.library.client import open_bundle
from kvtier.library.flows.bundle_files import check_target
from kvtier.library.values.prompt_summary import summarize

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
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="KEYS", help="Seal the file with the first key of this file", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE, if it is a regular file")] = False,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Write a pinned prompt with its KV cache into a file, for `kvtier import` on another machine.

    The file is a safetensors file. It holds the text of the prompt, and only you may read it. With --key-file it is
    encrypted, and no safetensors file until it is imported.
    """
    to_stdout = file == _STANDARD
    if to_stdout and as_json:
        raise InvalidArgumentError("--json", "with FILE -", "the bundle goes to stdout; name a file")
    if to_stdout and sys.stdout.isatty():
        raise InvalidArgumentError("FILE", "-", f"stdout is a terminal; redirect it: kvtier export {name} - > FILE")
    output = Output(json=as_json or to_stdout)  # messages go to stderr
    if not to_stdout:
        check_target(file, OPTION_NAMES, overwrite=force)  # before the daemon is asked
    with connect(context) as client:
        status = client.get(name)
        expected = 0 if decoded else max((binding.disk_bytes for binding in status.bindings), default=0)
        with (
            interruptible(output, "the bundle on stdout is incomplete" if to_stdout else "nothing was written"),
            byte_progress(output, expected) as show,
        ):
            num_bytes = client.export(
                name,
                sys.stdout.buffer if to_stdout else file,
                namespace_id=namespace,
                decoded=decoded,
                overwrite=force,
                key_file=key_file,
                on_progress=show,
            )
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
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="KEYS", help="A file that has the key of a sealed bundle", show_default=False),
    ] = None,
    as_json: AsJsonWithProgress = False,
) -> None:
    """Pin a prompt from a bundle of `kvtier export`; vLLM computes nothing.

    Needs a namespace with the fingerprint of the bundle: a vLLM with the same model and settings has attached once.
    """
    output = Output(json=as_json)
    ttl_s = parse_duration("--ttl", ttl)
    with (
        _opened(file) as source,
        connect(context) as client,
        interruptible(output, "see kvtier list for what was done"),
        byte_progress(output, 0 if file == _STANDARD else os.fstat(source.fileno()).st_size) as show,
    ):
        status = client.import_bundle(
            source, name=name, replace=replace, ttl_s=ttl_s, public=public, key_file=key_file, on_progress=show
        )
    source_name = "stdin" if file == _STANDARD else file
    output.answer(status, f"imported: {status.name} from {source_name}", pin_result(status))


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    if file == _STANDARD:
        if sys.stdin.isatty():
            raise InvalidArgumentError("FILE", "-", "stdin is a terminal; redirect it: kvtier import - < FILE")
        yield sys.stdin.buffer
        return
    with open_bundle(file, OPTION_NAMES["file"]) as source:
        yield source
