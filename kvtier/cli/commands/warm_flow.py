"""`kvtier warm`, step by step: which prompts, in which order, how many of them, and when.

To warm a prompt, send a completion of one token with the pinned tokens as prompt. vLLM loads the chunks that kvtier
holds into its own blocks, and the next request finds them in the prefix cache. Requests of users go first: none is sent
while requests wait in vLLM.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.cli.output.prompt_summary import is_refused
from kvtier.cli.vllm_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier.client.admin import AdminClient
from kvtier.client.warm_requests import cache_tokens_taken, new_request_id, same_request, warm_tokens
from kvtier.errors import PromptUnrenderedError, RenderError

_TICK_S = 0.2


class WarmResult(StrEnum):
    """Result for one prompt."""

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
        name: Of the prompt.
        num_tokens: Of the prompt.
        result: Whether it was warmed, or why not.
        why: The reason as text, unless it was warmed.
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
        clock: Monotonic seconds.
        sleep: Sleeps for this many seconds.
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
        """Ask vLLM for its models and the size of its cache.

        Raises:
            RenderError: vLLM does not answer, or refused.
        """
        self._models = self.vllm.models()
        if capacity := self.vllm.cache_capacity():
            self._block_tokens = capacity.block_tokens
            if self.max_ratio:
                self.limit_tokens = int(capacity.num_tokens * self.max_ratio)

    def run(self, prompts: Sequence[PromptStatus]) -> Iterator[Warmed]:
        """Yield the result of each prompt, in the order given; call `prepare` first.

        Raises:
            KvtierError: The daemon or vLLM no longer answers.
        """
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
        tokens = self.client.tokens(status.name)
        began_s = self.clock()
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
            self.sleep(_TICK_S)
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
