"""`kvtier warm`, step by step: which prompts, in which order, how many of them, and when.

A prompt comes back by the road of every request: a completion of one token, whose prompt is the pinned tokens. vLLM
takes what kvtier holds of it into its own blocks, and the next request finds it there. Requests of users go first: none
is sent while vLLM has some waiting.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier._pb.cache_pb2 import PromptStatus
from kvtier.cli.output.prompt_summary import is_refused
from kvtier.cli.vllm_api.http_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier.client.admin import AdminClient
from kvtier.client.warm_requests import cache_tokens_taken, new_request_id, same_request, warm_tokens
from kvtier.errors import PromptUnrenderedError, RenderError

_TICK_S = 0.2


class Fate(StrEnum):
    """What became of one prompt."""

    WARMED = "warmed"
    DUPLICATE = "same prompt"
    REFUSED = "refused"
    NO_ROOM = "no room"
    BUSY = "vLLM busy"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Warmed:
    """One prompt's outcome.

    Attributes:
        name: Of the prompt.
        num_tokens: Of the prompt.
        fate: What became of it.
        why: In words, unless it was warmed.
        cached_tokens: Tokens that vLLM did not compute; None when it does not say.
        seconds: That the request took.
    """

    name: str
    num_tokens: int
    fate: Fate
    why: str = ""
    cached_tokens: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WarmPolicy:
    """How much, and how patiently.

    Attributes:
        max_ratio: Of vLLM's cache that warm prompts may take; 0: no limit.
        wait_s: In all, for requests that wait in vLLM.
        timeout_s: For one prompt.
    """

    max_ratio: float = 0.5
    wait_s: float = 60.0
    timeout_s: float = 600.0


class WarmFlow:
    """Warms prompts, one after the other, from one daemon in one vLLM.

    Args:
        clock: Monotonic seconds.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        client: AdminClient,
        vllm: VllmClient,
        policy: WarmPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._vllm, self._policy = client, vllm, policy
        self._clock, self._sleep = clock, sleep
        self._patience_s = policy.wait_s
        self._models: Sequence[ServedModel] = ()
        self._block_tokens = 1
        self.limit_tokens: int | None = None

    def prepare(self) -> None:
        """Ask vLLM what it serves and how large its cache is; `limit_tokens` is None when there is no limit.

        Raises:
            RenderError: vLLM is not there, or refused.
        """
        self._models = self._vllm.models()
        room = self._vllm.cache_room()
        if room is not None:
            self._block_tokens = room.block_tokens
            if self._policy.max_ratio:
                self.limit_tokens = int(room.num_tokens * self._policy.max_ratio)

    def run(self, prompts: Sequence[PromptStatus]) -> Iterator[Warmed]:
        """Yield what becomes of each prompt, in the order given; `prepare` comes first.

        Raises:
            KvtierError: Daemon or vLLM went away.
        """
        left, gave_up = self.limit_tokens, False
        warmed_as: dict[object, str] = {}
        for status in prompts:
            if is_refused(status):
                yield _not_warmed(status, Fate.REFUSED, f"vLLM cannot use it: {status.error}")
                continue
            if refusal := self._refusal(status):
                yield _not_warmed(status, Fate.FAILED, refusal)
                continue
            if twin := warmed_as.get(same_request(status)):
                yield _not_warmed(status, Fate.DUPLICATE, f"the same prompt as {twin}, which was warmed")
                continue
            needed = cache_tokens_taken(status.num_tokens, self._block_tokens)
            if left is not None and needed > left:
                yield _not_warmed(
                    status, Fate.NO_ROOM, f"needs {needed} tokens of vLLM's cache, {left} are left for it"
                )
                continue
            gave_up = gave_up or not self._is_quiet()
            if gave_up:
                yield _not_warmed(status, Fate.BUSY, f"requests waited in vLLM for {self._policy.wait_s:g} s")
                continue
            done = self._warm(status)
            if done.fate is Fate.WARMED:
                warmed_as[same_request(status)] = status.name
                left = left if left is None else left - needed
            yield done

    def _refusal(self, status: PromptStatus) -> str:
        """Return why no request can be made of the prompt, empty when it can."""
        if status.state == PromptStatus.UNRENDERED:
            return str(PromptUnrenderedError(status.name))
        if model_of(status, self._models) is None:
            wanted, names = status.lora_name or status.model, ", ".join(model.name for model in self._models)
            return f"{self._vllm.url} serves {names or 'nothing'}, not {wanted or 'any model'}"
        return ""

    def _warm(self, status: PromptStatus) -> Warmed:
        model = model_of(status, self._models)
        assert model is not None, "see _refusal"
        tokens = self._client.tokens(status.name)
        began_s = self._clock()
        try:
            cached_tokens = self._vllm.warm(
                model.name,
                warm_tokens(status, tokens),
                status.cache_salt,
                self._policy.timeout_s,
                request_id=new_request_id(),
            )
        except VllmUnreachableError:
            raise
        except RenderError as exc:
            return _not_warmed(status, Fate.FAILED, str(exc))
        return Warmed(
            name=status.name,
            num_tokens=len(tokens),
            fate=Fate.WARMED,
            cached_tokens=cached_tokens,
            seconds=self._clock() - began_s,
        )

    def _is_quiet(self) -> bool:
        """Wait while vLLM has requests waiting, as long as the patience lasts; say whether it has none."""
        while self._vllm.num_waiting():
            if self._patience_s <= 0:
                return False
            began_s = self._clock()
            self._sleep(_TICK_S)
            self._patience_s -= self._clock() - began_s
        return True


def model_of(status: PromptStatus, models: Sequence[ServedModel]) -> ServedModel | None:
    """Return what requests for the prompt name, None when it is not served."""
    if status.lora_name:
        return next((model for model in models if model.lora_name == status.lora_name), None)
    base_models = [model for model in models if not model.lora_path]
    if not status.model:
        return next(iter(base_models), None)
    return next((model for model in base_models if status.model in (model.name, model.base)), None)


def _not_warmed(status: PromptStatus, fate: Fate, why: str) -> Warmed:
    return Warmed(name=status.name, num_tokens=status.num_tokens, fate=fate, why=why)
