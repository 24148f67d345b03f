"""`kvtier pin`, step by step: render, register, confirm, warm, report. `commands.pin` reads the command line."""

import time
from dataclasses import dataclass, replace

from kvtier._pb.cache_pb2 import PinRequest, PromptStatus
from kvtier.cli.commands.capture import CaptureOutcome, capture, watched
from kvtier.cli.output.progress import capture_progress
from kvtier.cli.output.prompt_summary import state_meaning, summarize
from kvtier.cli.output.streams import Output
from kvtier.cli.output.tables import HOW_TO_ATTACH, pin_result
from kvtier.cli.prompt_text.render import render
from kvtier.cli.prompt_text.sources import Recipe, SourceKind
from kvtier.cli.vllm_client import ServedModel, VllmClient, VllmUnreachableError
from kvtier.client.admin import AdminClient, RemoteError
from kvtier.concurrency.pauses import POLL_S
from kvtier.core.limits import parse_version, version_name
from kvtier.errors import InvalidArgumentError, KvtierError

CONFIRM_TIMEOUT_S = 10.0
NO_ENGINE_TIMEOUT_S = 3.0
REPLACE_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class PinJob:
    """What to pin, and how.

    Attributes:
        tokens: Token ids, for a source of that kind.
        model: Empty: the first that vLLM serves.
        ttl_s: Until the pin ends; 0: never. None, as in `priority` and `public`: as it is.
        timeout_s: For the capture.
        url: Base URL of vLLM without secrets, see `shown_url`.
        made: Name of the version that is to replace the pin; empty: it is the pin.
    """

    name: str
    recipe: Recipe
    tokens: tuple[int, ...] = ()
    model: str = ""
    cache_salt: str = ""
    ttl_s: int | None = None
    priority: int | None = None
    public: bool | None = None
    replace: bool = False
    warm: bool = True
    timeout_s: float = 600.0
    url: str = ""
    made: str = ""

    @property
    def again(self) -> str:
        """The command that repeats it. The recipe holds no token ids, so those have to be given again."""
        if self.made:
            return f"kvtier warm {self.made} --url {self.url}"
        source = " --tokens FILE" if self.recipe.kind is SourceKind.TOKENS else ""
        return f"kvtier pin {self.name}{source} --url {self.url}"


