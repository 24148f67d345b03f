"""`kvtier pin`: its command line. `pin_messages` shows what happens."""

from functools import partial
from typing import Annotated, Any

import typer

from kvtier.cli import source_files as sources
from kvtier.cli.context import connect, interruptible
from kvtier.cli.options import (
    DEFAULT_URL,
    OWNER_HELP,
    PRIORITY_HELP,
    PUBLIC_HELP,
    SLIDING_HELP,
    PromptName,
    api_key_option,
    checked_given,
    checked_text,
    parse_labels,
    seconds,
    url_option,
)
from kvtier.cli.output.pin_messages import PinMessages, PinOptions
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.core.ttl import parse_duration
from kvtier.errors import InvalidArgumentError
from kvtier.library.rendering.recipe import Recipe, SourceKind
from kvtier.printable import shown_url
from kvtier.process import ExitCode

_VLLM, _PIN = "vLLM", "How"
_source = partial(typer.Option, metavar="FILE", rich_help_panel="What to pin (one of)")
_request = partial(typer.Option, rich_help_panel=_VLLM, callback=checked_given)
_how = partial(typer.Option, rich_help_panel=_PIN)
_WITH_ADOPT = {"name", "adopt", "ttl", "priority", "public", "replace", "as_json"}


def pin(
    context: typer.Context,
    name: PromptName,
    system: Annotated[str | None, _source(help="System prompt, exactly as requests send it")] = None,
    messages: Annotated[str | None, _source(help="Chat messages, JSON as in the OpenAI API")] = None,
    text: Annotated[str | None, _source(help="Text for the completions API")] = None,
    tokens: Annotated[str | None, _source(help="Token ids, a JSON list; works before vLLM runs")] = None,
    adopt: Annotated[
        str | None,
        _source(
            metavar="AUTO", help="An automatic pin, by its name: it gets this name and stays", callback=checked_text
        ),
    ] = None,
    tools: Annotated[str | None, _source(help="OpenAI tools, JSON; with --system or --messages")] = None,
    chat_template_kwargs: Annotated[
        str | None,
        _source(metavar="JSON", help="chat_template_kwargs as requests send them; with --system or --messages"),
    ] = None,
    url: Annotated[str, url_option(_VLLM)] = DEFAULT_URL,
    model: Annotated[str, _request(metavar="NAME", help="Served model or LoRA (default: the first one)")] = "",
    api_key: Annotated[str | None, api_key_option(_VLLM)] = None,
    cache_salt: Annotated[str, _request(metavar="SALT", help="cache_salt as requests send it")] = "",
    ttl: Annotated[
        str | None, _how(metavar="TIME", help="End the pin after this time: 12h, 7d, never (a new pin: never)")
    ] = None,
    priority: Annotated[
        int | None,
        _how(
            metavar="N",
            min=-100,
            max=100,
            help=PRIORITY_HELP,
            show_default=False,
        ),
    ] = None,
    public: Annotated[bool | None, _how("--public/--no-public", help=PUBLIC_HELP, show_default=False)] = None,
    sliding: Annotated[bool | None, _how("--sliding/--no-sliding", help=SLIDING_HELP, show_default=False)] = None,
    owner: Annotated[str | None, _how(metavar="NAME", help=OWNER_HELP, callback=checked_text)] = None,
    label: Annotated[
        list[str] | None,
        _how("--label", metavar="KEY=VALUE", help="Label to select it by; repeatable", callback=checked_text),
    ] = None,
    replace: Annotated[bool, _how("--replace", help="Replace another prompt of that name")] = False,
    no_warm: Annotated[
        bool, _how("--no-warm", help="Register only; chunks are captured when vLLM next computes them")
    ] = False,
    timeout: Annotated[float, seconds("Time for warming", 1, _PIN)] = 600.0,
    as_json: Annotated[bool, _how("--json", help="Print the result as JSON; progress goes to stderr")] = False,
) -> None:
    """Pin a prompt: keep its KV cache in host memory and on disk until unpinned.

    vLLM turns the source into tokens and computes them once; the daemon keeps the result. FILE may be - for stdin.
    Without a source, a known prompt is rendered and warmed again from its stored source. Of TTL, priority, owner and so
    on, what is not given stays as it is.
    """
    if adopt is not None:
        _adopt(context, name, adopt, ttl, priority, public=public, replace=replace, as_json=as_json)
        return
    source = _read_source(
        {
            SourceKind.SYSTEM: system,
            SourceKind.MESSAGES: messages,
            SourceKind.TEXT: text,
            SourceKind.TOKENS: tokens,
        },
        tools,
        chat_template_kwargs,
    )
    ttl_s = None if ttl is None else parse_duration("--ttl", ttl)
    if public and cache_salt:
        raise InvalidArgumentError("--public", True, "a public prompt has no salt; leave out --cache-salt")
    output = Output(json=as_json)
    recipe, token_ids = source or (None, ())
    is_tokens = recipe is not None and recipe.kind is SourceKind.TOKENS
    options = PinOptions(name=name, is_tokens=is_tokens, url=shown_url(url), warm=not no_warm, timeout_s=timeout)
    with (
        connect(context, url, api_key) as client,
        interruptible(output, f"what was registered stays: kvtier show {name}"),
        PinMessages(options, output) as messages_shown,
    ):
        prompt = client.pin(
            name,
            **_source_of(recipe, token_ids),
            model=model,
            cache_salt=cache_salt,
            ttl_s=ttl_s,
            priority=priority,
            public=public,
            sliding=sliding,
            owner=owner,
            labels=_given_labels(label),
            replace=replace,
            warm=not no_warm,
            timeout_s=timeout,
            on_progress=messages_shown,
        )
        done = messages_shown.conclude(prompt)
    if not done:
        raise typer.Exit(ExitCode.FAILED)


