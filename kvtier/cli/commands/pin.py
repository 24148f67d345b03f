"""`kvtier pin`: its command line. `flows.pin_flow` does the work."""

import math
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.cli.context import EXIT_FAILED, EXIT_INTERRUPTED, settings_of
from kvtier.cli.flows.pin_flow import PinFlow, PinJob
from kvtier.cli.options import DEFAULT_URL, MAX_WAIT_S, api_key_option, checked_number, checked_text
from kvtier.cli.output.durations import parse_duration
from kvtier.cli.output.streams import Output
from kvtier.cli.prompt_text import sources
from kvtier.cli.prompt_text.sources import Recipe, SourceKind
from kvtier.cli.vllm_api.http_client import VllmClient
from kvtier.client.admin import AdminClient, RemoteError
from kvtier.errors import InvalidArgumentError
from kvtier.printable import shown_url

_SOURCE, _VLLM, _PIN = "What to pin (one of)", "vLLM", "How"


@dataclass(frozen=True, kw_only=True)
class _SourceOptions:
    """The files named on the command line (`-` is stdin), and the options that belong to them."""

    system: str | None
    messages: str | None
    text: str | None
    tokens: str | None
    tools: str | None
    template_kwargs: str | None

    def check(self) -> None:
        """Raise InvalidArgumentError for options that exclude each other."""
        kinds = {"--system": self.system, "--messages": self.messages, "--text": self.text, "--tokens": self.tokens}
        given = [option for option, path in kinds.items() if path is not None]
        if len(given) > 1:
            raise InvalidArgumentError(given[1], kinds[given[1]], f"cannot go with {given[0]}; give one source")
        for_chats = {"--tools": self.tools, "--chat-template-kwargs": self.template_kwargs}
        for option, value in for_chats.items():
            if value is not None and self.system is None and self.messages is None:
                raise InvalidArgumentError(option, value, "goes with --system or --messages only")
        if [*kinds.values(), self.tools].count("-") > 1:
            raise InvalidArgumentError("--tools", "-", "stdin can be read once only; name a file")

    def read(self) -> tuple[Recipe, tuple[int, ...]] | None:
        """Return the recipe and, for token ids, the tokens; None when no source was given."""
        self.check()
        tools: list[Any] | None = sources.read_tools(self.tools) if self.tools is not None else None
        kwargs = sources.parse_template_kwargs(self.template_kwargs) if self.template_kwargs is not None else None
        if self.system is not None:
            return sources.read_system(self.system, tools, kwargs), ()
        if self.messages is not None:
            return sources.read_messages(self.messages, tools, kwargs), ()
        if self.text is not None:
            return sources.read_plain_text(self.text), ()
        if self.tokens is not None:
            return Recipe(kind=SourceKind.TOKENS), tuple(sources.read_tokens(self.tokens))
        return None


@dataclass(frozen=True, kw_only=True)
class _PinOptions:
    """The other options that the job needs."""

    name: str
    model: str
    cache_salt: str
    ttl: str | None
    priority: int | None
    replace: bool
    warm: bool
    timeout_s: float
    url: str


