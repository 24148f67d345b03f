"""`kvtier quarantine`: stop a namespace whose KV is not trusted, or let it serve again."""

from typing import Annotated

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import AsJson, checked_text, complete_namespace
from kvtier.cli.output.grid import Styled
from kvtier.cli.output.streams import Output
from kvtier.cli.output.tables import SHORT_ID, quarantine_lines


def quarantine(
    context: typer.Context,
    namespace: Annotated[
        str,
        typer.Argument(
            metavar="NAMESPACE",
            help="Its id, or the beginning of it, as `kvtier status` shows it",
            show_default=False,
            autocompletion=complete_namespace,
            callback=checked_text,
        ),
    ],
    reason: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Why, for people", show_default=False, callback=checked_text),
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Let it serve and store again")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop a namespace whose KV is not trusted: it serves and stores nothing until it is released.

    vLLM then computes every prompt. Nothing is deleted, and the quarantine survives restarts.
    """
    if release == bool(reason):
        raise typer.BadParameter("say why: --reason TEXT; or end a quarantine: --release", param_hint="--reason")
    with connect(context) as client:
        found = client.release(namespace) if release else client.quarantine(namespace, reason or "")
    lines = [Styled(f"released: namespace {found.namespace_id[:SHORT_ID]} serves and stores again")]
    Output(json=as_json).answer(found, *(lines if release else quarantine_lines([found])))
