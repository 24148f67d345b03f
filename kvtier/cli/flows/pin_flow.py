"""`kvtier pin`, step by step: render, register, confirm, warm, report. `commands.pin` reads the command line."""

import time
from dataclasses import dataclass, replace

from kvtier._pb.cache_pb2 import PinRequest, PromptStatus
from kvtier.cli.flows.capture import IDLE_S, Capture, CaptureOutcome, CapturePolicy
from kvtier.cli.flows.status_feed import StatusFeed
from kvtier.cli.output.progress import CaptureProgress
from kvtier.cli.output.prompt_summary import state_meaning, summarize
from kvtier.cli.output.streams import Output, to_jsonable
from kvtier.cli.output.tables import HOW_TO_ATTACH, pin_result
from kvtier.cli.prompt_text.render import render
from kvtier.cli.prompt_text.sources import Recipe, SourceKind
from kvtier.cli.vllm_api.http_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier.client.admin import AdminClient, RemoteError
from kvtier.errors import InvalidArgumentError, KvtierError

CONFIRM_TIMEOUT_S = 10.0
NO_ENGINE_TIMEOUT_S = 3.0
_TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class PinJob:
    """What to pin, and how.

    Attributes:
        name: The prompt's name.
        recipe: Its source.
        tokens: Token ids, for a source of that kind.
        model: Its name; empty: the first that vLLM serves.
        cache_salt: As requests send it.
        ttl_s: Until the pin ends; 0: never.
        priority: The higher, the more important.
        replace: Replace a prompt of that name.
        warm: Let vLLM compute it now.
        timeout_s: For the capture.
        url: Base URL of vLLM without secrets, see `shown_url`.
    """

    name: str
    recipe: Recipe
    tokens: tuple[int, ...] = ()
    model: str = ""
    cache_salt: str = ""
    ttl_s: int = 0
    priority: int = 0
    replace: bool = False
    warm: bool = True
    timeout_s: float = 600.0
    url: str = ""