def pin(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the prompt", show_default=False, callback=checked_text)
    ],
    system: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="System prompt, exactly as requests send it", rich_help_panel=_SOURCE),
    ] = None,
    messages: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Chat messages, JSON as in the OpenAI API", rich_help_panel=_SOURCE),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text for the completions API", rich_help_panel=_SOURCE)
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Token ids, a JSON list; works before vLLM runs", rich_help_panel=_SOURCE),
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="OpenAI tools, JSON; with --system or --messages", rich_help_panel=_SOURCE),
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="chat_template_kwargs as requests send them; with --system or --messages",
            rich_help_panel=_SOURCE,
        ),
    ] = None,
    url: Annotated[
        str, typer.Option(metavar="URL", envvar="KVTIER_VLLM_URL", help="vLLM's API server", rich_help_panel=_VLLM)
    ] = DEFAULT_URL,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Served model or LoRA (default: the first one)",
            rich_help_panel=_VLLM,
            callback=checked_text,
        ),
    ] = "",
    api_key: Annotated[str | None, api_key_option(_VLLM)] = None,
    cache_salt: Annotated[
        str,
        typer.Option(
            metavar="SALT", help="cache_salt as requests send it", rich_help_panel=_VLLM, callback=checked_text
        ),
    ] = "",
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="End the pin after this time: 12h, 7d (default: never)", rich_help_panel=_PIN
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=-100,
            max=100,
            help="Which prompts come back first after a restart, and stay longest in vLLM's cache (default: 0)",
            show_default=False,
            rich_help_panel=_PIN,
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace another prompt of that name", rich_help_panel=_PIN)
    ] = False,
    no_warm: Annotated[
        bool,
        typer.Option(
            "--no-warm", help="Register only; chunks are captured when vLLM next computes them", rich_help_panel=_PIN
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1,
            max=MAX_WAIT_S,
            help="Time for warming",
            rich_help_panel=_PIN,
            callback=checked_number,
        ),
    ] = 600.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr", rich_help_panel=_PIN)
    ] = False,
) -> None:
    """Pin a prompt: keep its KV cache in host memory and on disk until unpinned.

    vLLM turns the source into tokens and computes them once; the daemon keeps the result. FILE may be - for stdin.
    Without a source, a known prompt is rendered and warmed again from its stored source.
    """
    source = _SourceOptions(
        system=system,
        messages=messages,
        text=text,
        tokens=tokens,
        tools=tools,
        template_kwargs=chat_template_kwargs,
    )
    options = _PinOptions(
        name=name,
        model=model,
        cache_salt=cache_salt,
        ttl=ttl,
        priority=priority,
        replace=replace,
        warm=not no_warm,
        timeout_s=timeout,
        url=shown_url(url),
    )
    output = Output(json=as_json)
    read = source.read()
    ttl_s = parse_duration("--ttl", ttl) if ttl is not None else 0
    with settings_of(context).connect() as client, VllmClient(url, api_key) as vllm:
        job = _job(options, *read, ttl_s) if read else _stored_job(options, _known(client, name), ttl_s)
        try:
            done = PinFlow(client, vllm, output).run(job)
        except KeyboardInterrupt:
            output.say("", f"interrupted; what was registered stays: kvtier show {name}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if not done:
        raise typer.Exit(EXIT_FAILED)


def _job(options: _PinOptions, recipe: Recipe, tokens: tuple[int, ...], ttl_s: int) -> PinJob:
    return PinJob(
        name=options.name,
        recipe=recipe,
        tokens=tokens,
        model=options.model,
        cache_salt=options.cache_salt,
        ttl_s=ttl_s,
        priority=options.priority or 0,
        replace=options.replace,
        warm=options.warm,
        timeout_s=options.timeout_s,
        url=options.url,
    )


def _known(client: AdminClient, name: str) -> PromptStatus:
    try:
        return client.get(name)
    except RemoteError as exc:
        if exc.code != "NOT_FOUND":
            raise
        raise InvalidArgumentError(
            "NAME", name, "is no known prompt; say what to pin: --system, --messages, --text or --tokens FILE"
        ) from exc


def _stored_job(options: _PinOptions, status: PromptStatus, ttl_s: int) -> PinJob:
    """Return the job that renders a known prompt again; options that are not given keep their stored values."""
    recipe = Recipe.from_json(status.recipe_json)
    if recipe.kind is SourceKind.TOKENS:
        raise InvalidArgumentError("NAME", status.name, "was pinned by token ids; give them again with --tokens FILE")
    keep_ttl = options.ttl is None and status.expires_unix_s and math.isfinite(status.expires_unix_s)
    return PinJob(
        name=status.name,
        recipe=recipe,
        model=options.model or status.lora_name or status.model,
        cache_salt=options.cache_salt or status.cache_salt,
        ttl_s=max(1, round(status.expires_unix_s - time.time())) if keep_ttl else ttl_s,
        priority=status.priority if options.priority is None else options.priority,
        # The template may have changed since then, and the new rendering follows it.
        replace=True,
        warm=options.warm,
        timeout_s=options.timeout_s,
        url=options.url,
    )
