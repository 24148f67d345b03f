"""`kvtier explain`: why a request is, or was, restored what it is."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import DEFAULT_URL, AsJson, api_key_option, checked_text, url_option
from kvtier.cli.output.durations import format_age
from kvtier.cli.output.grid import Cell, Grid, Part, column
from kvtier.cli.output.streams import Output
from kvtier.cli.source_files import read_request, read_tokens
from kvtier.errors import InvalidArgumentError
from kvtier.library.values.outcome_values import (
    ChangeLooksLike,
    Difference,
    Explained,
    MissingCause,
    MissingChunks,
    NearPrompt,
    RecentRequest,
    RequestOutcome,
)
from kvtier.library.values.plain_json import to_jsonable

_OUTCOMES = [each.value for each in RequestOutcome if each is not RequestOutcome.UNRECOGNIZED]


def explain(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="A chat or completions request as it is sent to vLLM, JSON; -: stdin",
            show_default=False,
            callback=checked_text,
        ),
    ] = None,
    request_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="A recent request, by the id of its answer or its X-Request-Id",
            show_default=False,
            callback=checked_text,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Token ids, JSON; needs no vLLM", show_default=False, callback=checked_text),
    ] = None,
    recent: Annotated[bool, typer.Option("--recent", help="List recent requests, the last one first")] = False,
    misses: Annotated[bool, typer.Option("--misses", help="With --recent: only what kvtier should have had")] = False,
    outcome: Annotated[
        list[str] | None,
        typer.Option("--outcome", metavar="NAME", help="With --recent: only these; repeatable", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=4096, help="With --recent: at most this many (default: 20)")
    ] = None,
    cache_salt: Annotated[
        str, typer.Option(metavar="SALT", help="With --tokens: the request's cache_salt", callback=checked_text)
    ] = "",
    url: Annotated[str, url_option()] = DEFAULT_URL,
    api_key: Annotated[str | None, api_key_option()] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a request hits or misses: which pin it begins like, where it differs, what is held of it.

    Stores nothing and computes nothing. With FILE, vLLM turns the request into tokens.
    """
    given = {"FILE": file, "--id": request_id, "--tokens": tokens, "--recent": recent or None}
    if sum(value is not None for value in given.values()) != 1:
        raise typer.BadParameter("give a FILE, or --id, or --tokens, or --recent", param_hint="FILE")
    selected = {"--misses": misses, "--outcome": outcome, "--limit": limit}
    for option in (name for name, value in selected.items() if value and not recent):
        raise typer.BadParameter("goes with --recent", param_hint=option)
    if cache_salt and tokens is None:
        raise typer.BadParameter("goes with --tokens; a request in a FILE has its own", param_hint="--cache-salt")
    wanted = [_outcome(name) for name in outcome or ()]
    output = Output(json=as_json)
    with connect(context, url, api_key) as client:
        if recent:
            found = client.recent_requests(limit=limit or 20, outcomes=wanted, misses_only=misses)
            output.answer([to_jsonable(each) for each in found], *_recent(found))
            return
        if request_id is not None:
            explained = client.explain_request(request_id)
        elif tokens is not None:
            explained = client.explain(tokens=read_tokens(tokens), cache_salt=cache_salt)
        else:
            assert file is not None
            explained = client.explain(read_request(file))
    output.answer(to_jsonable(explained), *_lines(explained, is_recent=request_id is not None))


def _outcome(name: str) -> RequestOutcome:
    value = name.lower().replace("-", "_")
    if value not in _OUTCOMES:
        raise InvalidArgumentError("--outcome", name, f"is none of {', '.join(_OUTCOMES)}")
    return RequestOutcome(value)


def _recent(found: Sequence[RecentRequest]) -> Iterator[Part]:
    if not found:
        yield "no such request since the daemon started"
        return
    numbers = [column(title, right=True) for title in ("TOKENS", "SHARED", "DEVICE", "HOST", "DISK")]
    table = Grid(column("REQUEST", wraps=True), column("AGO", right=True), column("OUTCOME"), column("PIN"), *numbers)
    for each in found:
        cells = (each.prompt_tokens, each.shared_tokens, each.device_tokens, each.host_tokens, each.disk_tokens)
        name = each.pin_name or "-"
        table.row(each.request_id, format_age(each.ended_unix_s), each.outcome, name, *map(str, cells))
    yield table


