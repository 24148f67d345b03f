"""`kvtier token`: who may call the daemon over TCP or HTTP, and what (docs/access.md)."""

import time
from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Annotated

import typer

from kvtier.access.caller import Role
from kvtier.cli.cli_client import CliClient
from kvtier.cli.context import connect
from kvtier.cli.options import AsJson, checked_text
from kvtier.cli.output.durations import format_age
from kvtier.cli.output.grid import Grid, Part, Styled, column
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.core.ttl import parse_duration
from kvtier.library.values.grant_values import Grant


class TokenAction(StrEnum):
    """What is done."""

    CREATE = "create"
    LIST = "list"
    REVOKE = "revoke"


def token(
    context: typer.Context,
    action: Annotated[TokenAction, typer.Argument(help="What to do", show_default=False)],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Of the grant", show_default=False, callback=checked_text),
    ] = None,
    role: Annotated[
        Role | None,
        typer.Option(help="create: viewers read, operators change prompts, admins do everything", show_default=False),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER",
            help="create: only prompts of this owner exist for it",
            show_default=False,
            callback=checked_text,
        ),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="create: it ends by itself, 12h or 30d [never]", show_default=False),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            metavar="COMMON_NAME",
            help="create: it is for a client certificate of this name, and has no token",
            show_default=False,
            callback=checked_text,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say who may call this daemon over TCP or HTTP: create, list or revoke grants.

    `create` prints the new token to stdout, once; the daemon keeps only its digest. Who may open the daemon's socket
    needs no token. See docs/access.md.
    """
    is_create = action is TokenAction.CREATE
    if (action is TokenAction.LIST) == (name is not None):
        problem = "list shows all grants; give no name" if name is not None else f"name the grant to {action}"
        raise typer.BadParameter(problem, param_hint="NAME")
    if is_create and role is None:
        raise typer.BadParameter("give it a role: --role viewer, operator or admin", param_hint="--role")
    for option, value in (("--role", role), ("--owner", owner), ("--ttl", ttl), ("--certificate", certificate)):
        if value is not None and not is_create:
            raise typer.BadParameter(f"is for `kvtier token create`, not for {action}", param_hint=option)
        if value == "":  # `--owner "$TEAM"` would be a grant for all owners
            raise typer.BadParameter("is empty; say which, or leave the option out", param_hint=option)
    output = Output(json=as_json)
    with connect(context) as client:
        if action is TokenAction.LIST:
            grants = client.grants()
            output.answer([to_jsonable(each) for each in grants], *_listed(grants))
        elif action is TokenAction.REVOKE:
            ended = client.revoke_grant(name or "")
            output.answer(ended, Styled(f"revoked: {ended.name} ({ended.role})"))
        else:
            assert role is not None
            _create(client, output, name or "", role, owner or "", ttl or "never", certificate or "")


def _create(client: CliClient, output: Output, name: str, role: Role, owner: str, ttl: str, certificate: str) -> None:
    ttl_s = parse_duration("--ttl", ttl)
    made = client.create_grant(name, role=role.value, owner=owner, ttl_s=ttl_s, certificate=certificate)
    if output.json:
        output.answer(made)
        return
    # Beside the answer, so that `kvtier token create ci --role operator > token` has the token only.
    notes = Output(json=True)
    if not made.token:
        output.say(Styled(f"granted: {_what(made.grant)}"))
        return
    notes.say(Styled(f"granted: {_what(made.grant)}"), Styled("its token is shown this once:"))
    output.say(Styled(made.token))


def _what(grant: Grant) -> str:
    owner = f", owner {grant.owner}" if grant.owner else ""
    certificate = f", for the client certificate {grant.certificate}" if grant.certificate else ""
    until = f", until {_date(grant.expires_unix_s)}" if grant.expires_unix_s else ""
    return f"{grant.name} is {grant.role}{owner}{certificate}{until}"


def _listed(grants: Iterable[Grant]) -> Iterable[Part]:
    grants = list(grants)
    if not grants:
        yield Styled("no grants: only the daemon's socket lets anyone in; `kvtier token create NAME --role ROLE`")
        return
    names = ("NAME", "ROLE", "OWNER", "BY", "AGE", "UNTIL")
    table = Grid(*(column(name, right=name == "AGE") for name in names))
    for each in grants:
        by = f"certificate {each.certificate}" if each.certificate else "token"
        is_over = 0 < each.expires_unix_s <= time.time()
        until = _date(each.expires_unix_s) if each.expires_unix_s else "never"
        table.row(
            each.name,
            each.role,
            each.owner or "-",
            by,
            format_age(each.created_unix_s),
            Styled(f"{until} (over)", "red") if is_over else until,
        )
    yield table


def _date(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):  # a daemon may say anything
        return f"{unix_s:.0f}"
