"""`kvtier warm`: the command line of it. What happens then is in `flows.warm_flow`."""

from dataclasses import asdict
from typing import Annotated

import typer

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.cli.completion import complete_prompt_name
from kvtier.cli.context import EXIT_FAILED, EXIT_INTERRUPTED, settings_of
from kvtier.cli.flows.warm_flow import Fate, Warmed, WarmFlow, WarmPolicy
from kvtier.cli.options import DEFAULT_URL, MAX_WAIT_S, api_key_option, checked_number, checked_text
from kvtier.cli.output.streams import Output
from kvtier.cli.vllm_api.http_client import VllmClient
from kvtier.client.admin import AdminClient
from kvtier.client.warm_requests import by_importance
from kvtier.errors import InvalidArgumentError


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
    every: Annotated[bool, typer.Option("--all", help="All prompts, those whose pin has ended last")] = False,
    url: Annotated[str, typer.Option(metavar="URL", envvar="KVTIER_VLLM_URL", help="vLLM's API server")] = DEFAULT_URL,
    api_key: Annotated[str | None, api_key_option()] = None,
    max_ratio: Annotated[
        float,
        typer.Option(
            metavar="RATIO",
            min=0,
            max=1,
            help="Of vLLM's cache to fill at most; 0: no limit",
            callback=checked_number,
        ),
    ] = 0.5,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=MAX_WAIT_S,
            help="In all, while requests wait in vLLM; then it gives up",
            callback=checked_number,
        ),
    ] = 60.0,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, max=MAX_WAIT_S, help="Time for one prompt", callback=checked_number),
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Bring prompts into vLLM's own cache before anybody asks: by priority, then the newest first.

    Each is sent as a completion of one token, which takes what kvtier holds of it into vLLM's blocks; what it does not
    hold, vLLM computes. To have vLLM do that by itself after a start, set `warm_url`.
    """
    if every and names:
        raise InvalidArgumentError("NAME", names[0], "cannot go with --all")
    output = Output(json=as_json)
    policy = WarmPolicy(max_ratio=max_ratio, wait_s=wait, timeout_s=timeout)
    with settings_of(context).connect() as client, VllmClient(url, api_key) as vllm:
        prompts = _chosen(client, names or [], every=every)
        flow = WarmFlow(client, vllm, policy)
        try:
            flow.prepare()
            _mention(flow, prompts, policy, output)
            done = _run(flow, prompts, output)
        except KeyboardInterrupt:
            output.say("", "interrupted; what was warmed stays in vLLM's cache")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    _answer(flow, done, output)
    # Without names, it is no failure that a prompt finds no room or was refused before.
    if any(_is_failure(result, named=bool(names)) for result in done):
        raise typer.Exit(EXIT_FAILED)


def _chosen(client: AdminClient, names: list[str], *, every: bool) -> list[PromptStatus]:
    if names:
        return by_importance(client.get(name) for name in dict.fromkeys(names))
    return by_importance(status for status in client.list() if status.pinned or every)


def _mention(flow: WarmFlow, prompts: list[PromptStatus], policy: WarmPolicy, output: Output) -> None:
    if not prompts:
        output.say("no prompts to warm; pin one with: kvtier pin NAME --system FILE")
    if policy.max_ratio and flow.limit_tokens is None:
        output.warn("vLLM does not say how large its cache is, so --max-ratio has no effect")
    if unattached := [status.name for status in prompts if status.num_tokens and not status.num_engines]:
        output.warn(f"no vLLM with the kvtier connector is attached for {', '.join(unattached)}: vLLM computes them")


def _run(flow: WarmFlow, prompts: list[PromptStatus], output: Output) -> list[Warmed]:
    done = []
    for result in flow.run(prompts):
        done.append(result)
        if result.fate is Fate.WARMED:
            output.say(f"{result.name}: {_numbers(result)}")
        elif result.fate is Fate.DUPLICATE:
            output.say(f"{result.name}: {result.why}")
        else:
            output.warn(f"{result.name}: not warmed: {result.why}")
    return done


def _numbers(result: Warmed) -> str:
    cached = "" if result.cached_tokens is None else f", {result.cached_tokens} from a cache"
    return f"{result.num_tokens} tokens{cached}, {result.seconds:.2f} s"


def _answer(flow: WarmFlow, done: list[Warmed], output: Output) -> None:
    warmed = [result for result in done if result.fate is Fate.WARMED]
    num_tokens, seconds = sum(result.num_tokens for result in warmed), sum(result.seconds for result in warmed)
    if output.json:
        output.answer({"limit_tokens": flow.limit_tokens, "prompts": [asdict(result) for result in done]})
    elif done:
        twins = sum(result.fate is Fate.DUPLICATE for result in done)
        names = "name" if twins == 1 else "names"
        others = f" ({twins} other {names} of one of them)" if twins else ""
        output.say(
            f"warmed: {len(warmed)} of {len(done) - twins} prompts{others}, {num_tokens} tokens in {seconds:.2f} s"
        )
        if warmed and all(result.cached_tokens is None for result in warmed):
            output.say("vLLM says how many tokens came from a cache when started with --enable-prompt-tokens-details")


def _is_failure(result: Warmed, *, named: bool) -> bool:
    if result.fate in (Fate.NO_ROOM, Fate.REFUSED):
        return named
    return result.fate not in (Fate.WARMED, Fate.DUPLICATE)