class PinFlow:
    """Runs one job with one daemon and one vLLM; the caller owns and closes all three arguments."""

    def __init__(self, client: AdminClient, vllm: VllmClient, output: Output) -> None:
        self._client, self._vllm, self._output = client, vllm, output

    def run(self, job: PinJob) -> bool:
        """Pin; return whether every requested step succeeded. KvtierError: the daemon or vLLM refused."""
        try:
            served = self._served_model(job.model)
            if job.recipe.kind is not SourceKind.TOKENS:
                job = self._rendered(job, served)
        except VllmUnreachableError as exc:
            return self._pin_without_vllm(job, exc)
        status = self._register(job, served)
        if status.name != job.name:
            job = replace(job, made=status.name)
            self._output.say(f"the pin that stands serves until {job.made} is durable")
        # From here on the pin stays, also if a later step fails.
        if status.state != PromptStatus.DURABLE:
            status = self._confirm(job, status)
        if status.error and not job.made:
            raise KvtierError(
                f"prompt {job.name!r} is registered, but vLLM cannot use it: {status.error}. To remove it: "
                f"kvtier unpin {job.name}, then kvtier evict {job.name}"
            )
        if job.warm and status.num_confirmed:
            status = self._capture(job, status, served)
        status = await_replacement(self._client, job.made, status, self._output)
        num_chunks = summarize(status).num_chunks
        self._output.answer(status, *([pin_result(status)] if num_chunks else []))
        return self._succeeded(job, status, num_chunks)

    def _served_model(self, wanted: str) -> ServedModel:
        models = self._vllm.models()
        if not models:
            raise InvalidArgumentError("--url", self._vllm.url, "serves no model; is it the right vLLM?")
        for model in models:
            if wanted in ("", model.name):
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
        named = served if job.model else None
        request = PinRequest(
            name=job.name,
            tokens=job.tokens,
            model=named.base if named else job.model,
            lora_name=named.lora_name if named else "",
            lora_path=named.lora_path if named else "",
            cache_salt=job.cache_salt,
            recipe_json=job.recipe.to_json(),
            ttl_s=job.ttl_s,
            priority=job.priority,
            replace=job.replace,
        )
        if job.public is not None:
            request.public = job.public
        status = self._client.pin(request)
        self._output.say(f"registered: {job.name} (the pin is saved)")
        return status

    def _pin_without_vllm(self, job: PinJob, problem: VllmUnreachableError) -> bool:
        """Register without vLLM: token ids need none, and a recipe is stored until there is one.

        A rendered prompt is never replaced by one that is not rendered: then `problem` is raised.
        """
        if job.replace and not job.tokens:
            raise problem
        try:
            status = self._register(job, None)
        except RemoteError as exc:
            if exc.code == "ALREADY_EXISTS" and not job.tokens:
                raise problem from exc
            raise
        self._output.answer(status)
        if job.recipe.kind is SourceKind.TOKENS:
            self._output.say(f"not warmed: {problem}")
            self._output.say("its chunks are captured when a vLLM with the kvtier connector first computes them")
            return True
        self._output.fail(str(problem))
        self._output.say("The source is stored, but not yet turned into tokens. When vLLM runs:", f"  {job.again}")
        return False

    def _confirm(self, job: PinJob, status: PromptStatus) -> PromptStatus:
        """Wait until every engine that serves its model has recognized the prompt."""
        started_s = time.monotonic()
        # A connector attaches within 2 s after its daemon has started.
        no_engine_timeout_s = NO_ENGINE_TIMEOUT_S if job.warm else 0.0
        with watched(self._client, status.pin_id, CONFIRM_TIMEOUT_S) as next_status:
            while not (status.error or 0 < status.num_engines == status.num_confirmed):
                timeout_s = CONFIRM_TIMEOUT_S if status.num_engines else no_engine_timeout_s
                if time.monotonic() - started_s > timeout_s:
                    return status
                status = next_status() or status
        if not status.error:
            self._output.say(f"confirmed by {status.num_confirmed} of {status.num_engines} attached engines")
        return status

    def _capture(self, job: PinJob, status: PromptStatus, served: ServedModel) -> PromptStatus:
        def send() -> None:
            self._vllm.warm(served.name, job.tokens, job.cache_salt, job.timeout_s)

        timeout_s = job.timeout_s
        with (
            watched(self._client, status.pin_id, timeout_s + 1) as next_status,
            capture_progress(self._output) as show,
        ):
            show(status)
            status, outcome = capture(status, next_status, send, timeout_s=timeout_s, on_status=show)
        if outcome is not CaptureOutcome.DURABLE:
            self._output.warn(_explain(outcome, job, status))
        return status

    def _succeeded(self, job: PinJob, status: PromptStatus, num_chunks: int) -> bool:
        """Say what is missing."""
        if not status.num_engines and status.state != PromptStatus.DURABLE:
            self._output.warn("no vLLM with the kvtier connector is attached to this daemon for this model")
            self._output.say(*HOW_TO_ATTACH, f"then capture it now:  {job.again}")
            return not job.warm or job.recipe.kind is SourceKind.TOKENS
        if status.num_confirmed < status.num_engines:
            self._output.warn(
                f"{status.num_confirmed} of {status.num_engines} engines have confirmed the pin within "
                f"{CONFIRM_TIMEOUT_S:g} s; read vLLM's log, then run: {job.again}"
            )
            return False
        if status.num_confirmed and not num_chunks:
            self._output.warn(f"{status.num_tokens} tokens are less than one chunk; pin a longer prompt")
            return False
        if status.state == PromptStatus.DURABLE and status.name != job.name:
            self._output.warn(
                f"{status.name} is durable, and has not taken the name yet; see kvtier history {job.name}"
            )
            return False
        return status.state == PromptStatus.DURABLE or not job.warm


def await_replacement(client: AdminClient, made: str, status: PromptStatus, output: Output) -> PromptStatus:
    """Wait until a version that is durable has the name of the pin that it replaces; return its status then.

    Args:
        made: The name of what was pinned, as the daemon answered; nothing is awaited if that is no version.
        status: Of it, now.

    Raises:
        KvtierError: No engine can use it.
    """
    version, ends_s = parse_version(made), time.monotonic() + REPLACE_TIMEOUT_S
    if version is None:
        return status
    name, number = version
    if status.error and not status.num_confirmed:
        raise KvtierError(f"vLLM cannot use it: {status.error}. The pin {name!r} that stands was not changed")
    while status.name != name and status.state == PromptStatus.DURABLE and time.monotonic() < ends_s:
        time.sleep(POLL_S)
        status = client.get(pin_id=status.pin_id)
    if status.name == name:
        output.say(f"replaced: {name}; the version before is {version_name(name, number - 1)}, and stays as cache")
    return status


def _explain(outcome: CaptureOutcome, job: PinJob, status: PromptStatus) -> str:
    numbers = summarize(status)
    progress = f"{numbers.num_durable_chunks} of {numbers.num_chunks} chunks are on disk"
    if outcome is CaptureOutcome.OVER_QUOTA:
        return f"{progress}: {state_meaning(status)}"
    if outcome is CaptureOutcome.TIMED_OUT:
        shown = job.made or job.name
        return f"{progress} after {job.timeout_s:g} s; the rest continues by itself; watch it with: kvtier show {shown}"
    return (
        f"{progress}, and vLLM has not offered the rest; they are captured when vLLM next computes them. If vLLM "
        f"is busy, run again later: {job.again}"
    )
