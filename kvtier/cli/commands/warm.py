"""`kvtier warm`: sends the tokens of prompts as completions of one token, and shows what came of it."""

from dataclasses import asdict
from typing import Annotated

import typer

from kvtier.cli.context import connect, interruptible
from kvtier.cli.options import (
    DEFAULT_URL,
    AsJson,
    api_key_option,
    checked_number,
    checked_text,
    complete_prompt_name,
    seconds,
    url_option,
)
from kvtier.cli.output.streams import Output
from kvtier.errors import InvalidArgumentError
from kvtier.library.progress_events import Progress, Warmed, Warming, WarmResult
from kvtier.process import ExitCode


def warm(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Names of prompts (default: all pinned ones)",
            show_default=False,
            autocompletion=complete_prompt_name,
            callback=checked_text,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All prompts; those whose pin has ended come last")] = False,
    url: Annotated[str, url_option()] = DEFAULT_URL,
    api_key: Annotated[str | None, api_key_option()] = None,
    max_ratio: Annotated[
        float,
        typer.Option(
            metavar="RATIO",
            min=0,
            max=1,
            help="Share of vLLM's cache to fill at most; 0: no limit",
            callback=checked_number,
        ),
    ] = 0.5,
    wait: Annotated[
        float, seconds("Total wait while requests wait in vLLM; after it, no more prompts are warmed", 0)
    ] = 60.0,
    timeout: Annotated[float, seconds("Time for one prompt", 1)] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Load prompts into vLLM's prefix cache before the first request: by priority, then the newest first.

    Each is sent as a completion of one token: vLLM loads the chunks that kvtier holds and computes the others. If vLLM
    is to do that by itself after each start, set `warm_url`.
    """
    if every and names:
        raise InvalidArgumentError("NAME", names[0], "cannot go with --all")
    output = Output(json=as_json)
    limit_tokens: int | None = None

    def show(event: Progress) -> None:
        nonlocal limit_tokens
        if isinstance(event, Warming):
            limit_tokens = event.limit_tokens
            _mention(event, max_ratio, output)
        elif isinstance(event, Warmed):
            _show(event, output)

    with (
        connect(context, url, api_key) as client,
        interruptible(output, "what was warmed stays in vLLM's cache"),
    ):
        done = client.warm(
            *(names or []),
            unpinned=every,
            max_ratio=max_ratio,
            wait_s=wait,
            timeout_s=timeout,
            on_progress=show,
        )
    answer = {"limit_tokens": limit_tokens, "prompts": [asdict(each) for each in done]}
    output.answer(answer, *(_summary(done) if done else []))
    # Without names, a prompt over the limit or refused before is no failure.
    good = {WarmResult.WARMED, WarmResult.DUPLICATE}
    good |= set() if names else {WarmResult.OVER_LIMIT, WarmResult.REFUSED}
    if any(each.result not in good for each in done):
        raise typer.Exit(ExitCode.FAILED)


def _mention(warming: Warming, max_ratio: float, output: Output) -> None:
    if not warming.prompts:
        output.say("no prompts to warm; pin one with: kvtier pin NAME --system FILE")
    if max_ratio and warming.limit_tokens is None:
        output.warn("vLLM does not report the size of its cache, so --max-ratio has no effect")
    if unattached := [prompt.name for prompt in warming.prompts if prompt.num_tokens and not prompt.num_engines]:
        output.warn(f"no vLLM with the kvtier connector is attached for {', '.join(unattached)}: vLLM computes them")


def _show(each: Warmed, output: Output) -> None:
    if each.result is WarmResult.WARMED:
        cached = "" if each.cached_tokens is None else f", {each.cached_tokens} from a cache"
        output.say(f"{each.name}: {each.num_tokens} tokens{cached}, {each.seconds:.2f} s")
    elif each.result is WarmResult.DUPLICATE:
        output.say(f"{each.name}: {each.why}")
    else:
        output.warn(f"{each.name}: not warmed: {each.why}")


def _summary(done: list[Warmed]) -> list[str]:
    warmed = [each for each in done if each.result is WarmResult.WARMED]
    num_tokens, took_s = sum(each.num_tokens for each in warmed), sum(each.seconds for each in warmed)
    num_same = sum(each.result is WarmResult.DUPLICATE for each in done)
    names = "name" if num_same == 1 else "names"
    others = f" ({num_same} other {names} of one of them)" if num_same else ""
    lines = [f"warmed: {len(warmed)} of {len(done) - num_same} prompts{others}, {num_tokens} tokens in {took_s:.2f} s"]
    if warmed and all(each.cached_tokens is None for each in warmed):
        lines.append(
            "vLLM reports how many tokens came from a cache if you start it with --enable-prompt-tokens-details"
        )
    return lines