class PinFlow:
    """Runs one job with one daemon and one vLLM."""

    def __init__(self, client: AdminClient, vllm: VllmClient, output: Output, *, idle_s: float = IDLE_S) -> None:
        """Prepare; the caller owns and closes all three."""
        self._client, self._vllm, self._output, self._idle_s = client, vllm, output, idle_s

    def run(self, job: PinJob) -> bool:
        """Pin; return whether every requested step succeeded.

        Raises:
            KvtierError: The daemon or vLLM refused, or the daemon is unreachable.
        """
        try:
            served = self._served_model(job.model)
            if job.recipe.kind is not SourceKind.TOKENS:
                job = self._rendered(job, served)
        except VllmUnreachableError as exc:
            return self._pin_without_vllm(job, exc)
        status = self._register(job, served)
        # From here on the pin stays, also if a later step fails.
        return self._finish(job, self._confirm_and_capture(job, status, served))

    def _served_model(self, wanted: str) -> ServedModel:
        models = self._vllm.models()
        if not models:
            raise InvalidArgumentError("--url", self._vllm.url, "serves no model; is it the right vLLM?")
        if not wanted:
            return models[0]
        for model in models:
            if model.name == wanted:
                return model
        names = ", ".join(model.name for model in models)
        raise InvalidArgumentError("--model", wanted, f"is not served at {self._vllm.url}; vLLM serves {names}")

    def _rendered(self, job: PinJob, served: ServedModel) -> PinJob:
        rendering = render(job.recipe, self._vllm, served.name)
        self._output.say(f"rendered: {len(rendering.tokens)} tokens, by {served.name} at {self._vllm.url}")
        for warning in rendering.warnings:
            self._output.warn(warning)
        return replace(job, tokens=rendering.tokens, model=served.name)

    def _register(self, job: PinJob, served: ServedModel | None) -> PromptStatus:
        request = PinRequest(
            name=job.name,
            tokens=job.tokens,
            model=served.base if served and job.model else job.model,
            lora_name=served.lora_name if served and job.model else "",
            lora_path=served.lora_path if served and job.model else "",
            cache_salt=job.cache_salt,
            recipe_json=job.recipe.to_json(),
            ttl_s=job.ttl_s,
            priority=job.priority,
            replace=job.replace,
        )
        status = self._client.pin(request)
        self._output.say(f"registered: {job.name} (the pin is saved)")
        return status

    def _pin_without_vllm(self, job: PinJob, problem: VllmUnreachableError) -> bool:
        """Register without vLLM: token ids need none, and a recipe is stored until there is one.

        A rendered prompt is never replaced by one that is not rendered.

        Raises:
            VllmUnreachableError: Nothing can be registered without vLLM.
        """
        if job.replace and not job.tokens:
            raise problem
        try:
            status = self._register(job, None)
        except RemoteError as exc:
            if exc.code == "ALREADY_EXISTS" and not job.tokens:
                raise problem from exc
            raise
        self._answer(status)
        if job.recipe.kind is SourceKind.TOKENS:
            self._output.say(f"not warmed: {problem}")
            self._output.say("its chunks are captured when a vLLM with the kvtier connector first computes them")
            return True
        self._output.fail(str(problem))
        self._output.say("The source is stored, but not yet turned into tokens. When vLLM runs:")
        self._output.say(f"  {_again(job)}")
        return False

    def _confirm_and_capture(self, job: PinJob, status: PromptStatus, served: ServedModel) -> PromptStatus:
        if status.state != PromptStatus.DURABLE:
            status = self._confirm(job, status)
        if status.error:
            raise _NotBoundError(job.name, status.error)
        if job.warm and status.num_confirmed:
            return self._capture(job, status, served)
        return status

    def _confirm(self, job: PinJob, status: PromptStatus) -> PromptStatus:
        """Wait until every engine that serves its model has recognized the prompt."""
        started_s = time.monotonic()
        with StatusFeed(self._client, job.name, CONFIRM_TIMEOUT_S) as feed:
            while not (status.error or 0 < status.num_engines == status.num_confirmed):
                waited_s = time.monotonic() - started_s
                if waited_s > (CONFIRM_TIMEOUT_S if status.num_engines else self._no_engine_timeout_s(job)):
                    return status
                status = feed.next(_TICK_S) or status
        if not status.error:
            self._output.say(f"confirmed by {status.num_confirmed} of {status.num_engines} attached engines")
        return status

    def _no_engine_timeout_s(self, job: PinJob) -> float:
        # A connector attaches within 2 s after its daemon has started.
        return NO_ENGINE_TIMEOUT_S if job.warm else 0.0

    def _capture(self, job: PinJob, status: PromptStatus, served: ServedModel) -> PromptStatus:
        def send() -> None:
            self._vllm.warm(served.name, job.tokens, job.cache_salt, job.timeout_s)

        policy = CapturePolicy(timeout_s=job.timeout_s, idle_s=self._idle_s)
        with StatusFeed(self._client, job.name, job.timeout_s + 1) as feed, CaptureProgress(self._output) as progress:
            progress.update(summarize(status))
            status, outcome = Capture(policy, send).run(status, feed, lambda s: progress.update(summarize(s)))
        if outcome is not CaptureOutcome.DURABLE:
            self._output.warn(_explain(outcome, job, status))
        return status

    def _finish(self, job: PinJob, status: PromptStatus) -> bool:
        self._answer(status)
        if not self._output.json and summarize(status).num_chunks:
            self._output.show(pin_result(status))
        if not status.num_engines and status.state != PromptStatus.DURABLE:
            self._output.warn("no vLLM with the kvtier connector is attached to this daemon for this model")
            self._output.say(*HOW_TO_ATTACH)
            self._output.say(f"then capture it now:  {_again(job)}")
            return not job.warm or job.recipe.kind is SourceKind.TOKENS
        if status.num_confirmed < status.num_engines:
            self._output.warn(
                f"{status.num_confirmed} of {status.num_engines} engines have confirmed the pin within "
                f"{CONFIRM_TIMEOUT_S:g} s; read vLLM's log, then run: {_again(job)}"
            )
            return False
        return self._judge(job, status)

    def _judge(self, job: PinJob, status: PromptStatus) -> bool:
        if status.num_confirmed and not summarize(status).num_chunks:
            self._output.warn(f"{status.num_tokens} tokens are less than one chunk; pin a longer prompt")
            return False
        return status.state == PromptStatus.DURABLE or not job.warm

    def _answer(self, status: PromptStatus) -> None:
        if self._output.json:
            self._output.answer(to_jsonable(status))


class _NotBoundError(KvtierError):
    """An engine cannot use the prompt."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"prompt {name!r} is registered, but vLLM cannot use it: {problem}. To remove it: kvtier unpin {name}, "
            f"then kvtier evict {name}"
        )


def _again(job: PinJob) -> str:
    # The recipe holds no token ids, so the stored source cannot give them again.
    source = " --tokens FILE" if job.recipe.kind is SourceKind.TOKENS else ""
    return f"kvtier pin {job.name}{source} --url {job.url}"


def _explain(outcome: CaptureOutcome, job: PinJob, status: PromptStatus) -> str:
    numbers = summarize(status)
    progress = f"{numbers.num_durable_chunks} of {numbers.num_chunks} chunks are on disk"
    if outcome is CaptureOutcome.OVER_QUOTA:
        return f"{progress}: {state_meaning(status)}"
    if outcome is CaptureOutcome.TIMED_OUT:
        return (
            f"{progress} after {job.timeout_s:g} s; the rest continues by itself; watch it with: kvtier show {job.name}"
        )
    return (
        f"{progress}, and vLLM has not offered the rest; they are captured when vLLM next computes them. If vLLM "
        f"is busy, run again later: {_again(job)}"
    )
