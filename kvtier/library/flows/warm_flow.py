"""Sends the tokens of prompts as completions of one token.

vLLM loads the chunks that kvtier holds into its own blocks, and the next request finds them in the prefix cache.
Requests of users go first: none is sent while requests wait in vLLM.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtier.client.admin import AdminClient
from kvtier.client.remote_errors import RemoteError
from kvtier.client.warm_requests import cache_tokens_taken, new_request_id, same_request, warm_tokens
from kvtier.concurrency.pauses import POLL_S
from kvtier.errors import PromptUnrenderedError, RenderError
from kvtier.library.progress_events import Warmed, WarmResult
from kvtier.library.rendering.vllm_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier.library.values.public_values import Prompt, PromptState


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

    def run(self, prompts: Sequence[Prompt]) -> Iterator[Warmed]:
        """Yield the result of each prompt, in the order given; call `prepare` first."""
        left, is_busy = self.limit_tokens, False
        warmed_as: dict[object, str] = {}
        for prompt in prompts:
            needed = cache_tokens_taken(prompt.num_tokens, self._block_tokens)
            if prompt.state is PromptState.REFUSED:
                yield _not_warmed(prompt, WarmResult.REFUSED, f"vLLM cannot use it: {prompt.error}")
            elif refusal := self._refusal(prompt):
                yield _not_warmed(prompt, WarmResult.FAILED, refusal)
            elif first_name := warmed_as.get(same_request(prompt)):
                yield _not_warmed(prompt, WarmResult.DUPLICATE, f"the same prompt as {first_name}, which was warmed")
            elif left is not None and needed > left:
                why = f"needs {needed} tokens of vLLM's cache, {left} are left for it"
                yield _not_warmed(prompt, WarmResult.OVER_LIMIT, why)
            elif is_busy := is_busy or not self._wait_until_idle():
                yield _not_warmed(prompt, WarmResult.BUSY, f"requests waited in vLLM for {self.wait_s:g} s")
            else:
                done = self._warm(prompt)
                if done.result is WarmResult.WARMED:
                    warmed_as[same_request(prompt)] = prompt.name
                    left = left if left is None else left - needed
                yield done

    def _refusal(self, prompt: Prompt) -> str:
        """Return why the prompt cannot be sent as a request; empty when it can."""
        if prompt.state is PromptState.UNRENDERED:
            return str(PromptUnrenderedError(prompt.name))
        if model_of(prompt, self._models) is None:
            wanted, names = prompt.lora_name or prompt.model, ", ".join(model.name for model in self._models)
            return f"{self.vllm.url} serves {names or 'nothing'}, not {wanted or 'any model'}"
        return ""

    def _warm(self, prompt: Prompt) -> Warmed:
        model = model_of(prompt, self._models)
        assert model is not None, "see _refusal"
        began_s = self.clock()
        try:
            # It may have another name than a moment ago: a replacement took the name of its pin.
            tokens = self.client.tokens(self.client.get(pin_id=prompt.pin_id).name)
        except RemoteError as exc:
            return _not_warmed(prompt, WarmResult.FAILED, str(exc))
        try:
            cached_tokens = self.vllm.warm(
                model.name,
                warm_tokens(prompt, tokens),
                prompt.cache_salt,
                self.timeout_s,
                request_id=new_request_id(),
            )
        except VllmUnreachableError:
            raise
        except RenderError as exc:
            return _not_warmed(prompt, WarmResult.FAILED, str(exc))
        return Warmed(
            name=prompt.name,
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


def model_of(prompt: Prompt, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the served model that requests for the prompt name; None when vLLM does not serve it."""
    if prompt.lora_name:
        return next((model for model in models if model.lora_name == prompt.lora_name), None)
    base_models = [model for model in models if not model.lora_path]
    if not prompt.model:
        return next(iter(base_models), None)
    return next((model for model in base_models if prompt.model in (model.name, model.base)), None)


def _not_warmed(prompt: Prompt, result: WarmResult, why: str) -> Warmed:
    return Warmed(name=prompt.name, num_tokens=prompt.num_tokens, result=result, why=why)
