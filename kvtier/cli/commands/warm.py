"""`kvtier warm`: sends the tokens of prompts as completions of one token.

vLLM loads the chunks that kvtier holds into its own blocks, and the next request finds them in the prefix cache.
Requests of users go first: none is sent while requests wait in vLLM.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated

import typer

from kvtier._pb.cache_pb2 import PromptStatus
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
from kvtier.cli.output.prompt_summary import is_refused
from kvtier.cli.output.streams import Output
from kvtier.cli.vllm_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier.client.admin import AdminClient, RemoteError
from kvtier.client.warm_requests import by_importance, cache_tokens_taken, new_request_id, same_request, warm_tokens
from kvtier.concurrency.pauses import POLL_S
from kvtier.errors import InvalidArgumentError, PromptUnrenderedError, RenderError
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
    with connect(context) as client, VllmClient(url, api_key) as vllm:
        prompts = _chosen(client, names or [], every=every)
        flow = WarmFlow(client=client, vllm=vllm, max_ratio=max_ratio, wait_s=wait, timeout_s=timeout)
        with interruptible(output, "what was warmed stays in vLLM's cache"):
            flow.prepare()
            _mention(flow, prompts, output)
            done = _run(flow, prompts, output)
    answer = {"limit_tokens": flow.limit_tokens, "prompts": [asdict(each) for each in done]}
    output.answer(answer, *(_summary(done) if done else []))
    # Without names, a prompt over the limit or refused before is no failure.
    good = {WarmResult.WARMED, WarmResult.DUPLICATE}
    good |= set() if names else {WarmResult.OVER_LIMIT, WarmResult.REFUSED}
    if any(each.result not in good for each in done):
        raise typer.Exit(ExitCode.FAILED)


def _chosen(client: AdminClient, names: list[str], *, every: bool) -> list[PromptStatus]:
    if names:
        return by_importance(client.get(name) for name in dict.fromkeys(names))
    return by_importance(status for status in client.list() if status.pinned or every)


def _mention(flow: "WarmFlow", prompts: list[PromptStatus], output: Output) -> None:
    if not prompts:
        output.say("no prompts to warm; pin one with: kvtier pin NAME --system FILE")
    if flow.max_ratio and flow.limit_tokens is None:
        output.warn("vLLM does not report the size of its cache, so --max-ratio has no effect")
    if unattached := [status.name for status in prompts if status.num_tokens and not status.num_engines]:
        output.warn(f"no vLLM with the kvtier connector is attached for {', '.join(unattached)}: vLLM computes them")


def _run(flow: "WarmFlow", prompts: list[PromptStatus], output: Output) -> list["Warmed"]:
    done = []
    for each in flow.run(prompts):
        done.append(each)
        if each.result is WarmResult.WARMED:
            cached = "" if each.cached_tokens is None else f", {each.cached_tokens} from a cache"
            output.say(f"{each.name}: {each.num_tokens} tokens{cached}, {each.seconds:.2f} s")
        elif each.result is WarmResult.DUPLICATE:
            output.say(f"{each.name}: {each.why}")
        else:
            output.warn(f"{each.name}: not warmed: {each.why}")
    return done


def _summary(done: list["Warmed"]) -> list[str]:
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


class WarmResult(StrEnum):
    WARMED = "warmed"
    DUPLICATE = "same prompt"
    REFUSED = "refused"
    OVER_LIMIT = "over limit"
    BUSY = "vLLM busy"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """What happened to one prompt.

    Attributes:
        why: Why it was not warmed.
        cached_tokens: Tokens that vLLM did not compute; None when vLLM does not report them.
        seconds: Duration of the request.
    """

    name: str
    num_tokens: int
    result: WarmResult
    why: str = ""
    cached_tokens: int | None = None
    seconds: float = 0.0


@dataclass(kw_only=True)
class WarmFlow:
    """Warms prompts of one daemon in one vLLM, one after the other.

    Attributes:
        max_ratio: Share of the prefix cache that warm prompts may take; 0: no limit.
        wait_s: Total time to wait while requests wait in vLLM.
        timeout_s: For one prompt.
        limit_tokens: Of the prefix cache; None before `prepare`, and when there is no limit.
    """

    client: AdminClient
    vllm: VllmClient
    max_ratio: float = 0.5
    wait_s: float = 60.0
    timeout_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    limit_tokens: int | None = None
    _models: Sequence[ServedModel] = ()
    _block_tokens: int = 1
    _waited_s: float = 0.0

    def prepare(self) -> None:
        """Ask vLLM for its models and the size of its cache."""
        self._models = self.vllm.models()
        if capacity := self.vllm.cache_capacity():
            self._block_tokens = capacity.block_tokens
            if self.max_ratio:
                self.limit_tokens = int(capacity.num_tokens * self.max_ratio)

    def run(self, prompts: Sequence[PromptStatus]) -> Iterator[Warmed]:
        """Yield the result of each prompt, in the order given; call `prepare` first."""
        left, is_busy = self.limit_tokens, False
        warmed_as: dict[object, str] = {}
        for status in prompts:
            needed = cache_tokens_taken(status.num_tokens, self._block_tokens)
            if is_refused(status):
                yield _not_warmed(status, WarmResult.REFUSED, f"vLLM cannot use it: {status.error}")
            elif refusal := self._refusal(status):
                yield _not_warmed(status, WarmResult.FAILED, refusal)
            elif first_name := warmed_as.get(same_request(status)):
                yield _not_warmed(status, WarmResult.DUPLICATE, f"the same prompt as {first_name}, which was warmed")
            elif left is not None and needed > left:
                why = f"needs {needed} tokens of vLLM's cache, {left} are left for it"
                yield _not_warmed(status, WarmResult.OVER_LIMIT, why)
            elif is_busy := is_busy or not self._wait_until_idle():
                yield _not_warmed(status, WarmResult.BUSY, f"requests waited in vLLM for {self.wait_s:g} s")
            else:
                done = self._warm(status)
                if done.result is WarmResult.WARMED:
                    warmed_as[same_request(status)] = status.name
                    left = left if left is None else left - needed
                yield done

    def _refusal(self, status: PromptStatus) -> str:
        """Return why the prompt cannot be sent as a request; empty when it can."""
        if status.state == PromptStatus.UNRENDERED:
            return str(PromptUnrenderedError(status.name))
        if model_of(status, self._models) is None:
            wanted, names = status.lora_name or status.model, ", ".join(model.name for model in self._models)
            return f"{self.vllm.url} serves {names or 'nothing'}, not {wanted or 'any model'}"
        return ""

    def _warm(self, status: PromptStatus) -> Warmed:
        model = model_of(status, self._models)
        assert model is not None, "see _refusal"
        began_s = self.clock()
        try:
            # It may have another name than a moment ago: a replacement took the name of its pin.
            tokens = self.client.tokens(self.client.get(pin_id=status.pin_id).name)
        except RemoteError as exc:
            return _not_warmed(status, WarmResult.FAILED, str(exc))
        try:
            cached_tokens = self.vllm.warm(
                model.name,
                warm_tokens(status, tokens),
                status.cache_salt,
                self.timeout_s,
                request_id=new_request_id(),
            )
        except VllmUnreachableError:
            raise
        except RenderError as exc:
            return _not_warmed(status, WarmResult.FAILED, str(exc))
        return Warmed(
            name=status.name,
            num_tokens=len(tokens),
            result=WarmResult.WARMED,
            cached_tokens=cached_tokens,
            seconds=self.clock() - began_s,
        )

    def _wait_until_idle(self) -> bool:
        """Wait while requests wait in vLLM, until the total wait time is used up; return whether none waits."""
        while self.vllm.num_waiting():
            if self._waited_s >= self.wait_s:
                return False
            began_s = self.clock()
            self.sleep(POLL_S)
            self._waited_s += self.clock() - began_s
        return True


def model_of(status: PromptStatus, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the served model that requests for the prompt name; None when vLLM does not serve it."""
    if status.lora_name:
        return next((model for model in models if model.lora_name == status.lora_name), None)
    base_models = [model for model in models if not model.lora_path]
    if not status.model:
        return next(iter(base_models), None)
    return next((model for model in base_models if status.model in (model.name, model.base)), None)


def _not_warmed(status: PromptStatus, result: WarmResult, why: str) -> Warmed:
    return Warmed(name=status.name, num_tokens=status.num_tokens, result=result, why=why)
