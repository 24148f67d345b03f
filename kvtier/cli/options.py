"""Arguments and options that several commands have, checks of their values, and completion of names."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from kvtier.cli.cli_client import CliClient
from kvtier.cli.output.tables import SHORT_ID
from kvtier.errors import InvalidArgumentError, KvtierError
from kvtier.library.connection import DEFAULT_URL as DEFAULT_URL
from kvtier.library.connection import KEY_VARIABLES, URL_VARIABLE
from kvtier.printable import shown_value

# Some shells evaluate completions, so only valid names are offered.
_VALID_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@-]*")


def checked_text(value: str | Sequence[str] | None) -> Any:
    """Refuse a name whose bytes are not UTF-8: it cannot be sent. A callback for Typer."""
    for text in [value] if isinstance(value, str) else value or ():
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise typer.BadParameter(f"{shown_value(text)} is not UTF-8; give it as UTF-8 text") from exc
    return value


def checked_given(context: typer.Context, param: typer.CallbackParam, value: str | None) -> Any:
    """Refuse an empty value on the command line (`--server "$HOST"`), which would stand for none. For Typer."""
    source = context.get_parameter_source(param.name or "")
    if value == "" and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("is empty; say which, or leave the option out")
    return checked_text(value)


def checked_selectors(value: Sequence[str] | None) -> Any:
    """Refuse labels that are empty, which would select every prompt (`-l "$LABELS"`). A callback for Typer."""
    if any(not text.strip() for text in value or ()):
        raise typer.BadParameter("is empty, which is no label; write labels like team=support, or leave it out")
    return checked_text(value)


def checked_number(value: float) -> float:
    """Refuse nan, which passes every range check. A callback for Typer."""
    if math.isnan(value):
        raise typer.BadParameter("nan is not a number; give one")
    return value


def completing_client(context: typer.Context) -> CliClient:
    """Return a client for a completion, which has a second; it raises what the library's client does."""
    # Completion runs no callback, so there are no GlobalOptions yet.
    root = context.find_root()
    sources = {name: root.get_parameter_source(name) for name in root.params}
    # What the environment says the library reads: its server counts only if no socket is named.
    given = {name: root.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    given.pop("version", None)
    return CliClient(given.pop("socket", None), timeout_s=1.0, **given)


def _asked(context: typer.Context, ask: Callable[[CliClient], list[str]]) -> list[str]:
    """Return what the daemon says for a completion; nothing when none answers within a second."""
    try:
        with completing_client(context) as client:
            return ask(client)
    except (KvtierError, RuntimeError, ValueError):  # the last two: the path cannot be a socket's
        return []


def complete_prompt_name(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of prompts with this beginning; none when no daemon answers within a second."""
    names = _asked(context, lambda client: [status.name for status in client.list()])
    return [name for name in names if name.startswith(incomplete) and _VALID_NAME.fullmatch(name)]


def complete_namespace(context: typer.Context, incomplete: str) -> list[str]:
    """Return the short ids of namespaces with this beginning; none when no daemon answers within a second."""
    ids = _asked(context, lambda client: [each.namespace_id[:SHORT_ID] for each in client.status().namespaces])
    # Some shells evaluate completions.
    return [each for each in ids if each.startswith(incomplete) and each.isascii() and each.isalnum()]


NAME = typer.Argument(
    metavar="NAME",
    help="Name of the prompt",
    show_default=False,
    autocompletion=complete_prompt_name,
    callback=checked_text,
)
PromptName = Annotated[str, NAME]
PromptNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...",
        help="Names of prompts",
        show_default=False,
        autocompletion=complete_prompt_name,
        callback=checked_text,
    ),
]
PUBLIC_HELP = "Restore it for requests with any cache_salt, not only for those without one"
PRIORITY_HELP = "Which prompts come back first after a restart, and stay longest in vLLM's cache (a new pin: 0)"
SELECTOR = typer.Option(
    "--selector",
    "-l",
    metavar="LABELS",
    help="Prompts with these labels: team=support,tier!=1,canary,!draft",
    show_default=False,
    callback=checked_selectors,
)
Selectors = Annotated[list[str] | None, SELECTOR]
OWNER_HELP = "Whose prompt it is: a team, a service; the daemon may limit what an owner has pinned"
SLIDING_HELP = "The time to live begins again with each use"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON")]
AsJsonWithProgress = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr")]


def parse_labels(texts: Sequence[str], *, may_remove: bool = False) -> dict[str, str | None]:
    """Return labels of KEY=VALUE, and with `may_remove` of KEY- (None); InvalidArgumentError for others."""
    labels: dict[str, str | None] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if equals:
            labels[key] = value
        elif may_remove and text.endswith("-"):
            labels[text[:-1]] = None
        else:
            remedy = "write it as team=support" + (", or team- to remove it" if may_remove else "")
            raise InvalidArgumentError("--label", text, remedy)
    return labels


def seconds(help_text: str, min_s: float, help_panel: str | None = None) -> Any:
    """Return an option for a wait of at least `min_s` and at most a week; for `Annotated[float, ...]`."""
    return typer.Option(
        metavar="SECONDS",
        min=min_s,
        max=7 * 86400.0,
        help=help_text,
        callback=checked_number,
        rich_help_panel=help_panel,
    )


def url_option(help_panel: str | None = None, help_text: str = "vLLM's API server") -> Any:
    """Return the option for the URL of vLLM, for `Annotated`, in a section of --help."""
    return typer.Option(metavar="URL", envvar=URL_VARIABLE, help=help_text, rich_help_panel=help_panel)


def api_key_option(help_panel: str | None = None) -> Any:
    """Return the option for the API key of vLLM, for `Annotated`, in a section of --help."""
    return typer.Option(
        metavar="KEY", envvar=list(KEY_VARIABLES), help="vLLM's API key, if it asks for one", rich_help_panel=help_panel
    )
