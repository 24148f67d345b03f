"""What the shell offers when somebody presses the tab key."""

from pathlib import Path

import typer

from kvtier.client.address import default_socket_path
from kvtier.client.admin import AdminClient
from kvtier.errors import KvtierError

_TIMEOUT_S = 1.0


def complete_prompt_name(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of prompts that begin so; none when no daemon answers quickly."""
    # Completing runs no callback, so that there are no Settings yet.
    socket = context.find_root().params.get("socket") or default_socket_path()
    try:
        with AdminClient(Path(socket), timeout_s=_TIMEOUT_S) as client:
            return [status.name for status in client.list() if status.name.startswith(incomplete)]
    except KvtierError:
        return []
