"""What the shell offers when somebody presses the tab key."""

from pathlib import Path

import typer

from kvtier.client.address import default_daemon_uid, default_socket_path
from kvtier.client.admin import AdminClient
from kvtier.errors import KvtierError

_TIMEOUT_S = 1.0


def complete_prompt_name(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of prompts that begin so; none when no daemon answers quickly."""
    # Completing runs no callback, so that there are no Settings yet.
    given = context.find_root().params
    socket, daemon_uid = given.get("socket") or default_socket_path(), given.get("daemon_uid")
    try:
        daemon_uid = default_daemon_uid() if daemon_uid is None else daemon_uid
        with AdminClient(Path(socket), daemon_uid=daemon_uid, timeout_s=_TIMEOUT_S) as client:
            return [status.name for status in client.list() if status.name.startswith(incomplete)]
    except KvtierError:
        return []
