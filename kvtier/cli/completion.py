"""Completion of prompt names in the shell."""

import re
from pathlib import Path

import typer

from kvtier.client.address import default_daemon_uid, default_socket_path
from kvtier.client.admin import AdminClient
from kvtier.errors import KvtierError

_TIMEOUT_S = 1.0
# Some shells evaluate completions, so only valid names are offered.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@-]*")


def complete_prompt_name(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of prompts with this beginning; none when no daemon answers within a second."""
    # Completion runs no callback, so there are no GlobalOptions yet.
    given = context.find_root().params
    socket, daemon_uid = given.get("socket") or default_socket_path(), given.get("daemon_uid")
    try:
        daemon_uid = default_daemon_uid() if daemon_uid is None else daemon_uid
        with AdminClient(Path(socket), daemon_uid=daemon_uid, timeout_s=_TIMEOUT_S) as client:
            names = [status.name for status in client.list()]
    except (KvtierError, RuntimeError, ValueError):  # the last two: see `GlobalOptions.connect`
        return []
    return [name for name in names if name.startswith(incomplete) and _NAME.fullmatch(name)]
