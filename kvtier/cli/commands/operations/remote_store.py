"""`kvtier remote`: how this daemon stands with the store that hosts share, and what it costs."""

from collections.abc import Iterator

import typer

from kvtier.cli.context import connect
from kvtier.cli.options import AsJson
from kvtier.cli.output.durations import format_age
from kvtier.cli.output.grid import Grid, Part, Styled, column
from kvtier.cli.output.streams import Output
from kvtier.config.units import format_size
from kvtier.library.values.remote_values import RemoteStatus


def remote(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the store that hosts share: its pins and hosts, what is on its way, and what it costs.

    The setting `remote.url` names the store; see docs/fleet.md.
    """
    with connect(context) as client:
        status = client.remote()
        if status.url and not status.problem:
            status = client.remote(with_hosts=True)
    Output(json=as_json).answer(status, *_parts(status))


def _parts(status: RemoteStatus) -> Iterator[Part]:
    if not status.url:
        yield Styled("this daemon shares nothing: remote.url is off (docs/fleet.md)")
        return
    grid = Grid(column(), column(wraps=True))
    for name, value in _rows(status):
        grid.row(Styled(name, "dim"), value)
    yield grid
    for each in status.refused:
        yield Styled(f"not taken: {each.name}: {each.why}", "yellow")
    if status.hosts:
        hosts = Grid(column("HOST"), column("VERSION"), column("SEEN", right=True))
        for host in status.hosts:
            own = " (this one)" if host.host == status.host else ""
            hosts.row(host.host + own, host.version, format_age(host.seen_unix_s - status.clock_offset_s))
        yield hosts


def _rows(status: RemoteStatus) -> Iterator[tuple[str, str | Styled]]:
    spent = status.spending
    yield "store", status.url
    yield "state", Styled(status.problem, "red") if status.problem else Styled("reachable", "green")
    if status.looked_unix_s:
        yield "pins read", f"{format_age(status.looked_unix_s)} ago"
    waiting = f", {status.num_waiting_pins} of this host not there yet" if status.num_waiting_pins else ""
    yield "pins", f"{status.num_pins}{waiting}"
    yield "KV", f"{status.num_kv_objects} objects, {format_size(status.kv_bytes)}"
    yield "since start", f"{status.num_uploaded} prompts uploaded, {status.num_restored} restored"
    if status.num_conflicts:
        yield "conflicts", Styled(f"{status.num_conflicts} names (`kvtier list` shows NAME-conflict-...)", "yellow")
    requests = f"{spent.num_writes} writes, {spent.num_reads} reads, {spent.num_lists} lists, {spent.num_failed} failed"
    yield "requests", requests
    yield "bytes", f"{format_size(spent.bytes_up)} up, {format_size(spent.bytes_down)} down"
    yield "cost", f"${spent.dollars:.4f} since the daemon's start"