def _lines(explained: Explained, *, is_recent: bool) -> Iterator[Part]:
    explanation = explained.explanation
    rows: dict[str, Cell] = {"outcome": f"{explanation.outcome}: {explanation.reason}"}
    if (request := explanation.request) is not None:
        restored = f"{request.device_tokens} from vLLM's prefix cache, {request.host_tokens} from host memory, "
        rows["tokens"] = f"{request.prompt_tokens}: {restored}{request.disk_tokens} from disk, the rest computed"
    elif explained.num_tokens:
        rows["tokens"] = str(explained.num_tokens)
    for number, near in enumerate(explanation.prompts):
        rows["nearest" if not number else f"{number + 1}."] = _near(near, is_recent=is_recent)
    if (last := explanation.last_request) is not None:
        ended = f"{format_age(last.ended_unix_s)} ago, {last.request_id}"
        rows["last request"] = f"{last.outcome}, of {last.pin_name}, {ended}; `kvtier explain --id` says more"
    if is_recent and explanation.outcome in (RequestOutcome.DIVERGED, RequestOutcome.UNKNOWN):
        rows["where"] = "`kvtier explain FILE`, with the request, shows where it differs, and looks at other salts too"
    table = Grid(column(style="bold"), column(wraps=True), gap=2)
    for name, value in rows.items():
        table.row(name, value)
    yield table
    if explained.difference is not None:
        yield from ("", *_difference(explained.difference))


def _near(near: NearPrompt, *, is_recent: bool) -> tuple[str, ...]:
    shared = f"{near.shared_tokens} of {near.num_tokens} tokens{', in whole chunks' if is_recent else ''}"
    lines = [f"{near.name}{'' if near.pinned else ' (not pinned)'}: {shared}"]
    if near.differs_at:
        lines[0] += f"; token {near.differs_at} is the first that differs"
    if near.differs_in:
        lines.append(f"not for this request: they differ in {' and '.join(near.differs_in)}")
    for each in near.bindings:
        where = f"engine{' attached' if each.live else ' of before'}, namespace {each.namespace_id[:12]}"
        held = (
            f"{each.num_host_chunks} in host memory, {each.num_disk_chunks} on disk, {each.num_missing_chunks} missing"
        )
        lines.append(f"{where}: {each.shared_tokens} tokens in whole chunks ({held}), {each.lost_tokens} beyond them")
        if each.missing:
            lines.append(f"  missing: {', '.join(map(_missing, each.missing))}")
        if each.differing_fields:
            lines.append(f"  differs from an attached one in {', '.join(each.differing_fields)}")
        if each.live and not each.bound:
            lines.append("  it has not recognized the prompt yet")
    return tuple(lines)


def _missing(missing: MissingChunks) -> str:
    if missing.cause is MissingCause.NOT_RECORDED:
        return f"{missing.num_chunks} never stored, or lost before what the daemon remembers"
    if missing.cause is MissingCause.UNRECOGNIZED:
        cause = "lost for a reason that a newer daemon knows"
    else:
        cause = missing.cause.replace("_", " ")
    return f"{missing.num_chunks} {cause} {format_age(missing.last_unix_s)} ago"


def _difference(difference: Difference) -> Iterator[str]:
    yield f"where it differs from {difference.name}:"
    yield f"  before   …{_shown(difference.before)}"
    yield f"  request  {_shown(difference.in_request)}…"
    yield f"  pin      {_shown(difference.in_prompt)}…"
    if difference.looks_like is not ChangeLooksLike.TEXT:
        yield (
            f"This looks like {difference.looks_like}: if it changes from request to request, nothing behind it can be "
            "restored. Put it behind the pinned prompt, into the user turn."
        )


def _shown(text: str) -> str:
    """Return text on one line, with its line breaks to be seen."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
