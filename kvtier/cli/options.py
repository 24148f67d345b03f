"""Options that several commands take."""

from typing import Any

import typer

DEFAULT_URL = "http://127.0.0.1:8000"


def api_key_option(help_panel: str | None = None) -> Any:
    """Return the option that holds vLLM's API key; for `Annotated[str | None, ...]`.

    Args:
        help_panel: Where --help lists it.
    """
    return typer.Option(
        metavar="KEY",
        envvar=["VLLM_API_KEY", "OPENAI_API_KEY"],
        show_envvar=True,
        help="vLLM's API key, if it asks for one",
        rich_help_panel=help_panel,
    )
