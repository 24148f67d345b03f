"""Options that several commands have, and checks of their values."""

import math
from collections.abc import Sequence
from typing import Any

import typer

from kvtier.printable import shown_value

DEFAULT_URL = "http://127.0.0.1:8000"
MAX_WAIT_S = 7 * 86400.0


def checked_text(value: str | Sequence[str] | None) -> Any:
    """Refuse a name whose bytes are not UTF-8: it cannot be sent. A callback for Typer."""
    for text in [value] if isinstance(value, str) else value or ():
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise typer.BadParameter(f"{shown_value(text)} is not UTF-8; give it as UTF-8 text") from exc
    return value


def checked_number(value: float) -> float:
    """Refuse nan, which passes every range check. A callback for Typer."""
    if math.isnan(value):
        raise typer.BadParameter("nan is not a number; give one")
    return value


def api_key_option(help_panel: str | None = None) -> Any:
    """Return the option for the API key of vLLM; for `Annotated[str | None, ...]`.

    Args:
        help_panel: Section of --help that lists it.
    """
    return typer.Option(
        metavar="KEY",
        envvar=["VLLM_API_KEY", "OPENAI_API_KEY"],
        show_envvar=True,
        help="vLLM's API key, if it asks for one",
        rich_help_panel=help_panel,
    )
