"""`kvtier apply` and `kvtier export-config`: prompts as files say them."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.cli.context import connect, interruptible
from kvtier.cli.options import DEFAULT_URL, PromptNames, api_key_option, checked_text, seconds, url_option
from kvtier.cli.output.apply_messages import ApplyMessages
from kvtier.cli.output.streams import Output
from kvtier.errors import InvalidArgumentError
from kvtier.fsync import write_file_durably
from kvtier.library.client import Client
from kvtier.library.declared import AppliedSet, Change, ChangeKind, DeclaredErrors, json_schema, source_diff
from kvtier.library.rendering.recipe import Recipe
from kvtier.printable import MAX_LISTED
from kvtier.process import ExitCode

_MARKS = {ChangeKind.CREATE: "+", ChangeKind.REPLACE: "~", ChangeKind.UPDATE: "~", ChangeKind.UNPIN: "-"}


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
    output = Output(json=as_json)
    if print_schema:
        output.write_file(json.dumps(json_schema(), indent=2) + "\n")
        return
    if not files:
        raise typer.BadParameter("name a file or a folder with prompts: -f PATH", param_hint="-f")
    with connect(context, url, api_key) as client, interruptible(output, "what was applied stays; apply it again"):
        with ApplyMessages(output) as shown:
            try:
                done = client.apply(
                    *files, prune=prune, dry_run=dry_run, warm=not no_warm, timeout_s=timeout, on_progress=shown
                )
            except DeclaredErrors as exc:
                for error in exc.errors:
                    output.fail(str(error))
                output.fail(f"nothing was applied; mistakes: {len(exc.errors)}")
                raise typer.Exit(ExitCode.FAILED) from exc
        lines = [*_lines(client, done, dry_run=dry_run), _sum(done, dry_run=dry_run)]
    output.answer(_jsonable(done), *lines)
    if done.incomplete:
        output.warn(f"not durable yet: {', '.join(done.incomplete[:MAX_LISTED])}; see kvtier list")
        raise typer.Exit(ExitCode.FAILED)
    if done.unrendered and not dry_run:
        output.say(
            f"{len(done.unrendered)} are not turned into tokens yet: a vLLM with `warm_url` does that when it "
            "attaches; else apply again when vLLM runs"
        )
    if detailed_exitcode and done.changed:
        raise typer.Exit(ExitCode.CHANGED)


def _lines(client: Client, done: AppliedSet, *, dry_run: bool) -> Iterator[str]:
    changes = [change for change in done.changes if change.kind is not ChangeKind.UNCHANGED]
    for number, change in enumerate(changes):
        yield f"{_MARKS[change.kind]} {change.name}: {change.kind}{_fields(change.fields)}"
        if dry_run and change.kind is ChangeKind.REPLACE and number < MAX_LISTED:
            yield from (f"    {line}" for line in _source_lines(client, change))


def _fields(fields: Mapping[str, tuple[object, object]]) -> str:
    shown = [f"{name} {_plain(before)} → {_plain(after)}" for name, (before, after) in fields.items()]
    return f" ({'; '.join(shown)})" if shown else ""


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={each}" for key, each in sorted(value.items())) or "none"
    return json.dumps(value, ensure_ascii=False)


def _source_lines(client: Client, change: Change) -> Iterator[str]:
    assert change.declared is not None
    assert change.standing is not None
    before = client.get(change.standing.name).recipe
    yield from source_diff(change.name, Recipe.from_values(before) if before else None, change.declared.recipe)


def _sum(done: AppliedSet, *, dry_run: bool) -> str:
    counts = Counter(change.kind for change in done.changes)
    words = {
        ChangeKind.CREATE: "new",
        ChangeKind.REPLACE: "replaced",
        ChangeKind.UPDATE: "changed",
        ChangeKind.UNPIN: "unpinned",
        ChangeKind.UNCHANGED: "unchanged",
    }
    parts = [f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind]]
    return f"{'would be' if dry_run else 'applied'}: {', '.join(parts) or 'no prompts'}"


def _jsonable(done: AppliedSet) -> dict[str, Any]:
    changes = [
        {
            "name": change.name,
            "change": change.kind.value,
            "fields": {name: {"before": pair[0], "after": pair[1]} for name, pair in change.fields.items()},
        }
        for change in done.changes
        if change.kind is not ChangeKind.UNCHANGED
    ]
    num_unchanged = sum(change.kind is ChangeKind.UNCHANGED for change in done.changes)
    return {
        "changes": changes,
        "num_unchanged": num_unchanged,
        "unrendered": _names(done.unrendered),
        "incomplete": _names(done.incomplete),
    }


def _names(names: Sequence[str]) -> list[str]:
    return list(names)


def export_config(
    context: typer.Context,
    names: PromptNames = None,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file [default: stdout]", show_default=False),
    ] = None,
) -> None:
    """Write pins as YAML, with their sources, for `kvtier apply -f`."""
    with connect(context) as client:
        text = client.export_config(*dict.fromkeys(names or ()))
    if output_file is None:
        Output().write_file(text)
    else:
        try:
            path = output_file.resolve()
            if path.exists() and not path.is_file():  # a device, a pipe
                path.write_bytes(text.encode())
            else:
                write_file_durably(path, text.encode())
        except (OSError, ValueError) as exc:  # the latter: a NUL in the path
            raise InvalidArgumentError("--output", str(output_file), f"cannot be written: {exc}") from exc
        Output().say(f"written: {output_file}; it holds the text of prompts, and only you may read it")