def _given_labels(texts: list[str] | None) -> dict[str, str] | None:
    """Return all labels that the pin shall have; None: those that it has."""
    return {key: value or "" for key, value in parse_labels(texts).items()} if texts else None


def _source_of(recipe: Recipe | None, token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Return a recipe as arguments of the library."""
    if recipe is None:
        return {}
    if recipe.kind is SourceKind.TOKENS:
        return {"tokens": token_ids}
    extras = {"tools": recipe.tools, "chat_template_kwargs": recipe.chat_template_kwargs}
    return {recipe.kind.value: recipe.content, **extras}


def _adopt(
    context: typer.Context,
    name: str,
    adopted: str,
    ttl: str | None,
    priority: int | None,
    *,
    public: bool | None,
    replace: bool,
    as_json: bool,
) -> None:
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        # By its name: some versions of Typer have a copy of Click, with an enum of its own.
        if source is not None and source.name == "COMMANDLINE" and option.name not in _WITH_ADOPT:
            remedy = "does not go with --adopt: its content is that of the automatic pin; leave it out"
            raise InvalidArgumentError(option.opts[0], context.params[option.name or ""], remedy)
    ttl_s = None if ttl is None else parse_duration("--ttl", ttl)
    with connect(context) as client:
        status = client.adopt(name, adopted, ttl_s=ttl_s, priority=priority, public=public, replace=replace)
    Output(json=as_json).answer(to_jsonable(status), f"pinned: {name}, which was {adopted}")


def _read_source(
    paths: dict[SourceKind, str | None], tools_path: str | None, kwargs_text: str | None
) -> tuple[Recipe, tuple[int, ...]] | None:
    """Return the recipe and, for token ids, the tokens; None when no source was given. `-` is stdin."""
    given = {kind: path for kind, path in paths.items() if path is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidArgumentError(f"--{second}", given[second], f"cannot go with --{first}; give one source")
    kind, path = next(iter(given.items()), (None, ""))
    for option, value in {"--tools": tools_path, "--chat-template-kwargs": kwargs_text}.items():
        if value is not None and kind not in (SourceKind.SYSTEM, SourceKind.MESSAGES):
            raise InvalidArgumentError(option, value, "goes with --system or --messages only")
    if path == tools_path == "-":
        raise InvalidArgumentError("--tools", "-", "stdin can be read once only; name a file")
    tools = None if tools_path is None else sources.read_tools(tools_path)
    kwargs = None if kwargs_text is None else sources.parse_template_kwargs(kwargs_text)
    match kind:
        case SourceKind.SYSTEM:
            return sources.read_system(path, tools, kwargs), ()
        case SourceKind.MESSAGES:
            return sources.read_messages(path, tools, kwargs), ()
        case SourceKind.TEXT:
            return sources.read_plain_text(path), ()
        case SourceKind.TOKENS:
            return Recipe(kind=kind), tuple(sources.read_tokens(path))
    return None
