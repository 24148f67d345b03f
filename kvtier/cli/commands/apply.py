"""`kvtier apply` and `kvtier export-config`: prompts as files say them."""

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier.cli.commands.whole_files import write_whole
from kvtier.cli.context import connect, interruptible
from kvtier.cli.options import DEFAULT_URL, PromptNames, api_key_option, checked_text, seconds, url_option
from kvtier.cli.output.apply_messages import ApplyMessages, listed, prompts
from kvtier.cli.output.streams import Output
from kvtier.errors import InvalidArgumentError, KvtierError, OwnerQuotaError, QuotaExceededError
from kvtier.printable import MAX_LISTED
from kvtier.process import ExitCode

if TYPE_CHECKING:
    from kvtier.library.declared import AppliedSet


def apply(
    context: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Option(
            "--filename",
            "-f",
            metavar="PATH",
            help="File or folder with prompts, YAML or JSON; -: stdin; repeatable",
            show_default=False,
            callback=checked_text,
        ),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="End pins of the same set that no file names")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Move prompts that belong to other sets to those of the files")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what differs, and change nothing")] = False,
    detailed_exitcode: Annotated[
        bool, typer.Option("--detailed-exitcode", help="Exit with 4 if something differs, with 0 if nothing does")
    ] = False,
    no_warm: Annotated[bool, typer.Option("--no-warm", help="Do not have vLLM compute what is new")] = False,
    url: Annotated[str, url_option()] = DEFAULT_URL,
    api_key: Annotated[str | None, api_key_option()] = None,
    timeout: Annotated[float, seconds("Time for each prompt that vLLM computes", 1)] = 600.0,
    print_schema: Annotated[
        bool, typer.Option("--print-schema", help="Print the JSON Schema of such files, and exit")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what differs as JSON")] = False,
) -> None:
    """Make prompts what files say: pin new ones, replace and change others, all at once or not at all.

    Works before any vLLM runs: sources are rendered when one with `warm_url` attaches, or by the next apply. What files
    do not say has its default. Pins that no file names stay, unless --prune is given.
    """
    # Here, because they take a fifth of a second to load, which other commands need not wait for.
    from kvtier.cli.output import changes
    from kvtier.library.declared import (
        DeclaredErrors,
        applied_to_jsonable,
        failure_to_jsonable,
        json_schema,
        mistakes_to_jsonable,
    )

    output = Output(json=as_json)
    if print_schema:
        output.write_file(json.dumps(json_schema(), indent=2) + "\n")
        return
    if misplaced := checked_text(context.args):
        named = " ".join(f"-f {shlex.quote(path)}" for path in (*(files or ()), *misplaced))
        raise typer.BadParameter(f"name files and folders with -f: kvtier apply {named}", param_hint=misplaced[0])
    if not files:
        raise typer.BadParameter("name a file or a folder with prompts: -f PATH", param_hint="-f")
    with connect(context, url, api_key) as client, interruptible(output, "what was applied stays; apply it again"):
        with ApplyMessages(output) as shown:
            try:
                done = client.apply(
                    *files,
                    prune=prune,
                    take_over=take_over,
                    dry_run=dry_run,
                    warm=not no_warm,
                    timeout_s=timeout,
                    on_progress=shown,
                )
            except DeclaredErrors as exc:
                for error in exc.errors:
                    output.fail(str(error))
                output.fail(f"nothing was applied; mistakes: {len(exc.errors)}")
                output.answer(mistakes_to_jsonable(exc.errors))
                raise typer.Exit(ExitCode.FAILED) from exc
            except (QuotaExceededError, OwnerQuotaError) as exc:
                output.fail(str(exc))
                output.fail("nothing was applied: the daemon refuses all of it")
                output.answer(failure_to_jsonable(exc))
                raise typer.Exit(ExitCode.FAILED) from exc
            except KvtierError as exc:
                output.answer(failure_to_jsonable(exc))
                raise
        lines = list(changes.lines(client, done, dry_run=dry_run))
    output.answer(applied_to_jsonable(done), *lines)
    if done.not_in_files:
        is_one = len(done.not_in_files) == 1
        pins = "1 pin of this set is" if is_one else f"{len(done.not_in_files)} pins of this set are"
        output.say(f"{pins} in no file ({listed(done.not_in_files)}): --prune removes {'it' if is_one else 'them'}")
    if done.unrendered and not dry_run:
        output.say(
            f"{len(done.unrendered)} are not turned into tokens yet: a vLLM with `warm_url` does that when it "
            "attaches; else apply again when vLLM runs"
        )
    _conclude(output, done)
    if detailed_exitcode and done.changed:
        raise typer.Exit(ExitCode.CHANGED)


def _conclude(output: Output, done: "AppliedSet") -> None:
    """Say what is not as it should be; if anything is not, end with the exit code for it."""
    if done.incomplete:
        output.warn(f"not durable yet: {listed(done.incomplete)}; see kvtier list")
    for refused in done.refused[:MAX_LISTED]:
        output.fail(f"refused: {refused.name}: {refused.why}")
    if done.refused:
        more = len(done.refused) - MAX_LISTED
        others = f" ({more} more; --json has them all)" if more > 0 else ""
        output.fail(f"refused: {prompts(len(done.refused))}{others}; pinned, but not durable. All others are applied")
    if done.incomplete or done.refused:
        raise typer.Exit(ExitCode.FAILED)


def export_config(
    context: typer.Context,
    names: PromptNames = None,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file [default: stdout]", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file")] = False,
) -> None:
    """Write pins as YAML, with their sources, for `kvtier apply -f`: a document for each set."""
    if output_file is not None and not force and os.path.isfile(output_file):  # noqa: PTH113 (Path's may raise)
        raise InvalidArgumentError("--output", str(output_file), "exists; pass --force to overwrite it")
    with connect(context) as client:
        text = client.export_config(*dict.fromkeys(names or ()))
    if output_file is None:
        Output().write_file(text)
    else:
        try:
            write_whole(output_file.resolve(), text.encode())
        except (OSError, ValueError, RuntimeError) as exc:  # the latter two: a NUL in the path, links in a circle
            raise InvalidArgumentError("--output", str(output_file), f"cannot be written: {exc}") from exc
        Output().say(f"written: {output_file}; it holds the text of prompts, and only you may read it")
